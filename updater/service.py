"""The updater: takes the queue in order, one update after the other, and publishes versions.

Every entry of the queue becomes one change: the strategy's decision (pure), a record in the
journal, and one commit that publishes, ends tasks and deletes what is done with. What is in the
journal has happened: trouble with Redis repeats the commit (which recognises a repetition) and
never the update, and a restarted updater goes on from the journal, publishes what it had not, and
recognises in the queue what it had done. An entry leaves the queue only once its record is on disk.
"""

from __future__ import annotations

import asyncio
import platform
import secrets
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Annotated, TypeVar

import numpy as np
from aiohttp import web
from pydantic import Field

from broker import blobs
from broker.client import Client, Command, RedisSettings
from broker.errors import (
    BadMessage,
    BlobDamaged,
    BlobMissing,
    BrokerError,
    ConfigError,
    NoRun,
    OutOfMemory,
)
from broker.keys import Keys
from broker.layout import Layout, Model
from broker.lease import Lease
from broker.ledger import LOST, Commit, End, Head, Ledger, Run, counted
from broker.messages import Contribution, RoundEnd, Upload, Version, decode
from broker.streams import BLOCK_MS, Entry, Reader
from runtime.backoff import pause
from runtime.config import Section
from runtime.leading import lead
from runtime.service import Context, repeat
from updater import changes, refusals
from updater.changes import Change, Retained
from updater.journal import (
    JournalError,
    JournalSettings,
    Segment,
    SegmentHead,
    segments,
)
from updater.metrics import Metrics
from updater.mixing import norm
from updater.progress import Progress, Step, close_round, take
from updater.publisher import Publisher
from updater.rebuild import Recovered, recovered, standing_of
from updater.recorder import Recorder
from updater.strategies import (
    DeviceVectors,
    Memory,
    State,
    StrategySettings,
    strategy_of,
    without_batch,
)

T = TypeVar("T")

_LARGE = 4 << 20  # bytes; arithmetic on larger models leaves the event loop
_BATCH = 16  # entries that share a write to the journal, while their models are small
_LOST_S = 0.1  # between two looks at a Redis that was emptied
_BEAT_S = 10.0  # while it works for long
_REMEMBERED = 10_000  # tasks that are recognised when they are found again
_ROUNDS_REMEMBERED = 1000
# What an updater that adopts takes from Redis, or as it was where that fails.
_ADOPTED = (
    "_run", "_finished", "_progress", "_digest", "_time", "_made", "_done", "_forgotten",
    "_counts", "_unwritten",
)  # fmt: skip


class UpdaterSettings(Section):
    """What the updater keeps and what it refuses."""

    keep_versions: Annotated[int, Field(ge=2)] = 16
    keep_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # the newest two are kept at any size
    max_norm: Annotated[float, Field(gt=0)] | None = None  # of an update's vector, Euclidean
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
        self._strategy = strategy.build()
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
        self._reader = Reader(self._client, {keys.queue: "0"})
        self._backlog: deque[Entry] = deque()
        self._fetches: dict[str, asyncio.Task[Model]] = {}
        self._free: list[Model] = []
        self._run: Run | None = None
        self._progress: Progress | None = None  # with everything that is in the journal
        self._digest = ""  # of its model
        self._time = 0.0  # of its version
        self._done: dict[str, End] = {}  # by task, oldest first
        self._rounds: dict[str, None] = {}  # entries that ended rounds, oldest first
        self._forgotten = 0  # the version at which a task may have ended that is in `_done` no more
        self._counts: dict[str, int] = {}  # of the run, with what is in the journal
        self._unwritten: list[Change] = []  # not in the journal yet
        self._pending: deque[tuple[Change, int]] = deque()  # in the journal, not committed yet
        self._retained: list[Retained] = []  # oldest first
        self._epoch = 0  # in which Redis was last seen to have our newest version
        self._ahead: Head | None = None  # Redis has versions that the journal lost
        self._made: tuple[Contribution, ...] = ()  # the updates in the newest version
        self._finished = False
        self._sealed = False  # the journal's newest segment says that it is

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
        try:
            await lead(context, self._lease, self._work)
        finally:
            await self._forget_fetches()
            await self._client.close()

    def _synced(self, seconds: float) -> None:
        self._metrics.sync.observe(seconds)

    async def _work(self) -> None:
        try:
            await repeat(self._context, "queue", self._step, within_s=120.0)
        finally:
            await self._recorder.close()

    async def _step(self) -> None:
        """One entry of the queue, or what has to come before it."""
        try:
            await self._next()
        except OutOfMemory:
            await self._make_room()
            raise

    async def _next(self) -> None:
        progress = self._progress
        if progress is None or self._recorder.head is None:
            await self._recover()
        elif self._lease.number != self._epoch:
            await self._compare(progress)
        elif self._unwritten:
            await self._go_on()
        elif self._pending and not self._may_wait(progress):
            await self._settle(*self._pending[0])
        elif self._recorder.is_full or self._finished != self._sealed:
            await self._begin_segment("continued")
        elif not self._backlog:
            await self._read(progress)
        else:
            await self._take_batch(progress)

    # becoming the updater of a run

    async def _recover(self) -> None:
        """Takes the run up where the journal has it, or makes it."""
        chain = await asyncio.to_thread(segments, self._recorder.folder)
        try:
            run, head = await self._seen()
            if chain:
                await self._resume(chain, run, head)
            elif run is None or head is None:
                await self._begin()
            elif self._journal.adopt:
                await self._adopt(run, head)
            else:
                raise ConfigError(
                    f"journal.dir: there is no journal in {self._recorder.folder}, but run "
                    f"{self._keys.name!r} is in Redis at {self._client.address}: name the folder "
                    "that holds its journal, or begin a new one with Redis's newest model: --adopt"
                )
        finally:
            for segment in chain:
                segment.close()

    async def _seen(self) -> tuple[Run | None, Head | None]:
        """The run as Redis has it."""
        try:
            return await self._ledger.run(), await self._ledger.head()
        except NoRun:
            return None, None

    async def _begin(self) -> None:
        """A new run: its version 0 is the journal's first record."""
        run, model = await self._patiently(self._found)
        self._run = replace(run, lineage=secrets.token_hex(8))
        progress = Progress(State(0, model))
        self._go_on_from(progress, model.digest(), time.time())
        await self._begin_segment("begun")
        self._context.log.info(
            "run begun", strategy=run.strategy, parameters=run.layout.parameters,
            bytes=run.layout.nbytes,
        )  # fmt: skip

    async def _resume(self, chain: list[Segment], run: Run | None, head: Head | None) -> None:
        """Rebuilds the newest version from the journal."""
        newest = chain[-1]
        self._check_journal(newest.head, run)
        if self._lease.number <= newest.head.epoch and not await self._lease.acquire(
            at_least=newest.head.epoch
        ):
            return  # another was quicker: the lease's loop finds out
        began = time.monotonic()
        found = await self._patiently(lambda: recovered(newest))
        if found.progress is None:  # recorded without weights: only Redis has the newest model
            if self._journal.adopt and run and head and head.version > found.version:
                await self._adopt(run, head)
                return
            found = await self._from_redis(newest, found, head)
        self._take_over(found, run)
        await self._begin_segment("continued", after=newest, cut=found.end)
        self._context.log.info(
            "recovered", version=found.version, records=found.records,
            torn_bytes=found.torn_bytes, seconds=round(time.monotonic() - began, 3),
        )  # fmt: skip

    async def _from_redis(self, newest: Segment, found: Recovered, head: Head | None) -> Recovered:
        """A journal without weights and the model that Redis has; if told to adopt, its own."""
        before = found.checkpoint
        if head is not None:
            # Of the version behind it, that was not published, the queue has the update.
            digest = head.digest
            until = await self._patiently(lambda: recovered(newest, digest))
            if (until.version, until.digest) == (head.version, head.digest):
                model = Model(before.state.model.layout)
                await self._publisher.read(head.blob, model, head.digest)
                until.progress = Progress(State(head.version, model), (), head.mean_staleness)
                return until
        if not self._journal.adopt:
            there = f"has version {head.version}" if head else "has none"
            raise ConfigError(
                f"the journal in {self._recorder.folder} was recorded without weights "
                f"(journal.weights = false) and ends with version {found.version}, Redis at "
                f"{self._client.address} {there}: go on from Redis's version if it is newer, else "
                f"from the checkpoint of version {before.state.version}, with --adopt"
            )
        self._context.log.error(
            "going back to a checkpoint's model", model_of=before.state.version,
            as_version=found.version + 1,
        )  # fmt: skip
        found.version, found.digest = found.version + 1, before.state.model.digest()
        found.time, found.made = time.time(), ()
        found.progress = Progress(State(found.version, before.state.model))
        return found

    def _check_journal(self, head: SegmentHead, run: Run | None) -> None:
        """The journal must be this run's. Raises ConfigError."""
        if head.run != self._keys.name:
            raise self._foreign(f"the journal of run {head.run!r}", here=True)
        if run is not None and run.lineage != head.lineage:
            raise self._foreign("a run of another lineage than the journal")
        if head.strategy.get("name") != self._rule.name:
            raise ConfigError(
                f"strategy.name: run {self._keys.name!r} was created with "
                f"{head.strategy.get('name')}, not {self._rule.name}; use another run.name and "
                "journal.dir"
            )
        was, now = strategy_of(head.strategy, head.devices), self._rule.build(head.devices)
        if was.devices != now.devices:
            raise ConfigError(
                f"strategy.devices: run {self._keys.name!r} was created with {was.devices}, not "
                f"{now.devices}: a mean over all of them cannot change its number"
            )

    def _foreign(self, what: str, *, here: bool = False) -> ConfigError:
        where = self._recorder.folder if here else f"Redis at {self._client.address}"
        return ConfigError(
            f"run {self._keys.name!r}, journal in {self._recorder.folder}: {where} holds {what}; "
            "name the right folder with journal.dir, or the right run, or purge the run in Redis "
            "to go on from the journal"
        )

    def _take_over(self, found: Recovered, run: Run | None) -> None:
        """What the journal says is what is."""
        if found.progress is None:
            raise RuntimeError("a run without a model")
        head = found.head
        self._run = Run(
            layout=Layout.decode(head.layout), strategy=self._rule.name, task=head.task,
            devices=head.devices, versions=run.versions if run else head.versions, seed=head.seed,
            created=head.created, max_staleness=self._strategy.max_staleness,
            sends=self._strategy.sends, lineage=head.lineage,
            state="finished" if found.finished else "running", why=found.finished,
            finished=found.time if found.finished else None,
        )  # fmt: skip
        if run is not None and run.state == "finished":
            self._run = run
        self._finished = self._run.state == "finished"
        self._done, self._forgotten = {}, found.forgotten
        self._rounds = dict.fromkeys(found.rounds)
        for end in found.done.values():
            self._remember(end)
        self._counts = found.counts
        self._made = found.made
        self._recorder.stored = found.stored
        self._go_on_from(found.progress, found.digest, found.time)

    async def _adopt(self, run: Run, head: Head) -> None:
        """Told to go on without what a journal lost: Redis's newest model begins a segment."""
        model = Model(run.layout)
        await self._publisher.read(head.blob, model, head.digest)
        ended, counts = await self._ledger.ended(), dict((await self._ledger.look()).counts)
        # What was remembered of the devices is as good as it was; a batch begins anew.
        known = self._progress.state.memory.devices if self._progress else None
        vectors = await self._recalled(run, known)
        memory = Memory(devices=vectors)
        if head.held and vectors is not None and run.layout.controls:
            memory = without_batch(model, vectors)
        progress = Progress(State(head.version, model, memory), mean_staleness=head.mean_staleness)
        before = {name: vars(self)[name] for name in _ADOPTED}
        self._run, self._finished = run, run.state == "finished"
        # How they ended, nobody knows; that they did, is enough not to use them again.
        self._done = {
            upload.task: End(upload.task, upload.attempt, "given_up", LOST, upload.device)
            for upload in ended
        }
        self._forgotten = head.version if self._progress is not None else 0
        self._counts, self._made, self._unwritten = counts, (), []
        self._go_on_from(progress, head.digest, head.time)
        try:
            await self._begin_segment("adopted")
        except BaseException:
            vars(self).update(before)
            raise
        self._ahead = None
        self._context.log.error("going on from Redis's newest model", version=head.version)

    async def _begin_segment(
        self, why: str, *, after: Segment | None = None, cut: int | None = None
    ) -> None:
        """A segment that begins with where the run stands."""
        run, progress, mine = self._run, self._progress, self._recorder.head
        if run is None or progress is None:
            return
        predecessor = after.path.name if after else self._recorder.name
        epoch = mine.epoch if mine else self._lease.number
        head = SegmentHead(
            epoch=epoch, number=mine.number + 1 if mine else 0,
            predecessor=predecessor, cut=cut if after else self._recorder.size,
            lineage=run.lineage, run=self._keys.name, task=run.task, devices=run.devices,
            versions=run.versions, seed=run.seed, created=run.created,
            strategy=self._rule.model_dump(mode="json"), layout=run.layout.encode(),
            release=f"numpy {np.__version__}, {platform.machine()}", time=time.time(),
        )  # fmt: skip
        standing, models = standing_of(
            progress, why, digest=self._digest, time=self._time, counts=self._counts,
            done=tuple(tuple(vars(end).values()) for end in self._done.values()),
            forgotten=self._forgotten,
            finished=run.why if self._finished else None, made=self._made,
            rounds=tuple(self._rounds),
        )  # fmt: skip
        with self._metrics.seconds.labels("checkpoint").time():
            left = await self._recorder.begin(
                head, standing, *models, vectors=progress.state.memory.devices,
                after=after.path if after else None,
            )  # fmt: skip
        if left:
            self._context.log.error("an old segment stays until the next one begins", why=left)
        self._sealed = self._finished

    def _go_on_from(self, progress: Progress, digest: str, made_at: float) -> None:
        """Reads the queue from its beginning on top of ``progress``."""
        self._backlog.clear()
        self._reader.rewind(self._keys.queue)
        self._pending.clear()
        self._retained.clear()
        self._publisher.forget_written()
        self._progress, self._digest, self._time = progress, digest, made_at
        if self._run is not None:
            self._strategy = self._rule.build(self._run.devices)
        self._metrics.version.set(progress.state.version)

    async def _compare(self, progress: Progress) -> None:
        """Is Redis where the journal is? Behind it, or empty, it gets the newest version again."""
        epoch, mine = self._lease.number, self._run
        run, head = await self._seen()
        if run is None or head is None:
            await self._publish_again("no run")
            return
        if mine is not None and run.lineage != mine.lineage:
            raise self._foreign("a run of another lineage than the journal")
        if head.version < progress.state.version:
            await self._publish_again(f"version {head.version}")
            return
        if run.state == "finished" and not self._finished:
            self._end(run)
        elif run.state != "finished" and self._finished and not self._pending:
            await self._publish_again("a run that goes on")
            return
        if (head.version, head.digest) != (progress.state.version, self._digest):
            await self._recorder.check_last()  # whoever made it may be a successor of ours
        if head.version > progress.state.version:
            if self._ahead is None:
                self._context.log.error(
                    "the journal lost its end: making the versions again from the queue",
                    journal=progress.state.version, redis=head.version,
                )  # fmt: skip
            self._ahead = head
        elif head.digest != self._digest:
            raise self._foreign(f"another version {head.version} than the journal")
        elif epoch != self._epoch:
            await self._recorder.check_last()
            if not await self._hand_out(progress.state):
                return
        await self._publisher.look()
        self._epoch = epoch

    async def _publish_again(self, why: str) -> None:
        """Redis does not have the newest version: it gets it, and the counts that it lacks."""
        run, progress = self._run, self._progress
        # At once: the lease may be taken again meanwhile, and the version is then of another epoch.
        epoch, token = self._lease.number, self._lease.token
        if run is None or progress is None:
            return
        await self._recorder.check_last()
        self._ahead = None
        if self._counts:
            self._context.log.error("Redis lost versions: publishing the newest", found=why)
        state = progress.state
        version = Version(
            version=state.version, time=self._time, epoch=epoch, digest=self._digest,
            blob=changes.blob_of(state.version, epoch, self._lease.nonce),
            size=state.model.layout.nbytes, updates=self._made,
        )  # fmt: skip
        await self._publisher.write(version, state.model)
        if not await self._hand_out(state):  # whoever sees the version finds them
            return
        reply = await self._ledger.create(
            token, run, version, counts=self._counts, done=self._recorded(),
            held=tuple(one.device for one in progress.held),
            mean_staleness=progress.mean_staleness,
        )  # fmt: skip
        if reply != "created":  # emptied once more
            await pause(self._context.stop, _LOST_S)
            return
        await self._publisher.look()
        self._epoch = epoch
        await self._forget_fetches()
        self._go_on_from(progress, self._digest, self._time)

    def _recorded(self) -> dict[str, End]:
        """How tasks ended, by what is in the journal."""
        unwritten = {one.end.task for one in self._unwritten if one.end and one.record is not None}
        return {task: end for task, end in self._done.items() if task not in unwritten}

    # the queue

    async def _read(self, progress: Progress) -> None:
        """What is new in the queue. Nothing: is Redis where we left it, or did it go back?"""
        if await self._read_new(BLOCK_MS):
            return
        await self._recorder.flush()
        if self._retained:
            await self._commit(progress)
            return
        await self._compare(progress)
        if self._ahead is not None and self._ahead.version > progress.state.version:
            await self._lost_for_good(self._ahead)
        elif await self._client.call("XLEN", self._keys.queue):
            self._reader.rewind(self._keys.queue)  # what we did is there again
        else:
            await self._see_to_room(progress.state.model.layout.nbytes)

    async def _read_new(self, block_ms: int) -> bool:
        """Takes what is new in the queue into the backlog: whether there was anything."""
        new = await self._reader.read(count=_BATCH, block_ms=block_ms)
        entries = new.get(self._keys.queue, [])
        self._backlog.extend(entries)
        return bool(entries)

    async def _read_ahead(self, layout: Layout) -> None:
        """Begins to fetch the next update, if there is one by now."""
        if not self._backlog:
            await self._read_new(block_ms=0)
        self._fetch_ahead(layout, 0)

    async def _lost_for_good(self, head: Head) -> None:
        """Redis has versions that neither the journal nor the queue can make."""
        if not (self._journal.adopt or self._journal.sync == "never"):
            raise JournalError(
                f"the journal in {self._recorder.folder} ends with version "
                f"{self._progress and self._progress.state.version}, Redis at "
                f"{self._client.address} has {head.version}, and the updates between are gone: "
                "bring the journal's end back, or go on from Redis's newest model: --adopt"
            )
        run, _ = await self._seen()
        if run is not None:
            await self._adopt(run, head)

    async def _take_batch(self, progress: Progress) -> None:
        """Decides on the next entries, one on top of the other."""
        most = max(1, min(_BATCH, _LARGE // max(1, progress.state.model.layout.nbytes)))
        finishing = False
        while self._backlog and len(self._unwritten) < most and not finishing:
            told = None
            if self._ahead is not None:
                # Asked first: behind a change there may be no trouble, its memory is written into.
                told = await self._ledger.digest(progress.state.version + 1)
            change = await self._change(self._backlog[0], progress)
            if change is not None and self._ahead and not change.remakes(self._ahead, told):
                await self._lost_for_good(self._ahead)
                return
            self._backlog.popleft()
            if change is not None:
                self._unwritten.append(change)
                self._decided(change)
                progress = change.after
                finishing = change.finish is not None

    def _may_wait(self, progress: Progress) -> bool:
        """Whether the next updates are decided on before these are committed: small models only,
        of which there may be more than four in memory."""
        small = progress.state.model.layout.nbytes <= blobs.CHUNK
        return bool(self._backlog) and small and self._ahead is None

    async def _go_on(self) -> None:
        """Writes to the journal what was decided on, and meanwhile goes on without it.

        What was written before is committed, the next update is fetched, and a large model's chunks
        go to Redis. Trouble leaves undone what it struck, to be done in its turn.
        """
        changes = self._unwritten
        appending = asyncio.create_task(
            self._recorder.append([(one.record, one.payload) for one in changes]), name="journal"
        )
        try:
            await self._settle_all(list(self._pending))
            await self._read_ahead(changes[0].after.state.model.layout)
            await self._write_ahead(changes[0])
        finally:
            with self._metrics.seconds.labels("journal").time():
                positions = await appending
            self._unwritten = []
            for change, position in zip(changes, positions, strict=True):
                self._happened(change, position)

    async def _settle_all(self, recorded: Sequence[tuple[Change, int]]) -> None:
        for change, position in recorded:
            if not await self._settle(change, position):
                return  # the rest comes to nothing without it

    def _happened(self, change: Change, position: int) -> None:
        """A change is in the journal: it is now what is."""
        self._pending.append((change, position))
        self._progress = change.after
        if change.version is not None:
            self._digest, self._time = change.version.digest, change.version.time
            self._made = change.version.updates
        if change.finish is not None and self._run is not None:
            over = replace(self._run, state="finished", why=change.finish, finished=self._time)
            self._end(over)
        self._count(change)
        end = change.end
        if end is not None and change.record is not None and end.weight is not None:
            self._context.trace(
                end.outcome, task=end.task, device=end.device, version=end.version,
                staleness=end.staleness, weight=end.weight,
            )  # fmt: skip

    def _count(self, change: Change) -> None:
        if change.end is not None and change.record is not None:
            self._counts = counted(self._counts, change.end)

    def _decided(self, change: Change) -> None:
        """From now on its entry is known, should it be found again."""
        if change.record is None:
            return
        if change.end is not None:
            self._remember(change.end)
        else:
            self._rounds[change.entry] = None
            if len(self._rounds) > _ROUNDS_REMEMBERED:
                del self._rounds[next(iter(self._rounds))]

    def _remember(self, end: End) -> None:
        self._done[end.task] = end
        while len(self._done) > _REMEMBERED:
            oldest = self._done.pop(next(iter(self._done)))
            self._forgotten = max(self._forgotten, oldest.version or 0)

    # one entry

    async def _change(self, entry: Entry, before: Progress) -> Change | None:
        """What an entry of the queue does; None if it is no message, or not awaited any more."""
        try:
            message = decode(entry.data, Upload, RoundEnd)
        except BadMessage as error:
            await self._ledger.bury(self._keys.queue, "", entry, str(error))
            return None
        if isinstance(message, RoundEnd):
            if entry.id in self._rounds:
                return Change(entry.id, None, (), before)
            return await self._round_end(entry, message, before)
        if message.task in self._done:
            await self._unfetch(entry)
            return self._found_again(entry, message, before)
        refusal, update = await self._checked(entry, message, before.state)
        if refusal == "blob missing" and not await self._ledger.awaits(message):
            # Redis went back to before it was admitted, where it may come again; or a successor of
            # ours has done it.
            self._context.log.warning(
                "update not awaited any more", task=message.task, device=message.device
            )
            return None
        if update is None:
            return self._refused(entry, message, before, refusal)
        spare = self._free.pop() if self._free else Model(update.layout)
        with self._metrics.seconds.labels("mix").time():
            step = await self._off_loop(
                lambda: take(self._strategy, before, message, update, spare)
            )
        used = (before.state.model, update, spare)
        if step.decision is None or step.decision.outcome == "dropped":
            return replace(self._refused(entry, message, before, "too stale"), used=(update, spare))
        return await self._taken(entry, message, step, update, used)

    async def _checked(
        self, entry: Entry, upload: Upload, state: State
    ) -> tuple[str, Model | None]:
        """The update's content, or why it is refused."""
        refusal = self._refusal(upload, state)
        if refusal:
            await self._unfetch(entry)
            return refusal, None
        try:
            model = await self._fetched(entry, upload, state.model.layout)
        except BlobMissing:
            return "blob missing", None
        except BlobDamaged:
            return "digest", None
        with self._metrics.seconds.labels("check").time():
            size = await self._off_loop(lambda: norm(model.floats))
        refusal = refusals.by_norm(upload, self._strategy, size, self._settings.max_norm)
        if refusal:
            self._free.append(model)
            return refusal, None
        return "", model

    def _refusal(self, upload: Upload, state: State) -> str:
        """Why an update is refused for what it says of itself; '' if it is not."""
        if self._is_over(state.version):
            return changes.FINISHED
        if upload.tau < self._forgotten:
            return "too old"  # nobody could say whether it was applied before
        return refusals.by_word(upload, self._strategy, state)

    async def _fetched(self, entry: Entry, upload: Upload, layout: Layout) -> Model:
        """The update's model, whose reading began while the one before was being mixed."""
        with self._metrics.seconds.labels("fetch").time():
            fetch = self._fetches.pop(entry.id, None) or self._fetch(upload, layout)
            self._fetch_ahead(layout, 1)
            try:
                return await fetch
            except asyncio.CancelledError:
                fetch.cancel()
                raise

    def _fetch(self, upload: Upload, layout: Layout) -> asyncio.Task[Model]:
        into = self._free.pop() if self._free else Model(layout)
        key = self._keys.update(upload.blob)

        async def read() -> Model:
            await blobs.read(self._client, key, into, digest=upload.digest)
            return into

        return asyncio.create_task(read(), name=f"fetch {upload.blob}")

    def _fetch_ahead(self, layout: Layout, place: int) -> None:
        """Begins to read an update of the backlog: one, so that memory stays at four models."""
        if len(self._backlog) <= place or self._fetches:
            return
        following = self._backlog[place]
        try:
            upload = decode(following.data, Upload)
        except BadMessage:
            return  # its turn will come, and with it its error
        if upload.layout == layout.signature and upload.task not in self._done:
            self._fetches[following.id] = self._fetch(upload, layout)

    async def _unfetch(self, entry: Entry) -> None:
        """The update that was read ahead is refused unread: its memory is free again."""
        fetch = self._fetches.pop(entry.id, None)
        if fetch is not None:
            with suppress(BrokerError):
                self._free.append(await fetch)

    async def _forget_fetches(self) -> None:
        for fetch in self._fetches.values():
            fetch.cancel()
        await asyncio.gather(*self._fetches.values(), return_exceptions=True)
        self._fetches.clear()

    # what an entry comes to

    async def _taken(
        self, entry: Entry, upload: Upload, step: Step, update: Model, used: tuple[Model, ...]
    ) -> Change:
        """An update that was applied or buffered."""
        payload = (update,) if self._journal.weights else ()
        return changes.taken(
            entry, upload, step, payload, version=await self._version(step),
            finish=self._end_of_run(step), counts=self._counts, used=used,
        )  # fmt: skip

    async def _round_end(self, entry: Entry, message: RoundEnd, before: Progress) -> Change:
        """The end of a round: a version of what has arrived, unless it was made already."""
        late = self._is_over(before.state.version)
        step = Step(before) if late else close_round(self._strategy, before, message.version)
        version = await self._version(step)
        return changes.round_closed(
            entry, message, step, late=late, version=version, finish=self._end_of_run(step),
            counts=self._counts, used=(before.state.model,) if version is not None else (),
        )  # fmt: skip

    def _refused(self, entry: Entry, upload: Upload, before: Progress, reason: str) -> Change:
        """An update that never reaches the model."""
        self._context.log.warning(
            "update refused", task=upload.task, device=upload.device, reason=reason
        )
        return changes.refused(entry, upload, before, reason, self._counts)

    def _found_again(self, entry: Entry, upload: Upload, before: Progress) -> Change:
        """A task that is in the journal, but Redis does not know it."""
        self._context.log.warning("update found again", task=upload.task, device=upload.device)
        return changes.found_again(entry, upload, before, self._done[upload.task])

    async def _version(self, step: Step) -> Version | None:
        """The version that a step made."""
        if step.made is None:
            return None
        with self._metrics.seconds.labels("digest").time():
            digest = await self._off_loop(step.after.state.model.digest)
        return changes.version_of(step, digest, self._lease.number, self._lease.nonce)

    def _is_over(self, version: int) -> bool:
        """Whether the run ended before ``version`` has a successor; a lost end is made again."""
        made_before = self._ahead is not None and version < self._ahead.version
        return self._finished and not made_before

    def _end_of_run(self, step: Step) -> str | None:
        version = step.after.state.version
        last = self._run is not None and step.made is not None and version >= self._run.versions
        return f"version {version} reached" if last else None

    # making it so in Redis

    async def _settle(self, change: Change, position: int) -> bool:
        """Publishes and commits what the journal has; trouble leaves it pending: whether it is."""
        publish = change.version
        if self._ahead is not None and publish is not None:
            if publish.version <= self._ahead.version:
                publish = None  # Redis has this very version
            else:
                self._ahead = None
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
        done_with = [*self._retained]
        if change is not None:
            done_with.append(Retained(position, change.entry, change.blob, change.end))
        on_disk = bisect_right(done_with, self._recorder.safe, key=lambda one: one.position)
        safe = done_with[:on_disk]
        mine = change.end if change else None
        commit = Commit(
            version=publish,
            held=tuple(one.device for one in progress.held),
            retained=len(done_with) - on_disk,
            mean_staleness=progress.mean_staleness,
            at=progress.state.version,
            ends=tuple(dict.fromkeys(end for end in (mine, *(one.end for one in safe)) if end)),
            entries=tuple(one.entry for one in safe),
            updates=tuple(one.blob for one in safe if one.blob),
            retired=self._publisher.outlived(publish.size) if publish is not None else (),
            finish=change.finish if change else None,
        )
        done = await self._ledger.commit(self._lease.token, commit, ahead=ahead)
        if done.what == "done":
            self._retained = done_with[on_disk:]
            self._counts = done.counts
            for pending, _ in list(self._pending)[1:]:
                self._count(pending)
            self._publisher.deleted(commit.retired)
            if done.finished != self._finished and len(self._pending) < 2:
                self._epoch = 0  # somebody ended it, or Redis forgot that it ended: compare
        elif done.what == "unwritten":
            self._publisher.forget_written()
        elif done.what == "lost":
            await pause(self._context.stop, _LOST_S)  # until the lease is taken again
        else:
            self._epoch = 0  # Redis is behind: compare
        return done.what == "done"

    async def _handed_out(self, change: Change) -> bool:
        """Whether the change's device may have another task: trainers have what it has to know."""
        end = change.end
        if end is None or end.device is None or end.weight is None:
            return True  # nothing was used of it
        return await self._hand_out(change.after.state, {end.device})

    async def _hand_out(self, state: State, devices: set[int] | None = None) -> bool:
        """Gives the pool's trainers what these devices, or all, have to know (SCAFFOLD's c_i).

        False if Redis was emptied meanwhile.
        """
        vectors = state.memory.devices
        if vectors is None or not self._strategy.controls:
            return True
        among = vectors.heard & devices if devices else vectors.heard
        done = await self._publisher.hand_out(vectors, among)
        if not done:
            await pause(self._context.stop, _LOST_S)  # until the lease is taken again
        return done

    async def _recalled(self, run: Run, known: DeviceVectors | None) -> DeviceVectors | None:
        """What the devices have to know as Redis has it; what it has not, as it was known."""
        rule = self._rule.build(run.devices)
        if not rule.controls or rule.devices is None:
            return known
        vectors = known or DeviceVectors(rule.devices, run.layout.parameters)
        for reason in await self._publisher.recall(vectors):
            self._context.log.warning("a device's vector is lost", reason=reason)
        return vectors

    def _end(self, run: Run) -> None:
        """The run is over: by its last version, or because somebody said so."""
        self._run, self._finished = run, True
        self._context.log.info("run finished", why=run.why)

    async def _write_ahead(self, change: Change) -> None:
        """Writes a large model while its update is being journalled."""
        model = change.after.state.model
        if change.version is not None and model.layout.nbytes > blobs.CHUNK and not self._ahead:
            await self._publisher.prepare(change.version, model)

    def _adopt_change(self, change: Change, published: Version | None) -> None:
        """A change is committed."""
        self._pending.popleft()
        in_use = {id(model) for model in self._models_in_use()}
        self._free += [model for model in change.used if id(model) not in in_use]
        if change.end is not None:
            end = change.end
            self._metrics.updates.labels(end.outcome, end.reason).inc()
            if end.weight is not None:
                self._metrics.staleness.observe(end.staleness or 0)
                self._metrics.weight.observe(end.weight)
        if published is not None:
            self._publisher.published(published)
            self._metrics.version.set(published.version)
            for update in published.updates:
                self._context.trace(
                    "published", task=update.task, device=update.device, version=published.version
                )

    def _models_in_use(self) -> Iterator[Model]:
        if self._progress is not None:
            yield from self._progress.state.models()
        for change in (*(change for change, _ in self._pending), *self._unwritten):
            yield from change.after.state.models()
            yield from change.used

    async def _see_to_room(self, size: int) -> None:
        """Nothing comes: perhaps because there is no room for it. Nobody else may free models."""
        used, limit = await self._ledger.memory()
        if limit and used + size > limit:
            await self._make_room()

    async def _make_room(self) -> None:
        """Redis is full: older models go before anything is written again."""
        removed = await self._publisher.make_room()
        if removed:
            self._context.log.warning("Redis is full: older models removed", models=removed)

    async def _patiently(self, work: Callable[[], T]) -> T:
        """What may take minutes, in a thread. The loop beats meanwhile: a restart would only begin
        it again."""
        working = asyncio.create_task(asyncio.to_thread(work))
        try:
            while not working.done():
                self._context.health.beat("queue")
                await asyncio.wait({working}, timeout=_BEAT_S)
            return await working
        finally:
            working.cancel()

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """Arithmetic: here if it is short, in a thread if it would hold up the event loop."""
        large = self._run is not None and self._run.layout.nbytes > _LARGE
        return await asyncio.to_thread(work) if large else work()
