"""Taking over a run, and reconciling Redis with the journal.

A restarted updater resumes the run where the journal ends. Redis may be behind that, empty, or
ahead of a journal that lost its end: :meth:`Recovery.compare` finds out, and repairs what it can.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from fedstream.broker import blobs, reasons
from fedstream.broker.client import Client
from fedstream.broker.errors import ConfigError, NoRun
from fedstream.broker.keys import Keys
from fedstream.broker.layout import Layout, Model
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.messages import Version
from fedstream.broker.records import End, Head, Run, ended, without
from fedstream.journal import (
    JournalError,
    JournalSettings,
    Segment,
    SegmentEnd,
    SegmentHead,
    name_of,
    segments,
)
from fedstream.journal.norms import Norms
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import Recovered, recovered, standing_of
from fedstream.journal.recorder import Recorder
from fedstream.runtime.backoff import pause
from fedstream.runtime.service import Context
from fedstream.strategies import (
    DeviceVectors,
    Memory,
    State,
    StrategySettings,
    strategy_of,
    without_batch,
)
from fedstream.updater import changes
from fedstream.updater.course import Course
from fedstream.updater.intake import Intake
from fedstream.updater.metrics import Metrics
from fedstream.updater.publisher import Publisher

T = TypeVar("T")

LOST_S = 0.1  # between two looks at an emptied Redis
_BEAT_S = 10.0  # between heartbeats during long work


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Reconciles the journal, Redis and ``course``."""

    context: Context
    metrics: Metrics
    course: Course
    intake: Intake
    recorder: Recorder
    publisher: Publisher
    rule: StrategySettings
    journal: JournalSettings
    keys: Keys
    client: Client
    ledger: UpdaterLedger
    lease: Lease
    found: Callable[[], tuple[Run, Model]]

    # from the journal

    async def recover(self) -> None:
        """Resume the run from the journal, or create it."""
        if not await self._claim():
            return  # another updater was faster: the lease's loop will notice
        chain = await asyncio.to_thread(segments, self.recorder.folder)
        try:
            run, head = await self._seen()
            if chain:
                await self._resume(chain, run, head)
            elif run is None or head is None:
                await self._open_index("", [])
                await self._begin()
            elif self.journal.adopt:
                await self._open_index("", [])
                await self._adopt(run, head)
            else:
                raise ConfigError(
                    f"journal.dir: there is no journal in {self.recorder.folder}, but run "
                    f"{self.keys.name!r} is in Redis at {self.client.address}: name the folder "
                    "that holds its journal, or begin a new one with Redis's newest model: --adopt"
                )
        finally:
            for segment in chain:
                segment.close()

    async def _open_index(self, lineage: str, chain: list[Segment]) -> None:
        """Open the index of the journal's ended tasks; log what can't be read."""
        for why in await self._patiently(lambda: self.course.index.open(lineage, chain)):
            self.context.log.error("tasks that ended long ago are not known", why=why)

    async def _claim(self) -> bool:
        """Claim the journal before reading it; return whether it is ours.

        From then on, the leader of an older epoch commits nothing that is missing from what is read
        now, even if Redis forgot who leads.
        """
        newest = await self.recorder.newest_epoch()
        if self.lease.number <= newest and not await self.lease.acquire(at_least=newest):
            return False
        await self.recorder.claim(self.lease.number)
        return True

    async def _seen(self) -> tuple[Run | None, Head | None]:
        """The run and its head as Redis has them; None for both if it has no run."""
        try:
            return await self.ledger.run(), await self.ledger.head()
        except NoRun:
            return None, None

    async def _begin(self) -> None:
        """Begin a new run, with version 0 as the journal's first checkpoint."""
        run, model = await self._patiently(self.found)
        self.course.run = replace(run, lineage=secrets.token_hex(8))
        progress = Progress(State(0, model))
        self._go_on_from(progress, model.digest(), time.time())
        await self.begin_segment("begun")
        self.context.log.info(
            "run begun", strategy=run.strategy, parameters=run.layout.parameters,
            bytes=run.layout.nbytes,
        )  # fmt: skip

    async def _resume(self, chain: list[Segment], run: Run | None, head: Head | None) -> None:
        """Resume the run: rebuild the newest version from the journal."""
        newest = chain[-1]
        self._check_journal(newest.head, run)
        began = time.monotonic()
        await self._open_index(newest.head.lineage, chain)
        found = await self._patiently(lambda: recovered(newest))
        if found.progress is None:  # recorded without weights: only Redis has the newest model
            if self.journal.adopt and run and head and head.version > found.version:
                self._recall(found)
                await self._adopt(run, head, norms=found.norms, after=found.ending)
                return
            found = await self._from_redis(newest, found, head)
        self._take_over(found, run)
        await self.begin_segment("continued", after=found.ending)
        self.context.log.info(
            "recovered", version=found.version, records=found.records,
            torn_bytes=found.torn_bytes, reweighed=found.reweighed,
            seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip
        if found.torn is not None and found.torn.behind:
            self.context.log.error(
                "the journal's end is torn: what Redis has of it is made again",
                torn=f"{found.torn.place}{found.torn.lost}",
            )

    async def _from_redis(self, newest: Segment, found: Recovered, head: Head | None) -> Recovered:
        """Complete a journal without weights by Redis's model, or by a checkpoint's if adopting."""
        before = found.checkpoint
        if head is not None:
            # If the next version was journalled but not published, the queue has its update.
            digest = head.digest
            until = await self._patiently(lambda: recovered(newest, digest))
            if (until.version, until.digest) == (head.version, head.digest):
                model = Model(before.state.model.layout)
                await self.publisher.read(head, model)
                until.progress = Progress(
                    State(head.version, model), (), head.mean_staleness, until.norms
                )
                return until
        if not self.journal.adopt:
            there = f"has version {head.version}" if head else "has none"
            raise ConfigError(
                f"the journal in {self.recorder.folder} was recorded without weights "
                f"(journal.weights = false) and ends with version {found.version}, Redis at "
                f"{self.client.address} {there}: go on from Redis's version if it is newer, else "
                f"from the checkpoint of version {before.state.version}, with --adopt"
            )
        self.context.log.error(
            "going back to a checkpoint's model", model_of=before.state.version,
            as_version=found.version + 1,
        )  # fmt: skip
        found.version, found.digest = found.version + 1, before.state.model.digest()
        found.time, found.made = time.time(), ()
        found.progress = Progress(State(found.version, before.state.model), norms=found.norms)
        return found

    def _check_journal(self, head: SegmentHead, run: Run | None) -> None:
        """Raise ConfigError unless the journal is this run's."""
        if head.run != self.keys.name:
            raise self._foreign(f"the journal of run {head.run!r}", here=True)
        if run is not None and run.lineage != head.lineage:
            raise self._foreign("a run of another lineage than the journal")
        if head.strategy.get("name") != self.rule.name:
            raise ConfigError(
                f"strategy.name: run {self.keys.name!r} was created with "
                f"{head.strategy.get('name')}, not {self.rule.name}; use another run.name and "
                "journal.dir"
            )
        was, now = strategy_of(head.strategy, head.devices), self.rule.build(head.devices)
        if was.devices != now.devices:
            raise ConfigError(
                f"strategy.devices: run {self.keys.name!r} was created with {was.devices}, not "
                f"{now.devices}: a mean over all of them cannot change its number"
            )

    def _foreign(self, what: str, *, here: bool = False) -> ConfigError:
        where = self.recorder.folder if here else f"Redis at {self.client.address}"
        return ConfigError(
            f"run {self.keys.name!r}, journal in {self.recorder.folder}: {where} holds {what}; "
            "name the right folder with journal.dir, or the right run, or purge the run in Redis "
            "to go on from the journal"
        )

    def _take_over(self, found: Recovered, run: Run | None) -> None:
        """Set the run's state to what the journal says."""
        if found.progress is None:
            raise RuntimeError("a run without a model")
        head = found.head
        self.course.run = Run(
            layout=Layout.decode(head.layout), strategy=self.rule.name, task=head.task,
            devices=head.devices, versions=run.versions if run else head.versions, seed=head.seed,
            created=head.created, max_staleness=self.course.strategy.max_staleness,
            sends=self.course.strategy.sends, lineage=head.lineage,
            state="finished" if found.finished else "running", why=found.finished,
            finished=found.time if found.finished else None,
        )  # fmt: skip
        if run is not None and run.state == "finished":
            self.course.run = run
        self._recall(found)
        self.course.told, self.course.besides = found.journalled, found.counts
        self.course.made = found.made
        self.recorder.stored = found.stored
        self._go_on_from(found.progress, found.digest, found.time)

    def _recall(self, found: Recovered) -> None:
        """Remember the tasks and rounds that ended according to the journal."""
        self.course.done, self.course.forgotten = {}, found.forgotten
        self.course.rounds = dict.fromkeys(found.rounds)
        for end in found.done.values():
            self.course.remember(end)

    async def _adopt(
        self,
        run: Run,
        head: Head,
        *,
        norms: Norms | None = None,
        after: SegmentEnd | None = None,
    ) -> None:
        """Go on from Redis's newest model in a new segment, without what the journal lost.

        ``norms``: of the newest updates in the journal; None: there is no journal. ``after``: as in
        :meth:`begin_segment`.
        """
        model = Model(run.layout)
        await self.publisher.read(head, model)
        ended, counts = await self.ledger.ended(), dict((await self.ledger.look()).counts)
        # The devices' vectors are as good as before; a batch begins anew.
        known = self.course.progress.state.memory.devices if self.course.progress else None
        vectors = await self._recalled(run, known)
        memory = Memory(devices=vectors)
        if head.held and vectors is not None and run.layout.controls:
            memory = without_batch(model, vectors)
        progress = Progress(
            State(head.version, model, memory), mean_staleness=head.mean_staleness,
            norms=norms or Norms(),
        )  # fmt: skip
        before = replace(self.course)
        self.course.run = run
        self.course.done = self.course.journalled()
        for upload in ended:
            if self.course.ended(upload.task) is None:
                # How it ended is lost; knowing that it did is enough not to use it again.
                lost = End(
                    upload.task, upload.attempt, "given_up", reasons.LOST_WITH_REDIS, upload.device
                )
                self.course.remember(lost)
        if norms is not None:  # tasks that ended after the journal's end may be unknown
            self.course.forgotten = head.version
        self.course.told = dict(head.journalled)
        self.course.besides = without(counts, head.journalled)
        self.course.made, self.course.unwritten = (), []
        self._go_on_from(progress, head.digest, head.time)
        try:
            await self.begin_segment("adopted", after=after)
        except BaseException:
            vars(self.course).update(vars(before))
            raise
        self.course.ahead = None
        self.context.log.error("going on from Redis's newest model", version=head.version)

    async def begin_segment(self, why: str, *, after: SegmentEnd | None = None) -> None:
        """Begin a segment with the run's state, after another updater's (``after``) or our own."""
        course, mine = self.course, self.recorder.head
        run, progress = course.run, course.progress
        if run is None or progress is None:
            return
        number, version = mine.number + 1 if mine else 0, progress.state.version
        segment = name_of(self.recorder.epoch, number)
        await asyncio.to_thread(course.index.write, run.lineage, segment, version)
        course.forgotten = max(course.forgotten, course.index.forgotten)
        before = after or self.recorder.ending
        head = SegmentHead(
            epoch=self.recorder.epoch, number=number,
            predecessor=before.path.name if before else None, cut=before.at if before else None,
            follows=before.chain.hex() if before else None,
            lineage=run.lineage, run=self.keys.name, task=run.task, devices=run.devices,
            versions=run.versions, seed=run.seed, created=run.created,
            strategy=self.rule.model_dump(mode="json"), layout=run.layout.encode(),
            release=f"numpy {np.__version__}, {platform.machine()}", time=time.time(),
        )  # fmt: skip
        standing, models = standing_of(
            progress, why, digest=course.digest, time=course.time,
            journalled=course.tally, counts=course.besides,
            done=tuple(tuple(vars(end).values()) for end in course.done.values()),
            forgotten=course.forgotten,
            finished=run.why if course.finished else None, made=course.made,
            rounds=tuple(course.rounds),
        )  # fmt: skip
        with self.metrics.seconds.labels("checkpoint").time():
            left = await self.recorder.begin(
                head, standing, *models, vectors=progress.state.memory.devices,
                after=after.path if after else None,
            )  # fmt: skip
        if left:
            self.context.log.error("an old segment stays until the next one begins", why=left)
        course.sealed = course.finished

    def _go_on_from(self, progress: Progress, digest: str, made_at: float) -> None:
        """Go on from ``progress``, reading the queue from its beginning."""
        self.intake.rewind()
        self.course.pending.clear()
        self.course.retained.clear()
        self.publisher.forget_written()
        self.course.progress, self.course.digest, self.course.time = progress, digest, made_at
        if self.course.run is not None:
            self.course.strategy = self.rule.build(self.course.run.devices)
        self.metrics.version.set(progress.state.version)

    # reconciling Redis

    async def compare(self, progress: Progress) -> None:
        """Reconcile Redis with the journal: publish the newest version if Redis lacks it."""
        epoch, mine, pending = self.lease.number, self.course.run, self.course.pending
        run, head = await self._seen()
        if run is None or head is None:
            await self._publish_again("no run")
            return
        if mine is not None and run.lineage != mine.lineage:
            raise self._foreign("a run of another lineage than the journal")
        if head.version < progress.state.version:
            await self._publish_again(f"version {head.version}")
            return
        there, told = ended(head.journalled), ended(self.course.told)
        if there < told:  # the ends that Redis forgot made no version
            await self._publish_again(f"{there} of {told} ends")
            return
        if run.state == "finished" and not self.course.finished:
            self.finish(run)
        elif run.state != "finished" and self.course.finished and not pending:
            await self._publish_again("a run that goes on")
            return
        if (head.version, head.digest) != (progress.state.version, self.course.digest):
            await self.recorder.check_last()  # our successor may have made it
        if head.version > progress.state.version:
            if self.course.ahead is None:
                self.context.log.error(
                    "the journal lost its end: making the versions again from the queue",
                    journal=progress.state.version, redis=head.version,
                )  # fmt: skip
            self.course.ahead = head
        elif head.digest != self.course.digest:
            raise self._foreign(f"another version {head.version} than the journal")
        elif not await self.publisher.keep(head, progress.state.model.layout.nbytes):
            self.metrics.repaired.inc()
            self.context.log.error("the newest model is gone from Redis", version=head.version)
            await self._publish_again(f"version {head.version} without its model")
            return
        elif any(one.version and one.version.version < head.version for one, _ in pending):
            # It was republished and the reply lost: changes before it no longer fit the head.
            await self._publish_again(f"version {head.version} before its turn")
            return
        elif epoch != self.course.epoch:
            await self.recorder.check_last()
            if not await self.hand_out(progress.state):
                return
        await self.publisher.look()
        self.course.epoch = epoch

    async def _publish_again(self, why: str) -> None:
        """Publish the newest version, and the counts, that Redis lacks."""
        run, progress = self.course.run, self.course.progress
        # Both now: the lease may be retaken meanwhile, and the version would have another epoch.
        epoch, token = self.lease.number, self.lease.token
        if run is None or progress is None:
            return
        await self.recorder.check_last()
        self.course.ahead = None
        if self.course.counts:
            self.context.log.error("Redis lost versions: publishing the newest", found=why)
        state = progress.state
        version = Version(
            version=state.version, time=self.course.time, epoch=epoch, digest=self.course.digest,
            blob=changes.blob_of(state.version, epoch, self.lease.nonce),
            size=state.model.layout.nbytes, updates=self.course.made,
            chunks=blobs.chunks_of(state.model.layout.nbytes),
        )  # fmt: skip
        await self.publisher.write(version, state.model)
        if not await self.hand_out(state):  # readers of the version need the vectors
            return
        journalled = self.course.tally
        reply = await self.ledger.create(
            token, run, version, counts=self.course.counts, journalled=journalled,
            done=self.course.ended, held=tuple(one.device for one in progress.held),
            mean_staleness=progress.mean_staleness,
        )  # fmt: skip
        if reply.what != "created":  # Redis was emptied again, or fell back
            await pause(self.context.stop, LOST_S)
            return
        self.course.told, self.course.besides = journalled, without(reply.counts, journalled)
        await self.publisher.look()
        self.course.epoch = epoch
        await self.intake.forget_fetches()
        self._go_on_from(progress, self.course.digest, self.course.time)

    async def lost_for_good(self, head: Head) -> None:
        """Adopt Redis's versions, which neither the journal nor the queue can make again.

        Raises JournalError unless told to adopt, or never to sync.
        """
        if not (self.journal.adopt or self.journal.sync == "never"):
            raise JournalError(
                f"the journal in {self.recorder.folder} ends with version "
                f"{self.course.progress and self.course.progress.state.version}, Redis at "
                f"{self.client.address} has {head.version}, and the updates between are gone: "
                "bring the journal's end back, or go on from Redis's newest model: --adopt"
            )
        run, _ = await self._seen()
        progress = self.course.progress
        if run is not None and progress is not None:
            await self._adopt(run, head, norms=progress.norms)

    async def hand_out(self, state: State, devices: set[int] | None = None) -> bool:
        """Hand out the vectors of these devices, or of all (SCAFFOLD's c_i).

        Returns False if Redis was emptied meanwhile.
        """
        vectors = state.memory.devices
        if vectors is None or not self.course.strategy.controls:
            return True
        among = vectors.heard & devices if devices else vectors.heard
        done = await self.publisher.hand_out(vectors, among)
        if not done:
            await pause(self.context.stop, LOST_S)  # until the lease is taken again
        return done

    async def _recalled(self, run: Run, known: DeviceVectors | None) -> DeviceVectors | None:
        """The devices' vectors from Redis, or from ``known`` where Redis has none."""
        rule = self.rule.build(run.devices)
        if not rule.controls or rule.devices is None:
            return known
        vectors = known or DeviceVectors(rule.devices, run.layout.parameters)
        for reason in await self.publisher.recall(vectors):
            self.context.log.warning("a device's vector is lost", reason=reason)
        return vectors

    def finish(self, run: Run) -> None:
        """End the run: it made its last version, or someone ended it."""
        self.course.run = run
        self.context.log.info("run finished", why=run.why)

    async def _patiently(self, work: Callable[[], T]) -> T:
        """Run work that may take minutes in a thread, and keep up the heartbeat.

        A restart would only begin it again."""
        working = asyncio.create_task(asyncio.to_thread(work))
        try:
            while not working.done():
                self.context.health.beat("queue")
                await asyncio.wait({working}, timeout=_BEAT_S)
            return await working
        finally:
            working.cancel()
