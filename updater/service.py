"""The updater: processes the queue in order and publishes model versions.

Every queue entry becomes one change: the strategy's decision (pure), a journal record, and one
commit that publishes the version, ends tasks and deletes processed entries. Once in the journal, a
change is final: if Redis fails, the updater repeats the commit, which is idempotent, and never the
update. A restarted updater resumes from the journal, publishes what it had not yet published, and
recognises queue entries that it has already processed. An entry leaves the queue only once its
record is on disk.
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
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.commands import Command
from fedstream.broker.errors import ConfigError, OutOfMemory
from fedstream.broker.keys import Keys
from fedstream.broker.layout import Model
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.messages import Version
from fedstream.broker.records import Commit, Run, ended, without
from fedstream.broker.streams import BLOCK_MS
from fedstream.journal import JournalSettings
from fedstream.journal.ended import Ended
from fedstream.journal.progress import Progress
from fedstream.journal.recorder import Recorder
from fedstream.runtime.backoff import pause
from fedstream.runtime.config import Section
from fedstream.runtime.leading import lead
from fedstream.runtime.service import Context, repeat
from fedstream.strategies import StrategySettings
from fedstream.updater.changes import Change, Retained
from fedstream.updater.course import Course
from fedstream.updater.decider import LARGE, Decider
from fedstream.updater.intake import BATCH, Intake
from fedstream.updater.metrics import Metrics
from fedstream.updater.publisher import Publisher
from fedstream.updater.recovery import LOST_S, Recovery

_SILENT_S = 600.0  # without a version, until that is logged


class UpdaterSettings(Section):
    """What the updater keeps and what it refuses."""

    keep_versions: Annotated[int, Field(ge=2)] = 16
    keep_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # the newest two are kept at any size
    max_norm: Annotated[float, Field(gt=0)] | None = None  # Euclidean norm of an update's vector
    norm_factor: Annotated[float, Field(ge=0)] = 30.0  # times the usual size; 0: no limit
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    drain_s: Annotated[float, Field(gt=0)] = 20.0


class Updater:
    """The updater service. ``found`` creates a missing run: its record and version 0."""

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
        self._ledger = UpdaterLedger(self._client, keys, name)
        self._lease = Lease(self._client, keys, self.role, name, seconds=settings.lease_s)
        self._publisher = Publisher(
            self._client, self._ledger, self._lease,
            keep_versions=settings.keep_versions, keep_bytes=settings.keep_bytes,
        )  # fmt: skip
        self._course = Course(strategy.build(), Ended(self._recorder.folder))
        self._intake = Intake(self._client, keys, self._course)
        self._heard = time.monotonic()  # of the last version, or of the last log that none is made

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """Return no routes: the updater has none of its own."""
        return ()

    async def run(self, context: Context) -> None:
        """Acquire the lease, and process the queue until told to stop."""
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
        """Process a batch of queue entries, or do whatever has to come first."""
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
            await self._go_on()  # first: a change not yet journalled would be taken for lost
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
        """Read new queue entries; if there are none, check that Redis has not fallen back."""
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
            self._intake.rewind()  # processed entries are back in the queue
        else:
            await self._see_to_room(progress.state.model.layout.nbytes)
            await self._see_to_silence()

    async def _take_batch(self, progress: Progress) -> None:
        """Decide on the next entries, each on top of the one before."""
        course, backlog = self._course, self._intake.backlog
        most = max(1, min(BATCH, LARGE // max(1, progress.state.model.layout.nbytes)))
        finishing = False
        while backlog and len(course.unwritten) < most and not finishing:
            told = None
            if course.ahead is not None:
                # Ask first: deciding writes into the strategy's memory, so nothing may fail after.
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
        """Whether to decide on the next updates before these are committed.

        Only for small models, of which more than four may be in memory."""
        small = progress.state.model.layout.nbytes <= blobs.CHUNK
        return bool(self._intake.backlog) and small and self._course.ahead is None

    async def _go_on(self) -> None:
        """Journal the changes decided on, and meanwhile get on with other work.

        Commits the changes journalled before, prefetches the next update, and writes a large
        model's chunks to Redis. Whatever fails here is left to its regular turn.
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
            # Fewer if the disk is full: the rest is retried, which raises if nothing fits.
            self._course.unwritten = changes[len(positions) :]
            for change, position in zip(changes, positions, strict=False):
                self._happened(change, position)

    async def _settle_all(self, recorded: Sequence[tuple[Change, int]]) -> None:
        for change, position in recorded:
            if not await self._settle(change, position):
                return  # the rest depends on it

    def _happened(self, change: Change, position: int) -> None:
        """Apply a change that is in the journal, and therefore final."""
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

    # committing to Redis

    async def _settle(self, change: Change, position: int) -> bool:
        """Publish and commit a journalled change; return False if it is still pending."""
        publish = change.version
        if self._course.ahead is not None and publish is not None:
            if publish.version <= self._course.ahead.version:
                publish = None  # Redis already has this version
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
        """Commit once, and react if that is not accepted; return whether it was.

        The commit deletes from the queue the processed entries whose records are on disk; the other
        processed entries are retained.
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
                self._course.epoch = 0  # someone ended the run, or Redis forgot its end: compare
        elif done.what == "unwritten":
            self._publisher.forget_written()
        elif done.what == "lost":
            await pause(self._context.stop, LOST_S)  # until the lease is taken again
        else:
            self._course.epoch = 0  # Redis is behind: compare
        return done.what == "done"

    async def _handed_out(self, change: Change) -> bool:
        """Hand out the vector that the change's device needs before it gets another task.

        Returns False if Redis was emptied meanwhile.
        """
        end = change.end
        if end is None or end.device is None or end.weight is None:
            return True  # the update was not used
        return await self._recovery.hand_out(change.after.state, {end.device})

    async def _write_ahead(self, change: Change) -> None:
        """Write a large model while its update is being journalled."""
        model = change.after.state.model
        if (
            change.version is not None
            and model.layout.nbytes > blobs.CHUNK
            and not self._course.ahead
        ):
            await self._publisher.prepare(change.version, model)

    def _adopt_change(self, change: Change, published: Version | None) -> None:
        """Take note that a change was committed."""
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
        """Free older models if there is no room in Redis for another update.

        That may be why the queue is empty, and only the updater may free models.
        """
        used, limit = await self._ledger.memory()
        if limit and used + size > limit:
            await self._make_room()

    async def _see_to_silence(self) -> None:
        """Log an error now and then while tasks are open but no version is made."""
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
        """Delete older models: Redis is full, and nothing can be written before."""
        removed = await self._publisher.make_room()
        if removed:
            self._context.log.warning("Redis is full: older models removed", models=removed)
