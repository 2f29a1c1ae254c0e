"""Taking over a run: begin it, resume it from the journal, or adopt it from Redis.

Each way returns the state to continue from. If one fails, the previous state is still valid.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.published import with_unshared
from fedstream.core import reasons
from fedstream.core.digest import DigestAlgorithm
from fedstream.core.errors import ConfigError, NoRun
from fedstream.core.formats import Format
from fedstream.core.layout import Layout, Model
from fedstream.core.records import NO_QUARANTINES, End, Head, Quarantines, Run, without
from fedstream.journal import (
    QUARANTINES,
    JournalError,
    JournalSettings,
    Segment,
    SegmentEnd,
    SegmentHead,
    name_of,
    segments,
)
from fedstream.journal.ended_tasks import EndedTasks
from fedstream.journal.norms import Norms
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import Recovered, recovered, standing_of
from fedstream.journal.recorder import Recorder
from fedstream.journal.records import (
    DROPPED_ROUNDS,
    EVALUATIONS,
    PRIVATE_SUMS,
    STEP_SCALES,
    UNSHARED,
    WIRE_FORMATS,
)
from fedstream.journal.writer import sync_and_drop_cache
from fedstream.runtime.plugins import runs_program
from fedstream.runtime.service import Context
from fedstream.strategies import (
    DeviceVectors,
    Memory,
    State,
    Strategy,
    StrategySettings,
    names_in,
    sources_of,
    strategy_of,
    without_batch,
)
from fedstream.updater.commit import Publisher
from fedstream.updater.metrics import UpdaterMetrics
from fedstream.updater.state import Ends, RunState

T = TypeVar("T")

_PASSED_ON = {WIRE_FORMATS, DROPPED_ROUNDS}  # needs that the next segment declares too
_BEAT_S = 10.0  # between heartbeats during long work


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Finds the state to continue from, and begins the journal's segments."""

    context: Context
    metrics: UpdaterMetrics
    index: EndedTasks
    recorder: Recorder
    publisher: Publisher
    rule: StrategySettings
    journal: JournalSettings
    keys: Keys
    client: Client
    ledger: UpdaterLedger
    lease: Lease
    create_run: Callable[[], tuple[Run, Model]]
    versions: int  # configured now; a run with fewer versions is extended
    stop_metric: str | None  # configured now
    parts: dict[str, str]  # for segments' heads
    format: Format  # of published models
    digests: DigestAlgorithm  # for a new run

    async def recover(self) -> RunState | None:
        """Resume the run from the journal, or begin it; None if another updater was faster."""
        if not await self._claim():
            return None  # the lease's loop acquires the lease again
        chain = await asyncio.to_thread(segments, self.recorder.folder)
        try:
            run, head = await self.seen()
            if chain:
                return await self._resume(chain, run, head)
            if run is not None and head is not None and not self.journal.adopt:
                raise ConfigError(
                    f"journal.dir: there is no journal in {self.recorder.folder}, but run "
                    f"{self.keys.name!r} is in Redis at {self.client.address}: set journal.dir to "
                    "the folder of its journal, or start a new journal with Redis's newest model: "
                    "--adopt"
                )
            await self._open_index("", [])
            if run is None or head is None:
                return await self._begin()
            return await self._adopt(run, head, Ends(self.index))
        finally:
            for segment in chain:
                segment.close()

    async def seen(self) -> tuple[Run | None, Head | None]:
        """Read the run's record and head from Redis; None for both if Redis has no run."""
        try:
            return await self.ledger.run(), await self.ledger.head()
        except NoRun:
            return None, None

    async def _open_index(self, lineage: str, chain: list[Segment]) -> None:
        """Open the index of the journal's ended tasks; log unreadable parts."""
        for why in await self._patiently(lambda: self.index.open(lineage, chain)):
            self.context.log.error("index of ended tasks unavailable", why=why)

    async def _claim(self) -> bool:
        """Claim the journal before reading it; return whether this succeeded.

        After the claim, no leader of an older epoch can commit a record that our reading misses,
        even if Redis forgot this leader.
        """
        newest = await self.recorder.newest_epoch()
        if self.lease.number <= newest and not await self.lease.acquire(at_least=newest):
            return False
        await self.recorder.claim(self.lease.number)
        return True

    # three ways to a state

    async def _begin(self) -> RunState:
        """Begin a new run, with version 0 as the journal's first checkpoint."""
        run, model = await self._patiently(self.create_run)
        now = self.ledger.now()
        state = RunState(
            run=replace(run, lineage=secrets.token_hex(8), created=now),
            strategy=self.rule.build(run.devices),
            progress=Progress(State(0, model)),
            digest=model.digest(self.digests),
            time=now,
            ends=Ends(self.index),
        )
        state = await self.begin_segment(state, "begun")
        self.context.log.info(
            "run begun",
            strategy=run.strategy,
            parameters=run.layout.parameters,
            bytes=run.layout.nbytes,
        )
        return state

    async def _resume(self, chain: list[Segment], run: Run | None, head: Head | None) -> RunState:
        """Resume the run: rebuild the newest version from the journal."""
        newest = chain[-1]
        self._check_journal(newest.head, run)
        began = time.monotonic()
        await self._open_index(newest.head.lineage, chain)
        await self._patiently(lambda: sync_and_drop_cache(newest.path))
        found = await self._patiently(lambda: recovered(newest))
        if found.progress is None:  # recorded without weights, so only Redis has the newest model
            if self.journal.adopt and run and head and head.version > found.version:
                ends = self._ends_of(found)
                return await self._adopt(
                    run,
                    head,
                    ends,
                    norms=found.norms,
                    after=found.ending,
                    quarantines=found.quarantines,
                )
            found = await self._from_redis(newest, found, head)
        state = self._with_lost_quarantines(self._state_of(found, run), head)
        self.recorder.stored = found.stored
        needs = _PASSED_ON & set(newest.head.needs)
        state = await self.begin_segment(state, "continued", after=found.ending, needs=needs)
        self.context.log.info(
            "recovered",
            version=found.version,
            records=found.records,
            torn_bytes=found.torn_bytes,
            reweighed=found.reweighed,
            seconds=round(time.monotonic() - began, 3),
        )
        if found.torn is not None and found.torn.behind:
            self.context.log.error(
                "the journal's end is torn: remaking what Redis still has of it",
                torn=f"{found.torn.place}{found.torn.lost}",
            )
        return state

    def _with_lost_quarantines(self, state: RunState, head: Head | None) -> RunState:
        """Add the quarantines that only Redis still has.

        Without syncing, a crash of the machine may lose records of entries that were deleted from
        the queue. If versions were lost too, :meth:`adopt` adds the quarantines instead: updates
        that are still in the queue must first be decided on as before.
        """
        replaceable = self.journal.adopt or self.journal.sync == "never"
        if head is None or not replaceable or head.version != state.version:
            return state
        if head.quarantines.taken <= state.quarantines.taken:
            return state
        self.context.log.error(
            "the journal lost changes of quarantines: continuing with Redis's",
            journal=state.quarantines.taken,
            redis=head.quarantines.taken,
        )
        return replace(state, quarantines=head.quarantines)

    async def adopt(self, state: RunState, ahead: Head) -> RunState | None:
        """Adopt Redis's versions that neither the journal nor the queue can remake.

        None if Redis no longer has a run. Raises JournalError unless ``journal.adopt`` is set or
        ``journal.sync`` is "never".
        """
        if not (self.journal.adopt or self.journal.sync == "never"):
            raise JournalError(
                f"the journal in {self.recorder.folder} ends with version {state.version}, Redis "
                f"at {self.client.address} has {ahead.version}, and the updates between are gone: "
                "restore the journal's end, or continue from Redis's newest model with --adopt"
            )
        run, _ = await self.seen()
        if run is None:
            return None
        norms, vectors = state.progress.norms, state.progress.state.memory.devices
        return await self._adopt(
            run,
            ahead,
            state.ends.copy(),
            norms=norms,
            vectors=None if vectors is None else vectors.copy(),
            quarantines=state.quarantines,
        )

    async def _adopt(
        self,
        run: Run,
        head: Head,
        ends: Ends,
        *,
        norms: Norms | None = None,
        vectors: DeviceVectors | None = None,
        after: SegmentEnd | None = None,
        quarantines: Quarantines = NO_QUARANTINES,
    ) -> RunState:
        """Continue from Redis's newest model in a new segment, without the lost records.

        ``ends``: the journal's ends, extended in place. ``norms``: of the newest updates in the
        journal; None: there is no journal. ``vectors``: the journal's device vectors, changed in
        place. ``after``: as in :meth:`begin_segment`. ``quarantines``: the journal's; Redis's
        quarantines count instead if they are later.
        """
        if run.versions < self.versions:
            run = replace(run, versions=self.versions, state="running", why=None, finished=None)
        model = Model(await with_unshared(self.client, self.keys, run.layout))
        await self.publisher.read(head, model)
        version, digest, made_at = head.version, head.digest, head.time
        if head.given != head.digest:
            # Redis has the lossy model that devices received, which differs from the version.
            version, digest, made_at = version + 1, model.digest_like(digest), self.ledger.now()
            if run.state != "finished" and version >= run.versions:
                run = replace(
                    run, state="finished", why=f"version {version} reached", finished=made_at
                )
        ended, counts = await self.ledger.ended(), (await self.ledger.tally()).counts
        # The devices' vectors are still valid; a batch begins anew.
        vectors = await self._recalled(run, vectors)
        if vectors is None and (lost := self.rule.vector_names):
            self.context.log.warning("the strategy's vectors are lost", vectors=lost)
        memory = Memory(devices=vectors)
        if head.held and vectors is not None and run.layout.controls:
            memory = without_batch(model, vectors)
        for upload in ended:
            if ends.get(upload.task) is None:
                # The outcome is lost; knowing that the task ended is enough not to use it again.
                why = reasons.LOST_WITH_REDIS
                ends.add(End(upload.task, upload.attempt, "given_up", why, upload.device))
        progress = Progress(
            State(version, model, memory),
            mean_staleness=head.mean_staleness,
            norms=norms or Norms(),
            scale=head.step.scale if head.step is not None else 1.0,
            scaled_at=version,
        )
        state = RunState(
            run=run,
            strategy=self.rule.build(run.devices),
            progress=progress,
            digest=digest,
            time=made_at,
            ends=ends,
            journalled=head.journalled,
            besides=without(counts, head.journalled),
            # Tasks that ended after the journal's end may be unknown.
            forgotten=0 if norms is None else head.version,
            quarantines=max(quarantines, head.quarantines, key=lambda one: one.taken),
        )
        state = await self.begin_segment(state, "adopted", after=after)
        self.context.log.error(
            "continuing from Redis's newest model",
            version=head.version,
            format=head.encoded.format if head.encoded else "f32",
            as_version=version,
        )
        return state

    async def _from_redis(self, newest: Segment, found: Recovered, head: Head | None) -> Recovered:
        """Add the model that a journal without weights lacks: Redis's, or a checkpoint's."""
        before = found.checkpoint
        if head is not None:
            # If the next version was journalled but not published, the queue has its update.
            digest = head.digest
            until = await self._patiently(lambda: recovered(newest, digest))
            complete = head.given == head.digest  # else Redis's model is lossy
            if complete and (until.version, until.digest) == (head.version, head.digest):
                model = Model(before.state.model.layout)
                await self.publisher.read(head, model)
                until.progress = Progress(
                    State(head.version, model), (), head.mean_staleness, until.norms
                )
                return until
        if not self.journal.adopt:
            there = f"has version {head.version}" if head else "has no version"
            raise ConfigError(
                f"the journal in {self.recorder.folder} was recorded without weights "
                f"(journal.weights = false) and ends with version {found.version}, but Redis at "
                f"{self.client.address} {there}, not this version's exact model: with --adopt the "
                f"run continues from Redis's version if that is newer, or else from the checkpoint "
                f"of version {before.state.version}"
            )
        self.context.log.error(
            "going back to a checkpoint's model",
            model_of=before.state.version,
            as_version=found.version + 1,
        )
        found.version += 1
        found.digest = before.state.model.digest_like(found.digest)
        found.time, found.made = self.ledger.now(), ()
        found.progress = Progress(State(found.version, before.state.model), norms=found.norms)
        return found

    def _check_journal(self, head: SegmentHead, run: Run | None) -> None:
        """Raise ConfigError unless the journal is this run's."""
        if head.run != self.keys.name:
            raise self.foreign(f"the journal of run {head.run!r}", here=True)
        if run is not None and run.lineage != head.lineage:
            raise self.foreign("a run of a different lineage")
        if head.strategy.get("name") != self.rule.name:
            raise ConfigError(
                f"strategy.name: run {self.keys.name!r} was created with "
                f"{head.strategy.get('name')}, not {self.rule.name}; use another run.name and "
                "journal.dir"
            )
        if strange := _programs(head.strategy) - _programs(self.rule.model_dump(mode="json")):
            raise ConfigError(
                f"strategy: run {self.keys.name!r} was last continued with {min(strange)}, which "
                "the configuration does not name any more: name it again"
            )
        was, now = strategy_of(head.strategy, head.devices), self.rule.build(head.devices)
        if was.remembered != now.remembered:
            raise ConfigError(
                f"strategy.devices: run {self.keys.name!r} was created with {was.remembered}, not "
                f"{now.remembered}: a mean over all devices needs a fixed number of them"
            )
        if was.masked != now.masked or (was.masked and was.policy != now.policy):
            raise ConfigError(
                f"private.policy: run {self.keys.name!r} was created "
                f"{f'under the policy {was.policy}' if was.masked else 'without one'}; use another "
                "run.name and journal.dir for another policy"
            )
        if was.vector_names != now.vector_names:
            keys = "private.buckets and strategy.server"
            if not was.masked:
                keys = "strategy.server, and the strategy's aggregate, buffer_size and buckets"
            raise ConfigError(
                f"strategy: run {self.keys.name!r} keeps other vectors between versions "
                f"({_listed(was.vector_names)}, not {_listed(now.vector_names)}): set {keys} as "
                "before, or use another run.name and journal.dir"
            )

    def foreign(self, what: str, *, here: bool = False) -> ConfigError:
        """The error for a journal or a Redis that belongs to another run."""
        where = self.recorder.folder if here else f"Redis at {self.client.address}"
        return ConfigError(
            f"run {self.keys.name!r}, journal in {self.recorder.folder}: {where} holds {what}; "
            "correct journal.dir or run.name, or purge the run in Redis to continue from the "
            "journal"
        )

    def _ends_of(self, found: Recovered) -> Ends:
        """The ended tasks and the processed control entries, according to the journal."""
        return Ends(self.index, found.done.values(), found.rounds)

    def _state_of(self, found: Recovered, run: Run | None) -> RunState:
        """The run's state according to the journal."""
        if found.progress is None:
            raise RuntimeError("a run without a model")
        strategy = self.rule.build(found.head.devices)
        run = self._run_of(found, run, strategy)
        return RunState(
            run=run,
            strategy=strategy,
            progress=found.progress,
            digest=found.digest,
            time=found.time,
            made=found.made,
            ends=self._ends_of(found),
            journalled=found.journalled,
            besides=found.counts,
            forgotten=found.forgotten,
            quarantines=found.quarantines,
            evaluation=found.evaluation,
        )

    def _run_of(self, found: Recovered, run: Run | None, strategy: Strategy) -> Run:
        """The run's record according to the journal and Redis; a finished run may be extended.

        The end of the run counts only if journal and Redis have the number of versions configured
        now: if the updater that extended the run was killed, only the journal has the new number.
        """
        head = found.head
        versions = max(head.versions, self.versions, run.versions if run else 0)
        if run is not None and run.state == "finished" and run.versions == versions:
            return run
        over = found.finished if head.versions == versions else None
        if versions > head.versions:
            self.context.log.info("run extended", before=head.versions, versions=versions)
        return Run(
            layout=Layout.decode(head.layout),
            strategy=self.rule.name,
            task=head.task,
            devices=head.devices,
            versions=versions,
            seed=head.seed,
            created=head.created,
            max_staleness=strategy.max_staleness,
            cancel_stale=strategy.cancel_stale,
            sends=strategy.sends,
            by_steps=strategy.by_steps,
            lineage=head.lineage,
            state="finished" if over else "running",
            why=over,
            finished=found.time if over else None,
            start=head.start,
            goal=head.goal or {},
            stop_metric=self.stop_metric,
            policy=strategy.policy,
        )

    # the journal's segments

    async def begin_segment(
        self,
        state: RunState,
        why: str,
        *,
        after: SegmentEnd | None = None,
        needs: Set[str] = frozenset(),
    ) -> RunState:
        """Begin a segment with this state, after another updater's segment (``after``) or our own.

        ``needs``: features that readers of the segment must support, for records to come; earlier
        releases refuse the segment. The needs of our own last segment are added.
        """
        run, mine = state.run, self.recorder.head
        number = mine.number + 1 if mine else 0
        segment = name_of(self.recorder.epoch, number)
        await asyncio.to_thread(self.index.write, run.lineage, segment, state.version)
        state = state.in_segment(max(state.forgotten, self.index.forgotten))
        before = after or self.recorder.ending
        known = _PASSED_ON & set(mine.needs if mine else ())
        if state.quarantines.taken:
            known.add(QUARANTINES)
        if state.layout.unshared is not None:
            known.add(UNSHARED)
        if state.evaluation:
            known.add(EVALUATIONS)
        if state.strategy.adapt is not None:
            known.add(STEP_SCALES)
        if state.strategy.masked:
            known |= {PRIVATE_SUMS, WIRE_FORMATS}
        head = SegmentHead(
            needs=tuple(sorted(needs | known)),
            epoch=self.recorder.epoch,
            number=number,
            predecessor=before.path.name if before else None,
            cut=before.at if before else None,
            follows=before.chain.hex() if before else None,
            lineage=run.lineage,
            run=self.keys.name,
            task=run.task,
            devices=run.devices,
            versions=run.versions,
            seed=run.seed,
            created=run.created,
            strategy=self.rule.model_dump(mode="json"),
            layout=run.layout.encode(),
            release=f"numpy {np.__version__}, {platform.machine()}",
            time=self.ledger.now(),
            start=run.start,
            goal=dict(run.goal) or None,
            stop_metric=run.stop_metric,
            sources=sources_of(self.rule),
            parts=self.parts,
            format=self.format.name,
        )
        standing, models = standing_of(
            state.progress,
            why,
            digest=state.digest,
            time=state.time,
            journalled=state.journalled,
            counts=state.besides,
            done=tuple(tuple(vars(end).values()) for end in state.ends.done),
            forgotten=state.forgotten,
            finished=run.why if state.finished else None,
            made=state.made,
            rounds=state.ends.controls,
            quarantines=state.quarantines.taken,
            quarantined=state.quarantines.groups,
            evaluation=state.evaluation,
        )
        with self.metrics.timed("checkpoint"):
            left = await self.recorder.begin(
                head, standing, *models, vectors=state.progress.state.memory.devices
            )
        if left:
            self.context.log.error("old segment kept until the next one starts", why=left)
        return state

    async def _recalled(self, run: Run, known: DeviceVectors | None) -> DeviceVectors | None:
        """The devices' vectors from Redis, and from ``known`` where Redis has none."""
        rule = self.rule.build(run.devices)
        if not rule.controls or rule.remembered is None:
            return known
        vectors = known if known is not None else rule.vectors(run.layout.parameters)
        for reason in await self.publisher.recall(vectors):
            self.context.log.warning("a device's vector is lost", reason=reason)
        return vectors

    async def _patiently(self, work: Callable[[], T]) -> T:
        """Run work that may take minutes in a thread, and keep sending heartbeats.

        Without heartbeats the process would be restarted, and the work would begin again."""
        working = asyncio.create_task(asyncio.to_thread(work))
        try:
            while not working.done():
                self.context.health.beat("queue")
                await asyncio.wait({working}, timeout=_BEAT_S)
            return await working
        finally:
            working.cancel()


def _listed(names: tuple[str, ...]) -> str:
    return " and ".join(names) or "no vectors"


def _programs(strategy: Mapping[str, Any]) -> set[str]:
    """The programs that a strategy's settings name."""
    return {name for name in names_in(strategy) if runs_program(name)}
