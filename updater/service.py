"""The updater: takes the queue in order, one update after the other, and publishes versions.

Every entry of the queue becomes one change: the strategy's decision (pure), the new model's blob
where there is a new version, and one commit that publishes, ends tasks and deletes what is done
with. The change is kept until the commit is known to have happened, so that trouble with Redis
repeats the commit (which recognises a repetition) and never the update. An entry leaves the queue
only in the commit of the version that contains it: a buffered one stays, and a restarted updater
reads it again.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, TypeVar

from aiohttp import web
from prometheus_client import Counter, Gauge, Histogram, Summary
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
from broker.ledger import Commit, End, Ledger, Run
from broker.messages import (
    Contribution,
    Outcome,
    RoundEnd,
    Upload,
    Version,
    decode,
)
from broker.streams import Entry, Reader
from runtime.backoff import pause
from runtime.config import Section
from runtime.leading import lead
from runtime.service import Context, repeat
from updater.mixing import norm
from updater.strategies import Decision, State, Strategy, Update

T = TypeVar("T")

_LARGE = 4 << 20  # bytes; arithmetic on larger models leaves the event loop
_UNPUBLISHED_S = 600.0  # a model whose version was never committed expires after this
_LOST_S = 0.1  # between two looks at a Redis that was emptied
_REMEMBERED = 10_000  # updates that are recognised when Redis goes back in time
_LARGEST = 1e37  # norm; between models of at most this, no difference overflows float32
_STALENESS_MEMORY = 0.9  # of the moving average that the scheduler steers by


class UpdaterSettings(Section):
    """What the updater keeps and what it refuses."""

    keep_versions: Annotated[int, Field(ge=2)] = 16
    keep_bytes: Annotated[int, Field(ge=0)] = 256 << 20  # the newest two are kept at any size
    max_norm: Annotated[float, Field(gt=0)] | None = None  # of an update's vector, Euclidean
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    drain_s: Annotated[float, Field(gt=0)] = 20.0


@dataclass(frozen=True)
class _Change:
    """What one entry of the queue does: the commit, and what is true once it is done."""

    commit: Commit
    state: State
    held: tuple[_Held, ...]
    used: tuple[Model, ...]  # models that the change read or wrote


@dataclass(frozen=True)
class _Held:
    """An update that is buffered: it stays in the queue until the version that contains it."""

    entry: str
    blob: str
    contribution: Contribution
    end: End


@dataclass
class _Metrics:
    """Stable names for operators."""

    context: Context
    updates: Counter = field(init=False)
    staleness: Histogram = field(init=False)
    weight: Histogram = field(init=False)
    version: Gauge = field(init=False)
    seconds: Summary = field(init=False)

    def __post_init__(self) -> None:
        registry = self.context.registry
        self.updates = Counter(
            "fedstream_updates", "Updates by outcome.", ["outcome", "reason"], registry=registry
        )
        self.staleness = Histogram(
            "fedstream_staleness", "Versions that an update came late.", registry=registry,
            buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128),
        )  # fmt: skip
        self.weight = Histogram(
            "fedstream_weight", "Weight that an update was given.", registry=registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0),
        )  # fmt: skip
        self.version = Gauge("fedstream_version", "The newest version.", registry=registry)
        self.seconds = Summary(
            "fedstream_updater_seconds", "Where the time goes.", ["part"], registry=registry
        )


class Updater:
    """The service. ``found`` makes a run that does not exist yet: its record and version 0."""

    role = "updater"

    def __init__(
        self,
        settings: UpdaterSettings,
        strategy: Strategy,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        founded_as: str,
        found: Callable[[], tuple[Run, Model]],
    ) -> None:
        self._settings = settings
        self._strategy = strategy
        self._strategy_name = founded_as
        self._found = found
        self._keys = keys
        self._client = Client(redis, name)
        self._ledger = Ledger(self._client, keys, name)
        self._lease = Lease(self._client, keys, self.role, name, seconds=settings.lease_s)
        self._reader = Reader(self._client, {keys.queue: "0"})
        self._backlog: deque[Entry] = deque()
        self._fetches: dict[str, asyncio.Task[Model]] = {}
        self._free: list[Model] = []
        self._run: Run | None = None
        self._state: State | None = None
        self._held: tuple[_Held, ...] = ()
        self._kept: dict[str, int] = {}  # blob -> version, oldest first
        self._done: dict[str, End] = {}  # by the update's blob, oldest first
        self._mean_staleness = 0.0
        self._pending: _Change | None = None
        self._written = ""  # the pending version's blob, once all of it is there
        self._epoch = 0  # in which Redis was last seen to have our newest version
        self._finished = False

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """None of its own."""
        return ()

    async def run(self, context: Context) -> None:
        """Leads, and works until stop."""
        self._context = context
        self._metrics = _Metrics(context)
        try:
            await lead(context, self._lease, self._work)
        finally:
            await self._forget_fetches()
            await self._client.close()

    async def _work(self) -> None:
        await repeat(self._context, "queue", self._step, within_s=120.0)

    async def _step(self) -> None:
        """One entry of the queue, or what has to come before it."""
        if self._state is None:
            await self._recover()
        elif self._lease.number != self._epoch:
            await self._look_again(self._state)
        elif self._pending is not None:
            await self._settle(self._pending)
        elif self._finished:
            await self._clear()
        elif not self._backlog:
            await self._read(self._state)
        else:
            self._pending = await self._change(self._backlog[0], self._state)
            if self._pending is not None:
                await self._settle(self._pending)

    async def _read(self, state: State) -> None:
        """What is new in the queue. Nothing: is Redis where we left it, or did it go back?"""
        new = (await self._reader.read(count=16)).get(self._keys.queue, [])
        held = {one.entry for one in self._held}
        self._backlog.extend(entry for entry in new if entry.id not in held)
        if new:
            return
        head = await self._ledger.head()
        if head is None or head.version < state.version:
            await self._publish_again("no head" if head is None else f"version {head.version}")
        elif await self._client.call("XLEN", self._keys.queue) > len(held):
            self._reader.rewind(self._keys.queue)  # what we did is there again

    # becoming the updater of a run

    async def _recover(self) -> None:
        """Takes up the run where Redis has it, or makes it."""
        epoch = self._lease.number
        try:
            run = await self._ledger.run()
        except NoRun:
            run, model = await asyncio.to_thread(self._found)
            version = self._version(0, model, parent=None)
            await blobs.write(
                self._client, self._keys.model(version.blob), model, expire_s=_UNPUBLISHED_S
            )
            reply = await self._ledger.create(self._lease.token, run, version)
            if reply not in ("created", "exists"):
                return  # Redis was emptied this very moment: once more from the beginning
            self._context.log.info(
                f"run {reply}", strategy=run.strategy, parameters=run.layout.parameters,
                bytes=run.layout.nbytes,
            )  # fmt: skip
            run = await self._ledger.run()
        if run.strategy != self._strategy_name:
            raise ConfigError(
                f"strategy.name: run {self._keys.name!r} was created with {run.strategy}, not "
                f"{self._strategy_name}; use another run.name, or purge the run"
            )
        head = await self._ledger.head()
        if head is None:
            raise BrokerError(f"run {self._keys.name!r} has no version: purge it")
        model = Model(run.layout)
        await blobs.read(self._client, self._keys.model(head.blob), model, digest=head.digest)
        self._kept = await self._ledger.kept()
        self._epoch = epoch
        self._run, self._finished = run, run.state == "finished"
        self._mean_staleness = head.mean_staleness
        self._start_from(State(head.version, model))
        self._context.log.info("recovered", version=head.version, state=run.state)

    def _start_from(self, state: State) -> None:
        """Reads the queue from its beginning on top of ``state``."""
        self._backlog.clear()
        self._reader.rewind(self._keys.queue)
        self._held = ()
        self._pending = None
        self._written = ""
        self._state = state
        self._metrics.version.set(state.version)

    async def _look_again(self, state: State) -> None:
        """Redis lost the lease, and we have it again: was that all that Redis lost?"""
        epoch = self._lease.number
        head = await self._ledger.head()
        if head is None or head.version < state.version:
            await self._publish_again("no head" if head is None else f"version {head.version}")
        else:
            self._epoch = epoch

    async def _publish_again(self, why: str) -> None:
        """Redis lost the newest version: it gets it again, as a new lineage's first."""
        if self._run is None or self._state is None:
            return
        epoch = self._lease.number
        self._context.log.error("Redis lost the run: publishing it again", found=why)
        state = State(self._state.version, self._state.model)
        version = self._version(state.version, state.model, parent=None)
        await blobs.write(
            self._client, self._keys.model(version.blob), state.model, expire_s=_UNPUBLISHED_S
        )
        reply = await self._ledger.create(self._lease.token, self._run, version, again=True)
        if reply != "created":  # emptied once more
            await pause(self._context.stop, _LOST_S)
            return
        self._kept = await self._ledger.kept()
        self._epoch = epoch
        await self._forget_fetches()
        self._start_from(state)

    # one entry

    async def _change(self, entry: Entry, state: State) -> _Change | None:
        """What an entry of the queue does to the state; None if it was no message."""
        try:
            message = decode(entry.data, Upload, RoundEnd)
        except BadMessage as error:
            await self._ledger.bury(self._keys.queue, "", entry, str(error))
            self._backlog.popleft()
            return None
        if isinstance(message, RoundEnd):
            return self._round_end(entry, message, state)
        if message.blob in self._done:
            return self._done_before(entry, message, state)
        refusal, update = await self._checked(entry, message, state)
        if update is None:
            return self._refused(entry, message, state, refusal)
        spare = self._free.pop() if self._free else Model(state.model.layout)
        with self._metrics.seconds.labels("mix").time():
            after, decision = await self._off_loop(
                lambda: self._strategy.receive(state, update, spare)
            )
        used = (state.model, update.model, spare)
        if decision.outcome == "dropped":
            return replace(self._refused(entry, message, state, "too stale"), used=used)
        return self._taken(entry, message, state, after, decision, used)

    async def _checked(
        self, entry: Entry, upload: Upload, state: State
    ) -> tuple[str, Update | None]:
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
        if not math.isfinite(size):
            self._free.append(model)
            return "not finite", None
        if size > min(self._settings.max_norm or _LARGEST, _LARGEST):
            self._free.append(model)
            return "norm too large", None
        return "", Update(
            model=model, tau=upload.tau, device=upload.device,
            samples=upload.samples, steps=upload.steps, lr=upload.lr,
        )  # fmt: skip

    def _refusal(self, upload: Upload, state: State) -> str:
        """Why an update is refused for what it says of itself; '' if it is not."""
        limit = self._strategy.max_staleness
        if upload.tau > state.version:
            return "unknown base"
        if limit is not None and state.version - upload.tau > limit:
            return "too stale"
        return "" if upload.layout == state.model.layout.signature else "layout"

    async def _fetched(self, entry: Entry, upload: Upload, layout: Layout) -> Model:
        """The update's model, whose reading began while the one before was being mixed."""
        with self._metrics.seconds.labels("fetch").time():
            fetch = self._fetches.pop(entry.id, None) or self._fetch(upload, layout)
            self._fetch_ahead(layout)
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

    def _fetch_ahead(self, layout: Layout) -> None:
        """Begins to read the next update: one ahead, so that memory stays at four models."""
        if len(self._backlog) < 2 or self._fetches:
            return
        following = self._backlog[1]
        try:
            upload = decode(following.data, Upload)
        except BadMessage:
            return  # its turn will come, and with it its error
        if upload.layout == layout.signature:
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

    def _taken(
        self,
        entry: Entry,
        upload: Upload,
        before: State,
        after: State,
        decision: Decision,
        used: tuple[Model, ...],
    ) -> _Change:
        """An update that was applied or buffered."""
        outcome: Outcome = "applied" if decision.outcome == "applied" else "buffered"
        self._mean_staleness = (
            _STALENESS_MEMORY * self._mean_staleness + (1 - _STALENESS_MEMORY) * decision.staleness
        )
        contribution = Contribution(
            task=upload.task, device=upload.device, tau=upload.tau,
            staleness=decision.staleness, weight=decision.weight,
            samples=upload.samples, steps=upload.steps, loss=upload.loss,
        )  # fmt: skip
        end = End(
            task=upload.task, attempt=upload.attempt, outcome=outcome, device=upload.device,
            version=after.version, staleness=decision.staleness, weight=decision.weight,
        )  # fmt: skip
        held = (*self._held, _Held(entry.id, upload.blob, contribution, end))
        if after.version == before.version:
            return _Change(self._commit(after, ends=(end,)), after, held, used)
        return self._new_version(before, after, held, used, ends=(end,))

    def _round_end(self, entry: Entry, message: RoundEnd, state: State) -> _Change:
        """The end of a round: a version of what has arrived, unless it was made already."""
        after = self._strategy.end_round(state) if message.version == state.version else state
        if after.version == state.version:
            return _Change(self._commit(state, entries=(entry.id,)), state, self._held, ())
        return self._new_version(state, after, self._held, (state.model,), entries=(entry.id,))

    def _refused(self, entry: Entry, upload: Upload, state: State, reason: str) -> _Change:
        """An update that never reaches the model."""
        self._context.log.warning(
            "update refused", task=upload.task, device=upload.device, reason=reason
        )
        end = End(
            task=upload.task, attempt=upload.attempt, outcome="refused", reason=reason,
            device=upload.device, staleness=max(0, state.version - upload.tau),
        )  # fmt: skip
        commit = self._commit(state, ends=(end,), entries=(entry.id,), updates=(upload.blob,))
        return _Change(commit, state, self._held, ())

    def _done_before(self, entry: Entry, upload: Upload, state: State) -> _Change:
        """An update that Redis forgot was done: its task ends as it did, and no model changes."""
        self._context.log.warning("update found again", task=upload.task, device=upload.device)
        commit = self._commit(
            state, ends=(self._done[upload.blob],), entries=(entry.id,), updates=(upload.blob,)
        )
        return _Change(commit, state, self._held, ())

    def _new_version(
        self,
        before: State,
        after: State,
        held: tuple[_Held, ...],
        used: tuple[Model, ...],
        *,
        ends: tuple[End, ...] = (),
        entries: tuple[str, ...] = (),
    ) -> _Change:
        """The commit that publishes ``after`` with everything that is in it."""
        with self._metrics.seconds.labels("digest").time():
            version = self._version(after.version, after.model, before.version)
        version = version.model_copy(update={"updates": tuple(one.contribution for one in held)})
        commit = self._commit(
            after,
            version=version,
            ends=ends,
            entries=(*(one.entry for one in held), *entries),
            updates=tuple(one.blob for one in held),
        )
        return _Change(commit, after, (), used)

    def _commit(
        self,
        state: State,
        *,
        version: Version | None = None,
        ends: tuple[End, ...] = (),
        entries: tuple[str, ...] = (),
        updates: tuple[str, ...] = (),
    ) -> Commit:
        run = self._run
        last = run is not None and version is not None and version.version >= run.versions
        return Commit(
            version=version,
            buffered=state.memory.arrivals,
            mean_staleness=self._mean_staleness,
            ends=ends,
            entries=entries,
            updates=updates,
            retired=self._outlived() if version is not None else (),
            finish=f"version {version.version} reached" if last and version else None,
        )

    def _version(self, number: int, model: Model, parent: int | None) -> Version:
        epoch = self._lease.number
        return Version(
            version=number, time=time.time(), epoch=epoch, parent=parent, digest=model.digest(),
            blob=f"{number}.{epoch}", size=model.layout.nbytes,
        )  # fmt: skip

    def _outlived(self) -> tuple[str, ...]:
        """Models to delete so that with one more the limits hold."""
        size = self._run.layout.nbytes if self._run else 1
        by_bytes = self._settings.keep_bytes // max(size, 1)
        # Two: whoever reads the newest when the next is published shall come to an end.
        most = max(2, min(self._settings.keep_versions, by_bytes))
        surplus = len(self._kept) + 1 - most
        return tuple(list(self._kept)[:surplus]) if surplus > 0 else ()

    # making it so

    async def _settle(self, change: _Change) -> None:
        """Publishes and commits a change; trouble leaves it pending."""
        commit = change.commit
        with self._metrics.seconds.labels("publish").time():
            try:
                ahead = await self._prepared(commit.version, change.state.model)
                done = await self._ledger.commit(self._lease.token, commit, ahead=ahead)
            except OutOfMemory:
                await self._make_room()
                raise
        if done == "done":
            self._adopt(change)
        elif done == "finished":
            self._run, self._finished, self._pending = await self._ledger.run(), True, None
            self._context.log.info("run finished elsewhere")
        elif done == "unwritten":
            self._written = ""  # it expired while Redis was away, or never got there
        elif done == "lost":
            await pause(self._context.stop, _LOST_S)  # until the lease is taken again
        else:
            await self._publish_again(done)

    async def _prepared(self, version: Version | None, model: Model) -> Sequence[Command]:
        """Writes a version's model before the commit that publishes it, or has it ride along."""
        if version is None or version.blob == self._written:
            return ()  # a reply was lost: it may be published by now, and must not expire
        key = self._keys.model(version.blob)
        ahead = await blobs.prepare(self._client, key, model, expire_s=_UNPUBLISHED_S)
        self._written = version.blob
        return ahead

    def _adopt(self, change: _Change) -> None:
        """A change is committed: it is now what is."""
        commit = change.commit
        # A buffered one is done with the version that contains it: until then it is read again.
        within = self._held if commit.version is not None else ()
        for end in (*(one.end for one in within), *commit.ends):
            if commit.version is not None or end.outcome != "buffered":
                self._remember(end)
        self._state, self._held, self._pending = change.state, change.held, None
        self._backlog.popleft()
        in_use = {id(model) for model in change.state.models()}
        self._free += [model for model in change.used if id(model) not in in_use]
        for blob in commit.retired:
            self._kept.pop(blob, None)
        for end in commit.ends:
            self._metrics.updates.labels(end.outcome, end.reason).inc()
            if end.weight is not None:
                self._metrics.staleness.observe(end.staleness or 0)
                self._metrics.weight.observe(end.weight)
        if commit.version is not None:
            self._kept[commit.version.blob] = commit.version.version
            self._metrics.version.set(commit.version.version)
        if commit.finish is not None and self._run is not None:
            self._finished = True
            self._run = replace(
                self._run, state="finished", why=commit.finish, finished=time.time()
            )
            self._context.log.info("run finished", why=commit.finish)

    def _remember(self, end: End) -> None:
        self._done[f"{end.task}.{end.attempt}"] = end
        if len(self._done) > _REMEMBERED:
            del self._done[next(iter(self._done))]

    async def _clear(self) -> None:
        """The run is over: what still waits is given up, so that every task ends, and goes."""
        await self._forget_fetches()
        self._reader.rewind(self._keys.queue)
        entries = (await self._reader.read(count=64)).get(self._keys.queue, [])
        uploads: list[Upload] = []
        for entry in entries:
            with suppress(BadMessage):
                uploads.append(decode(entry.data, Upload))
        if not entries:
            return
        ends = [
            End(
                task=upload.task, attempt=upload.attempt, device=upload.device,
                outcome="given_up", reason="run finished",
            )
            for upload in uploads
        ]  # fmt: skip
        commit = Commit(
            version=None, buffered=0, mean_staleness=self._mean_staleness, ends=ends,
            entries=[entry.id for entry in entries], updates=[upload.blob for upload in uploads],
        )  # fmt: skip
        if await self._ledger.commit(self._lease.token, commit) == "done":
            self._context.log.info("updates left over given up", updates=len(uploads))

    async def _make_room(self) -> None:
        """Redis is full: frees all models but the newest before anything is written again."""
        older = list(self._kept)[:-1]
        if older and await self._ledger.retire(self._lease.token, older) == "done":
            self._context.log.warning("Redis is full: older models removed", models=len(older))
            for blob in older:
                del self._kept[blob]

    async def _off_loop(self, work: Callable[[], T]) -> T:
        """Arithmetic: here if it is short, in a thread if it would hold up the event loop."""
        large = self._run is not None and self._run.layout.nbytes > _LARGE
        return await asyncio.to_thread(work) if large else work()
