"""Bringing what the journal has to Redis: commits, in order, or everything at once."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from fedstream.broker import blobs
from fedstream.broker.commands import Command
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.messages import Version
from fedstream.broker.records import Commit, ended
from fedstream.journal.progress import Progress
from fedstream.journal.recorder import Recorder
from fedstream.runtime.backoff import pause
from fedstream.runtime.service import Context
from fedstream.strategies import Strategy
from fedstream.updater.metrics import UpdaterMetrics
from fedstream.updater.publisher import Publisher, blob_of, version_of
from fedstream.updater.state import Change, RunState
from fedstream.wire import Format

_LOST_S = 0.1  # between two looks at an emptied Redis


@dataclass(frozen=True)
class Retained:
    """A processed entry that stays in the queue until its record is on disk."""

    position: int  # after the record
    entry: str
    blob: str | None


@dataclass(frozen=True)
class PendingCommit:
    """A change that is in the journal, and not committed yet."""

    change: Change
    position: int  # after the record
    journalled: Mapping[str, int]  # tasks up to this one, by how they ended


@dataclass(kw_only=True)
class Commits:
    """The changes in the journal that Redis has yet to accept, and the scripts that tell it."""

    context: Context
    metrics: UpdaterMetrics
    recorder: Recorder
    publisher: Publisher
    ledger: UpdaterLedger
    lease: Lease
    format: Format  # of published models
    pending: deque[PendingCommit] = field(default_factory=deque)  # oldest first
    retained: list[Retained] = field(default_factory=list)  # oldest first
    told: Mapping[str, int] = field(default_factory=dict)  # the journal's ends, as Redis has them
    told_quarantines: int = 0  # control entries about quarantines that Redis was told

    def begin_from(self, state: RunState) -> None:
        """Redis has this state, or is about to be compared with it: nothing is pending."""
        self.pending.clear()
        self.retained.clear()
        self.told, self.told_quarantines = state.journalled, state.quarantines.taken
        self.publisher.forget_written()

    # one change

    async def settle(self, state: RunState) -> tuple[RunState, Change | None]:
        """Publish and commit the oldest pending change; return it if Redis accepted it."""
        first = self.pending[0]
        change, strategy = first.change, state.strategy
        publish, end = change.version, change.end
        if state.ahead is not None and publish is not None:
            if publish.version <= state.ahead.version:
                publish = None  # Redis already has this version
            else:
                state = state.caught_up()
        with self.metrics.timed("publish"):
            device = None if end is None or end.weight is None else end.device  # of a used update
            # The device needs its vector before it gets another task.
            if device is not None and not await self.hand_out(change.after, strategy, {device}):
                return state, None
            ahead = await self.publisher.prepare(publish, change.given)
            state, done = await self._commit(state, first, publish, ahead)
        if not done:
            return state, None
        self.pending.popleft()
        if end is not None:
            self.metrics.updates.labels(end.outcome, end.reason).inc()
            if end.weight is not None:
                self.metrics.staleness.observe(end.staleness or 0)
                self.metrics.weight.observe(end.weight)
        if publish is not None:
            self.metrics.version.set(publish.version)
            for update in publish.updates:
                self.context.trace(
                    "published", task=update.task, device=update.device, version=publish.version
                )
        return state, change

    async def write_ahead(self, change: Change, state: RunState) -> None:
        """Write a large model of a change that is being journalled."""
        version = change.version
        if version is not None and version.size > blobs.CHUNK and state.ahead is None:
            await self.publisher.prepare(version, change.given)

    async def release(self, state: RunState) -> RunState:
        """Delete the retained entries whose records are on disk by now."""
        state, _ = await self._commit(state)
        return state

    async def _commit(
        self,
        state: RunState,
        pending: PendingCommit | None = None,
        publish: Version | None = None,
        ahead: Sequence[Command] = (),
    ) -> tuple[RunState, bool]:
        """Commit once, and react if that is not accepted; return whether it was.

        The commit deletes from the queue the processed entries whose records are on disk; the other
        processed entries are retained.
        """
        change, progress, done_with, told = None, state.progress, [*self.retained], self.told
        if pending is not None:
            change, progress, told = pending.change, pending.change.after, pending.journalled
            done_with.append(Retained(pending.position, change.entry, change.blob))
        quarantines = state.quarantines
        on_disk = bisect_right(done_with, self.recorder.safe, key=lambda one: one.position)
        safe = done_with[:on_disk]
        commit = Commit(
            version=publish,
            held=tuple(one.device for one in progress.held),
            retained=len(done_with) - on_disk,
            mean_staleness=progress.mean_staleness,
            at=progress.state.version,
            ends=(change.end,) if change and change.end else (),
            journalled=told,
            before=ended(self.told),
            entries=tuple(one.entry for one in safe),
            updates=tuple(one.blob for one in safe if one.blob),
            retired=self.publisher.outlived(publish.size) if publish is not None else (),
            finish=change.finish if change else None,
            quarantines=quarantines if quarantines.taken != self.told_quarantines else None,
            quarantines_before=self.told_quarantines,
        )
        done = await self.ledger.commit(self.lease.token, commit, ahead=ahead)
        if done.what == "done":
            self.retained, self.told = done_with[on_disk:], told
            self.told_quarantines = quarantines.taken
            if publish is not None:
                self.publisher.published(publish, commit.retired)
            state = state.counted(done.counts, told)
            if done.finished != state.finished and len(self.pending) < 2:
                return state.to_compare(), True  # someone ended the run, or Redis forgot its end
        elif done.what == "unwritten":
            self.publisher.forget_written()
        elif done.what == "lost":
            await pause(self.context.stop, _LOST_S)  # until the lease is taken again
        else:
            return state.to_compare(), False  # Redis is behind
        return state, done.what == "done"

    # everything

    async def publish_again(self, state: RunState, why: str) -> RunState | None:
        """Publish the newest version, and the counts, that Redis lacks.

        ``why``: what it lost; '': nothing.
        None if Redis was emptied, or fell back, once more meanwhile.
        """
        # Both now: the lease may be retaken meanwhile, and the version would have another epoch.
        epoch, token = self.lease.number, self.lease.token
        if state.counts and why:
            self.context.log.error("Redis lost versions: publishing the newest", found=why)
        progress, model = state.progress, state.progress.state.model
        version, payload = await asyncio.to_thread(
            version_of, model, self.format, state.strategy.sends,
            version=state.version, time=state.time, epoch=epoch, digest=state.digest,
            blob=blob_of(state.version, epoch, self.lease.nonce), updates=state.made,
        )  # fmt: skip
        await self.publisher.write(version, payload)
        # Readers of the version need the vectors.
        if not await self.hand_out(progress, state.strategy):
            return None
        reply = await self.ledger.create(
            token, state.run, version, counts=state.counts, journalled=state.journalled,
            done=state.ends.get, held=tuple(one.device for one in progress.held),
            mean_staleness=progress.mean_staleness, quarantines=state.quarantines,
        )  # fmt: skip
        if reply.what != "created":
            await pause(self.context.stop, _LOST_S)
            return None
        await self.publisher.look()
        return state.counted(reply.counts, state.journalled).agreeing(epoch)

    # devices' vectors

    async def hand_out(
        self, progress: Progress, strategy: Strategy, devices: Set[int] | None = None
    ) -> bool:
        """Hand out the vectors of these devices, or of all (SCAFFOLD's c_i).

        Returns False if Redis was emptied meanwhile.
        """
        vectors = progress.state.memory.devices
        if vectors is None or not strategy.controls:
            return True
        among = vectors.heard if devices is None else vectors.heard & devices
        done = await self.publisher.hand_out(vectors, among)
        if not done:
            await pause(self.context.stop, _LOST_S)  # until the lease is taken again
        return done
