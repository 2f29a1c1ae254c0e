"""The updater: takes the queue in order, one update after the other, and publishes versions.

Every entry of the queue becomes one change: the strategy's decision (pure), a record in the
journal, and one commit that publishes, ends tasks and deletes what is done with. What is in the
journal has happened: trouble with Redis repeats the commit (which recognises a repetition) and
never the update, and a restarted updater goes on from the journal, publishes what it had not, and
recognises in the queue what it had done. An entry leaves the queue only once its record is on disk.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated

from aiohttp import web
from pydantic import Field

from fedstream.broker import blobs
from fedstream.broker.client import Client, Command, RedisSettings
from fedstream.broker.errors import ConfigError, OutOfMemory
from fedstream.broker.keys import Keys
from fedstream.broker.layout import Model
from fedstream.broker.lease import Lease
from fedstream.broker.ledger import Ledger
from fedstream.broker.messages import Version
from fedstream.broker.records import Commit, Run, ended, without
from fedstream.broker.streams import BLOCK_MS
from fedstream.runtime.backoff import pause
from fedstream.runtime.config import Section
from fedstream.runtime.leading import lead
from fedstream.runtime.service import Context, repeat
from fedstream.updater.changes import Change, Retained
from fedstream.updater.course import Course
from fedstream.updater.decider import LARGE, Decider
from fedstream.updater.ended import Ended
from fedstream.updater.intake import BATCH, Intake
from fedstream.updater.journal import JournalSettings
from fedstream.updater.metrics import Metrics
from fedstream.updater.progress import Progress
from fedstream.updater.publisher import Publisher
from fedstream.updater.recorder import Recorder
from fedstream.updater.recovery import LOST_S, Recovery
from fedstream.updater.strategies import StrategySettings

_SILENT_S = 600.0  # without a version


class UpdaterSettings(Section):
    """What the updater keeps and what it refuses."""

    keep_versions: Annotated[int, Field(ge=2)] = 16
    keep_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # the newest two are kept at any size
    max_norm: Annotated[float, Field(gt=0)] | None = None  # of an update's vector, Euclidean
    norm_factor: Annotated[float, Field(ge=0)] = 30.0  # over what is usual; 0: whatever it is
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    drain_s: Annotated[float, Field(gt=0)] = 20.0


class Updater:
    """The service. ``found`` makes a run that does not exist yet: its record and version 0."""

    role = "updater"

    def __init__(
        self,
        settings: UpdaterSettings,
        strategy: StrategySettings,
        journal: JournalSettings,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        found: Callable[[], tuple[Run, Model]],
    ) -> None:
        if not journal.weights and strategy.has_memory:
            raise ConfigError(
                f"journal.weights = false: {strategy.name} has a memory, which only the updates' "
                "weights could rebuild"
            )
        self._settings = settings
        self._rule = strategy
        self._journal = journal
        self._recorder = Recorder(journal, self._synced)
        self._found = found
        self._keys = keys
        self._client = Client(redis, name)
        self._ledger = Ledger(self._client, keys, name)
        self._lease = Lease(self._client, keys, self.role, name, seconds=settings.lease_s)
        self._publisher = Publisher(
            self._client, self._ledger, self._lease,
            keep_versions=settings.keep_versions, keep_bytes=settings.keep_bytes,
        )  # fmt: skip
        self._course = Course(strategy.build(), Ended(self._recorder.folder))
        self._intake = Intake(self._client, keys, self._course)
        self._heard = time.monotonic()  # when a version was made, or its absence told

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """None of its own."""
        return ()

    async def run(self, context: Context) -> None:
        """Leads, and works until stop."""
        self._context = context
        self._metrics = Metrics(context.registry)
        recorder = self._recorder
        self._metrics.journal.set_function(lambda: recorder.appended)
        self._metrics.unsynced.set_function(lambda: recorder.appended - recorder.safe)
        context.watch(self._client)
        self._recovery = Recovery(
            context=context, metrics=self._metrics, course=self._course, intake=self._intake,
            recorder=recorder, publisher=self._publisher, rule=self._rule, journal=self._journal,
            keys=self._keys, client=self._client, ledger=self._ledger, lease=self._lease,
            found=self._found,
        )  # fmt: skip
        self._decider = Decider(
            context=context, metrics=self._metrics, course=self._course, intake=self._intake,
            keys=self._keys, ledger=self._ledger, lease=self._lease,
            max_norm=self._settings.max_norm, norm_factor=self._settings.norm_factor,
            weights=self._journal.weights,
        )  # fmt: skip
        try:
            await lead(context, self._lease, self._work)
        finally:
            await self._intake.forget_fetches()
            await self._client.close()

    def _synced(self, seconds: float) -> None:
        self._metrics.sync.observe(seconds)

    async def _work(self) -> None:
        try:
            await repeat(self._context, "queue", self._step, within_s=120.0)
        finally:
            await self._recorder.close()
            self._course.index.close()

    async def _step(self) -> None:
        """One entry of the queue, or what has to come before it."""
        try:
            await self._next()
        except OutOfMemory:
            await self._make_room()
            raise

    async def _next(self) -> None:
        progress = self._course.progress
        if progress is None or self._recorder.head is None:
            await self._recovery.recover()
        elif self._course.unwritten:
            await self._go_on()  # first of all: what is not in the journal yet would count as lost
        elif self._lease.number != self._course.epoch:
            await self._recovery.compare(progress)
        elif self._course.pending and not self._may_wait(progress):
            await self._settle(*self._course.pending[0])
        elif self._recorder.is_full or self._course.finished != self._course.sealed:
            await self._recovery.begin_segment("continued")
        elif not self._intake.backlog:
            await self._read(progress)
        else:
            await self._take_batch(progress)

    # the queue

    async def _read(self, progress: Progress) -> None:
        """What is new in the queue. Nothing: is Redis where we left it, or did it go back?"""
        if await self._intake.read(BLOCK_MS):
            return
        await self._recorder.flush()
        if self._course.retained:
            await self._commit(progress)
            return
        await self._recovery.compare(progress)
        if self._course.ahead is not None and self._course.ahead.version > progress.state.version:
            await self._recovery.lost_for_good(self._course.ahead)
        elif await self._client.call("XLEN", self._keys.queue):
            self._intake.rewind()  # what we did is there again
        else:
            await self._see_to_room(progress.state.model.layout.nbytes)
            await self._see_to_silence()

    async def _take_batch(self, progress: Progress) -> None:
        """Decides on the next entries, one on top of the other."""
        course, backlog = self._course, self._intake.backlog
        most = max(1, min(BATCH, LARGE // max(1, progress.state.model.layout.nbytes)))
        finishing = False
        while backlog and len(course.unwritten) < most and not finishing:
            told = None
            if course.ahead is not None:
                # Asked first: behind a change there may be no trouble, its memory is written into.
                told = await self._ledger.digest(progress.state.version + 1)
            change = await self._decider.change(backlog[0], progress)
            if change is not None and course.ahead and not change.remakes(course.ahead, told):
                await self._recovery.lost_for_good(course.ahead)
                return
            backlog.popleft()
            if change is not None:
                course.decided(change)
                progress = change.after
                finishing = change.finish is not None

    def _may_wait(self, progress: Progress) -> bool:
        """Whether the next updates are decided on before these are committed: small models only,
        of which there may be more than four in memory."""
        small = progress.state.model.layout.nbytes <= blobs.CHUNK
        return bool(self._intake.backlog) and small and self._course.ahead is None

    async def _go_on(self) -> None:
        """Writes to the journal what was decided on, and meanwhile goes on without it.

        What was written before is committed, the next update is fetched, and a large model's chunks
        go to Redis. Trouble leaves undone what it struck, to be done in its turn.
        """
        changes = self._course.unwritten
        appending = asyncio.create_task(
            self._recorder.append([(one.record, one.payload) for one in changes]), name="journal"
        )
        try:
            await self._settle_all(list(self._course.pending))
            await self._intake.read_ahead(changes[0].after.state.model.layout)
            await self._write_ahead(changes[0])
        finally:
            with self._metrics.seconds.labels("journal").time():
                positions = await appending
            # Fewer, where the disk is full: the rest is tried again, and says so.
            self._course.unwritten = changes[len(positions) :]
            for change, position in zip(changes, positions, strict=False):
                self._happened(change, position)

    async def _settle_all(self, recorded: Sequence[tuple[Change, int]]) -> None:
        for change, position in recorded:
            if not await self._settle(change, position):
                return  # the rest comes to nothing without it

    def _happened(self, change: Change, position: int) -> None:
        """A change is in the journal: it is now what is."""
        run = self._course.run
        self._course.happened(change, position)
        if change.finish is not None and run is not None:
            self._recovery.finish(
                replace(run, state="finished", why=change.finish, finished=self._course.time)
            )
        end = change.end
        if end is not None and change.record is not None and end.weight is not None:
            self._context.trace(
                end.outcome, task=end.task, device=end.device, version=end.version,
                staleness=end.staleness, weight=end.weight,
            )  # fmt: skip

    # making it so in Redis

    async def _settle(self, change: Change, position: int) -> bool:
        """Publishes and commits what the journal has; trouble leaves it pending: whether it is."""
        publish = change.version
        if self._course.ahead is not None and publish is not None:
            if publish.version <= self._course.ahead.version:
                publish = None  # Redis has this very version
            else:
                self._course.ahead = None
        with self._metrics.seconds.labels("publish").time():
            if not await self._handed_out(change):
                return False
            ahead = await self._publisher.prepare(publish, change.after.state.model)
            done = await self._commit(change.after, change, position, publish, ahead)
        if done:
            self._adopt_change(change, publish)
        return done

    async def _commit(
        self,
        progress: Progress,
        change: Change | None = None,
        position: int = 0,
        publish: Version | None = None,
        ahead: Sequence[Command] = (),
    ) -> bool:
        """One commit, and what follows if it is not done: whether it is.

        It deletes from the queue what is done and on disk; the rest of that is retained.
        """
        done_with = [*self._course.retained]
        if change is not None:
            done_with.append(Retained(position, change.entry, change.blob))
        on_disk = bisect_right(done_with, self._recorder.safe, key=lambda one: one.position)
        safe = done_with[:on_disk]
        told = change.counted(self._course.told) if change else self._course.told
        commit = Commit(
            version=publish,
            held=tuple(one.device for one in progress.held),
            retained=len(done_with) - on_disk,
            mean_staleness=progress.mean_staleness,
            at=progress.state.version,
            ends=(change.end,) if change and change.end else (),
            journalled=told,
            before=ended(self._course.told),
            entries=tuple(one.entry for one in safe),
            updates=tuple(one.blob for one in safe if one.blob),
            retired=self._publisher.outlived(publish.size) if publish is not None else (),
            finish=change.finish if change else None,
        )
        done = await self._ledger.commit(self._lease.token, commit, ahead=ahead)
        if done.what == "done":
            self._course.retained = done_with[on_disk:]
            self._course.told, self._course.besides = told, without(done.counts, told)
            self._publisher.deleted(commit.retired)
            if done.finished != self._course.finished and len(self._course.pending) < 2:
                self._course.epoch = 0  # somebody ended it, or Redis forgot that it ended: compare
        elif done.what == "unwritten":
            self._publisher.forget_written()
        elif done.what == "lost":
            await pause(self._context.stop, LOST_S)  # until the lease is taken again
        else:
            self._course.epoch = 0  # Redis is behind: compare
        return done.what == "done"

    async def _handed_out(self, change: Change) -> bool:
        """Whether the change's device may have another task: trainers have what it has to know."""
        end = change.end
        if end is None or end.device is None or end.weight is None:
            return True  # nothing was used of it
        return await self._recovery.hand_out(change.after.state, {end.device})

    async def _write_ahead(self, change: Change) -> None:
        """Writes a large model while its update is being journalled."""
        model = change.after.state.model
        if (
            change.version is not None
            and model.layout.nbytes > blobs.CHUNK
            and not self._course.ahead
        ):
            await self._publisher.prepare(change.version, model)

    def _adopt_change(self, change: Change, published: Version | None) -> None:
        """A change is committed."""
        self._course.pending.popleft()
        in_use = {id(model) for model in self._course.models()}
        self._intake.free += [model for model in change.used if id(model) not in in_use]
        if change.end is not None:
            end = change.end
            self._metrics.updates.labels(end.outcome, end.reason).inc()
            if end.weight is not None:
                self._metrics.staleness.observe(end.staleness or 0)
                self._metrics.weight.observe(end.weight)
        if published is not None:
            self._heard = time.monotonic()
            self._publisher.published(published)
            self._metrics.version.set(published.version)
            for update in published.updates:
                self._context.trace(
                    "published", task=update.task, device=update.device, version=published.version
                )

    async def _see_to_room(self, size: int) -> None:
        """Nothing comes: perhaps because there is no room for it. Nobody else may free models."""
        used, limit = await self._ledger.memory()
        if limit and used + size > limit:
            await self._make_room()

    async def _see_to_silence(self) -> None:
        """Says so, once in a while, when no version is made although tasks are open."""
        now = time.monotonic()
        if now - self._heard < _SILENT_S or self._course.finished:
            return
        silent, self._heard = now - self._heard, now
        waiting = await self._client.call("HLEN", self._keys.open)
        if waiting:
            self._context.log.error(
                "tasks are open and none of them makes a version: see docs/how-to/alerts.md, "
                "FedstreamStalled", open=waiting, seconds=round(silent),
            )  # fmt: skip

    async def _make_room(self) -> None:
        """Redis is full: older models go before anything is written again."""
        removed = await self._publisher.make_room()
        if removed:
            self._context.log.warning("Redis is full: older models removed", models=removed)
