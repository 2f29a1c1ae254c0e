"""The leading updater's loop: it decides on updates, journals them and commits them.

Each step does the one thing that is due. A failed step leaves the state consistent, and the next
step continues there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from fedstream.broker.client import Client
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.streams import BLOCK_MS, Look, time_in
from fedstream.core.errors import BadMessage, OutOfMemory
from fedstream.core.layout import Payload
from fedstream.core.messages import SetQuarantine
from fedstream.core.records import Head
from fedstream.journal import QuarantineSet
from fedstream.journal.recorder import Recorder
from fedstream.runtime.service import Context
from fedstream.updater.commit import Commits, PendingCommit, Publisher
from fedstream.updater.decider import Decider, need_of
from fedstream.updater.intake import Intake, is_small, together
from fedstream.updater.metrics import UpdaterMetrics
from fedstream.updater.reconcile import Confirm, Finish, Publish, Refuse, Remake, action
from fedstream.updater.recovery import Recovery
from fedstream.updater.state import Change, RunState
from fedstream.updater.suspects import Suspicions

if TYPE_CHECKING:
    from fedstream.updater.sums import Sums

_SILENT_S = 600.0  # without a version, before this is logged


@dataclass(kw_only=True)
class Upkeep:
    """Frees older models when Redis is full, logs when no version is made, asks for quarantines."""

    context: Context
    client: Client
    ledger: UpdaterLedger
    publisher: Publisher
    heard: float = field(default_factory=time.monotonic)  # time of the last version or log line

    async def look(self, state: RunState) -> None:
        """Free models if Redis is full, and log a long silence. Call it when idle."""
        used, limit = await self.ledger.memory()
        if limit and used + state.layout.nbytes > limit:
            # A full Redis may be why the queue is empty, and only the updater may delete models.
            await self.make_room()
        await self._break_silence(state)

    async def ask(self, wanted: SetQuarantine) -> None:
        """Add a control entry to the queue, which this updater takes in order with the updates."""
        await self.client.call("XADD", self.ledger.keys.queue, "*", "m", wanted.encode())

    async def make_room(self) -> None:
        """Delete older models, as a full Redis accepts no write."""
        removed = await self.publisher.make_room()
        if removed:
            self.context.log.warning("Redis is full: older models removed", models=removed)

    async def _break_silence(self, state: RunState) -> None:
        """Log an error now and then while tasks are open but no version is made."""
        now = time.monotonic()
        if now - self.heard < _SILENT_S or state.finished:
            return
        silent, self.heard = now - self.heard, now
        waiting = await self.client.call("HLEN", self.ledger.keys.open)
        if waiting:
            self.context.log.error(
                "tasks are open but no version is made: see docs/how-to/alerts.md, "
                "FedstreamStalled",
                open=waiting,
                seconds=round(silent),
            )


@dataclass(frozen=True, slots=True)
class DecidedChange:
    """A change, and the states before and after it."""

    change: Change
    before: RunState
    after: RunState


@dataclass(kw_only=True)
class Loop:
    """Advances the state of the run, one step at a time."""

    context: Context
    metrics: UpdaterMetrics
    ledger: UpdaterLedger
    lease: Lease
    recorder: Recorder
    publisher: Publisher
    intake: Intake
    decider: Decider
    commits: Commits
    recovery: Recovery
    upkeep: Upkeep
    suspicions: Suspicions
    sums: Sums | None = None  # of a private run
    state: RunState = field(init=False)  # set by the recovery
    unwritten: list[DecidedChange] = field(default_factory=list)  # not in the journal yet

    async def begin(self) -> bool:
        """Recover the run's state; return False if another updater was faster."""
        try:
            state = await self.recovery.recover()
        except OutOfMemory:
            await self.upkeep.make_room()
            raise
        if state is not None:
            self._go_on_from(state)
        return state is not None

    async def step(self) -> None:
        """Do one thing: the first in the order below that is due."""
        state, backlog = self.state, self.intake.backlog
        try:
            if self.unwritten:  # first, as the comparison would count an unwritten change as lost
                await self._write()
            elif state.compared != self.lease.number:
                await self._compare()
            elif self.commits.pending:
                await self._settle(self._look())
            elif self.sums is not None and state.is_due:
                await self._open_sum(self.sums)
            elif self.recorder.is_full or state.finished != state.sealed:
                self.state = await self.recovery.begin_segment(state, "continued")
            elif backlog:
                await self._decide()
            elif not await self.intake.read(BLOCK_MS):
                await self._rest()
        except OutOfMemory:
            await self.upkeep.make_room()
            raise

    # an update: decided on, written to the journal, settled in Redis

    async def _decide(self) -> None:
        """Decide on the next entries, each on top of the previous one's state."""
        state, backlog, ahead = self.state, self.intake.backlog, self.state.ahead
        most, finishing = together(state.layout), False
        while backlog and len(self.unwritten) < most and not finishing and not state.is_due:
            entry, message = backlog[0].entry, backlog[0].message
            if isinstance(message, BadMessage):
                await self.ledger.bury(self.ledger.keys.queue, "", entry, str(message))
                backlog.popleft()
                continue
            need = need_of(entry, message, state)
            if need and not self.recorder.says(need):
                if not self.unwritten:  # else they are written first
                    self.state = await self.recovery.begin_segment(state, "continued", needs={need})
                return
            published_digest = None
            if ahead is not None:
                # Ask first: the question may fail, and the update would be mixed in for nothing.
                published_digest = await self.ledger.digest(state.version + 1)
            change = await self.decider.change(entry, message, state)
            if ahead is not None and change and not change.remakes(ahead, published_digest):
                await self._adopt(ahead)
                return
            backlog.popleft()
            if change is not None:
                after = state.after(change)
                self.unwritten.append(DecidedChange(change, state, after))
                state.ends.decide(change)
                state = after
                if (asked := self.suspicions.after(change, state)) is not None:
                    await self.upkeep.ask(asked)
                finishing = change.finish is not None

    async def _open_sum(self, sums: Sums) -> None:
        """Have the sum of a private batch opened, and quarantine the devices that prevent sums.

        The batch is on disk first, as the helper opens no other with these updates.
        """
        state, ahead = self.state, self.state.ahead
        await self.recorder.flush()
        await self.recorder.check_last()
        published_digest = None
        if ahead is not None:
            published_digest = await self.ledger.digest(state.version + 1)
        change, quarantine = await self.decider.open_sum(sums, state)
        if ahead is not None and not change.remakes(ahead, published_digest):
            await self._adopt(ahead)
            return
        self.unwritten.append(DecidedChange(change, state, state.after(change)))
        for asked in (quarantine, sums.suspects(self.unwritten[-1].after)):
            if asked is not None:
                await self.upkeep.ask(asked)

    async def _write(self) -> None:
        """Write the decided changes to the journal.

        For large models, this meanwhile settles earlier changes, prefetches the next update and
        writes the model's chunks to Redis. An action that fails is tried again by the step that it
        belongs to.
        """
        decided, state = self.unwritten, self.state
        records = [(one.change.record, one.change.payload) for one in decided]
        appending: Awaitable[list[int]] = self.recorder.append(records)
        try:
            if self.commits.pending or not is_small(state.layout):
                appending = asyncio.ensure_future(appending)
                await self._settle()
                await self.intake.read_ahead(state.layout, state.ends)
                await self.commits.write_ahead(decided[0].change, self.state)
        finally:
            with self.metrics.timed("journal"):
                positions = await appending
            # Fewer if the disk is full: the rest is retried, which raises if nothing fits.
            self.unwritten = decided[len(positions) :]
            for one, position in zip(decided, positions, strict=False):
                self._written(one, position)

    def _written(self, decided: DecidedChange, position: int) -> None:
        """Apply a journalled and therefore final change."""
        change = decided.change
        self.state.ends.journal(change)
        self.state = decided.after if self.state is decided.before else self.state.after(change)
        self.commits.pending.append(PendingCommit(change, position, self.state.journalled))
        if change.finish is not None:
            self.context.log.info("run finished", why=change.finish)
        record = change.record
        if isinstance(record, QuarantineSet):
            self.context.log.warning(
                "devices released" if record.release else "devices quarantined",
                devices=list(record.devices),
                why=record.why,
                version=record.version,
            )
        end = change.end
        if end is not None and change.record is not None and end.weight is not None:
            self.context.trace(
                end.outcome,
                since=time_in(change.entry),
                task=end.task,
                device=end.device,
                version=end.version,
                staleness=end.staleness,
                weight=end.weight,
            )

    async def _settle(self, look: Look | None = None) -> None:
        """Commit the journalled changes in order, until Redis refuses some.

        ``look``: a read of the queue in the first exchange.
        """
        while self.commits.pending:
            self.state, changes = await self.commits.settle(self.state, look)
            if not changes:
                return  # later changes depend on these
            look = None
            in_use: list[Payload] = [*self.state.progress.state.models()]
            waiting = [one.change for one in self.commits.pending]
            for other in (*waiting, *(one.change for one in self.unwritten)):
                in_use += other.needs()
            left = (one for change in changes for one in change.leaves())
            self.intake.spares.take_back(left, in_use)
            if any(one.version is not None for one in changes):
                self.upkeep.heard = time.monotonic()

    def _look(self) -> Look | None:
        """A read of the queue to send with a commit, if reading is the next step.

        None while a read is under way: it may have been sent with an earlier commit, after which a
        later commit failed.
        """
        busy = self.recorder.is_full or self.state.finished != self.state.sealed
        if busy or self.intake.backlog or self.intake.looking is not None:
            return None
        return self.intake.look(BLOCK_MS)

    # nothing to do

    async def _rest(self) -> None:
        """With nothing to do, sync the journal, and check that Redis has not fallen back."""
        await self.recorder.flush()
        if self.commits.retained:
            self.state = await self.commits.release(self.state)
            return
        await self._compare()
        ahead = self.state.ahead
        if ahead is not None and ahead.version > self.state.version:
            await self._adopt(ahead)
        elif await self.intake.left():
            self.intake.rewind()  # processed entries are back in the queue
        else:
            await self.upkeep.look(self.state)

    # Redis and the journal differ

    async def _compare(self) -> None:
        """Reconcile Redis with the journal: publish the newest version if Redis lacks it."""
        epoch, commits = self.lease.number, self.commits
        run, head = await self.recovery.seen()
        pending = [one.change for one in commits.pending]
        compared = partial(
            action,
            run=run,
            head=head,
            told=commits.told,
            told_quarantines=commits.told_quarantines,
            pending=pending,
        )
        todo = compared(self.state)
        if isinstance(todo, Finish):
            self.state = self.state.ended(todo.run)
            self.context.log.info("run finished", why=todo.run.why)
            todo = compared(self.state)
        state = self.state
        match todo:
            case Publish():
                await self._publish_again(todo.found if todo.lost else "")
                return
            case Refuse():
                await self.recorder.check_last()  # our successor may have made Redis's version
                raise self.recovery.foreign(todo.found)
            case Remake(head):
                await self.recorder.check_last()
                if state.ahead is None:
                    self.context.log.error(
                        "the journal lost its end: making the versions again from the queue",
                        journal=state.version,
                        redis=head.version,
                    )
                self.state = state.behind(head)
            case Confirm(head):
                if not await self.publisher.keep(head, state.layout):
                    self.metrics.repaired.inc()
                    self.context.log.error(
                        "the newest model is gone from Redis", version=head.version
                    )
                    await self._publish_again(f"version {head.version} without its model")
                    return
                if epoch != state.compared:
                    await self.recorder.check_last()
                    if not await commits.hand_out(state.progress, state.strategy):
                        return  # Redis was emptied
        await self.publisher.look()
        self.state = self.state.agreeing(epoch)

    async def _publish_again(self, why: str) -> None:
        """Publish the state and continue from it. ``why``: the loss to log; '': none."""
        await self.recorder.check_last()
        self.state = self.state.caught_up()
        published = await self.commits.publish_again(self.state, why)
        if published is not None:
            await self.intake.forget_fetches()
            self._go_on_from(published)

    async def _adopt(self, ahead: Head) -> None:
        """Continue from Redis's newest model, as the end of the journal is lost."""
        adopted = await self.recovery.adopt(self.state, ahead)
        if adopted is not None:
            self.unwritten = []  # decided on top of a lost version
            self._go_on_from(adopted)

    def _go_on_from(self, state: RunState) -> None:
        """Continue from a state, reading the queue from its beginning."""
        self.state = state
        self.commits.begin_from(state)
        self.intake.rewind()
        self.metrics.version.set(state.version)
