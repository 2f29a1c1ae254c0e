"""What the services' tests share: waiting, models, a run played by hand, a proxy that cuts."""

from __future__ import annotations

import asyncio
import inspect
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import pytest
import structlog
from prometheus_client import CollectorRegistry

from fedstream.broker import blobs, clock
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.commands import Command
from fedstream.broker.keys import COORDINATORS, TRAINERS, Keys, member
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.coordinator import CoordinatorLedger
from fedstream.broker.ledger.evaluator import EvaluatorLedger
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.broker.ledger.scheduler import SchedulerLedger
from fedstream.broker.ledger.trainer import Outbox
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.published import read_model
from fedstream.broker.streams import Entry, Group
from fedstream.core.layout import Layout, Model, Tensor, Unshared
from fedstream.core.messages import (
    POOL,
    Assignment,
    CloseRound,
    Dead,
    DevicesEvaluated,
    Event,
    GiveUp,
    Heartbeat,
    Measured,
    Message,
    Presence,
    RoundEnd,
    SetQuarantine,
    StepProposed,
    Trigger,
    Upload,
    Version,
    Withdraw,
    decode,
    task_id,
)
from fedstream.core.records import Commit, End, Run, View
from fedstream.runtime.backoff import pause
from fedstream.runtime.health import Health
from fedstream.runtime.service import Context, Service

SIZE_LIMIT = 1 << 30
_SAID = (Upload, GiveUp, Dead, Trigger, Presence, Event, Measured)  # by trainers
M = TypeVar("M", bound=Message)


async def wait_until(condition: Callable[[], Any], timeout: float = 60.0, what: str = "") -> Any:
    """Waits for a condition, plain or async: what it gave. AssertionError if it never held.

    ``timeout`` guards against waiting for ever; no test depends on its length. The longer it takes,
    the less often it looks: what is waited for needs the processor more.
    """
    begun = time.monotonic()
    until = begun + timeout
    while True:
        looks = time.monotonic()
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        now = time.monotonic()
        if now > until:
            asked = inspect.getsource(condition) if inspect.isfunction(condition) else condition
            raise AssertionError(f"not within {timeout} s: {what or asked}")
        rest = min(0.025, (now - begun) / 20), min(0.05, 3 * (now - looks))
        await asyncio.sleep(max(0.005, *rest))


def layout_of(parameters: int = 4, buffers: int = 0, integers: int = 0) -> Layout:
    """A layout of so many elements."""
    tensors = [Tensor("weight", (parameters,), "float32", "parameter")]
    if buffers:
        tensors.append(Tensor("mean", (buffers,), "float32", "buffer"))
    if integers:
        tensors.append(Tensor("seen", (integers,), "int64", "integer"))
    return Layout(tuple(tensors))


def with_frozen(layout: Layout, *values: float) -> Layout:
    """The layout of a model with these frozen parameters too."""
    base = Tensor("base", (len(values),), "float32", "parameter")
    frozen = model_of(Layout((base,)), *values)
    return replace(layout, unshared=Unshared(frozen.layout, (), frozen.digest(), frozen.itself))


def model_of(layout: Layout, *floats: float, integers: Sequence[int] = ()) -> Model:
    """A model with these values; one value fills it."""
    model = Model(layout)
    model.floats[:] = floats if len(floats) > 1 else (floats[0] if floats else 0.0)
    model.integers[:] = integers if len(integers) else 0
    return model


class EveryRole(CoordinatorLedger, SchedulerLedger, UpdaterLedger, EvaluatorLedger, OperatorLedger):
    """The ledger for tests that play every role by hand."""


async def written_in(client: Client, key: str, model: Model, chunk: int) -> int:
    """A blob as another release writes it, in chunks of so many bytes: how many there are."""
    data = model.buffer.data
    chunks = [data[at : at + chunk] for at in range(0, data.nbytes, chunk)]
    await client.call("HSET", key, "size", data.nbytes)
    await client.pipeline(
        [("PEXPIRE", key, 60_000), *(("HSET", key, n, part) for n, part in enumerate(chunks))]
    )
    return len(chunks)


@dataclass
class Hand:
    """A run in which every service's step is made by hand, one at a time."""

    client: Client
    keys: Keys
    ledger: EveryRole
    layout: Layout = field(default_factory=layout_of)
    scheduler: Lease = field(init=False)
    updater: Lease = field(init=False)
    devices: int = 0

    def __post_init__(self) -> None:
        self.scheduler = Lease(self.client, self.keys, "scheduler", "s", seconds=60)
        self.updater = Lease(self.client, self.keys, "updater", "u", seconds=60)
        self.triggers = Group(self.client, self.keys.triggers, COORDINATORS, "c")
        self.inbox = Group(self.client, self.keys.inbox(POOL), COORDINATORS, "c")
        self.outbox = Outbox(self.client, self.keys, POOL)
        self.tasks = Group(self.client, self.keys.tasks, TRAINERS, "t")

    def run(self, **changes: Any) -> Run:
        """A run's record."""
        about: dict[str, Any] = {
            "layout": self.layout,
            "strategy": "fedasync",
            "task": "digits",
            "devices": 10,
            "versions": 100,
            "seed": 0,
            "created": 1.5,
        }
        return Run(**about | changes)

    async def publish(self, number: int, *floats: float, write: bool = True) -> Version:
        """A version's model, written; its entry is for a commit."""
        model = model_of(self.layout, *floats)
        version = Version(
            version=number,
            time=float(number),
            epoch=self.updater.number,
            parent=number - 1 if number else None,
            digest=model.digest(),
            blob=f"{number}.{self.updater.number}",
            size=self.layout.nbytes,
        )
        if write:
            await blobs.write(self.client, self.keys.model(version.blob), model, expire_s=60)
        return version

    async def create(self, **changes: Any) -> Version:
        """The leases and the run with its version 0, all zeros; Redis knows all scripts."""
        await self.ledger.prepare([POOL])
        if not self.scheduler.number:
            assert await self.scheduler.acquire()
        assert await self.updater.acquire()
        version = await self.publish(0)
        reply = await self.ledger.create(self.updater.token, self.run(**changes), version)
        assert reply.what == "created"
        return version

    def trigger(self, **changes: Any) -> Trigger:
        """A trigger for the next device."""
        self.devices += 1
        about: dict[str, Any] = {
            "task": task_id(self.devices, bytes(10)),
            "device": self.devices % 10,
            "seed": 1,
            "epochs": 1,
        }
        return Trigger(**about | changes)

    async def join(self) -> None:
        """Becomes the scheduler of a run that an updater makes."""

        async def created() -> bool:
            return await self.ledger.head() is not None

        await wait_until(created)
        assert await self.scheduler.acquire()

    async def version(self) -> int:
        """The newest version; -1 without one."""
        head = await self.ledger.head()
        return head.version if head else -1

    async def reaches(self, number: int) -> None:
        """Waits for a version."""

        async def there() -> bool:
            return await self.version() >= number

        await wait_until(there, what=f"version {number}")
        assert await self.version() == number

    async def published(self) -> list[Version]:
        """Every version that was told."""
        rows = await self.client.call("XRANGE", self.keys.models, "-", "+")
        return [Version.decode(fields[1]) for _, fields in rows]

    async def model(self, version: Version) -> Model:
        """A version's model, as any reader reads it."""
        model = Model(self.layout)
        key = self.keys.model(version.blob)
        await read_model(
            self.client,
            key,
            model,
            digest=version.digest,
            chunks=version.chunks,
            encoded=version.encoded,
        )
        return model

    async def open(self, n: int = 1, **changes: Any) -> list[Trigger]:
        """The scheduler opens so many tasks, and hands them out."""
        triggers = [self.trigger(**changes) for _ in range(n)]
        issued = int(await self.client.call("HGET", self.keys.counts, "issued") or 0)
        assert await self.ledger.trigger(self.scheduler.token, 10_000, issued, triggers) == n
        return triggers

    async def request(self, n: int = 1, **changes: Any) -> list[Trigger]:
        """So many tasks are opened that a coordinator is to hand out, as an operator's retry is."""
        triggers = [self.trigger(**changes) for _ in range(n)]
        commands: list[Command] = [("HINCRBY", self.keys.counts, "issued", n)]
        for one in triggers:
            commands += [
                ("HSET", self.keys.open, one.task, one.encode()),
                ("XADD", self.keys.changes, "*", "t", one.task),
                ("XADD", self.keys.triggers, "*", "m", one.encode()),
            ]
        await self.client.pipeline([("MULTI",), *commands, ("EXEC",)])
        return triggers

    async def dispatch(self) -> list[str]:
        """The coordinator handles every trigger that is new: what became of each."""
        await self.triggers.ensure()
        verdicts = []
        for entry in await self.triggers.read(count=1000, block_ms=0):
            message = decode(entry.data, Trigger, CloseRound, Withdraw)
            if isinstance(message, CloseRound):
                verdicts.append(await self.ledger.close_round(entry, message))
            elif isinstance(message, Withdraw):
                verdicts.append(await self.ledger.withdraw(entry, message))
            else:
                verdicts.append(await self.ledger.dispatch(entry, message))
        return verdicts

    async def take_up(
        self,
        *triggers: Trigger,
        site: str = POOL,
        rate: int = 100,
        limit: int = 1000,
        anarchic: bool = True,
    ) -> list[str]:
        """The coordinator handles what devices ask for by themselves: what became of each."""
        for trigger in triggers:
            await Outbox(self.client, self.keys, site).say(trigger)
        return [
            await self.ledger.take_up(
                site, entry, Trigger.decode(entry.data), anarchic=anarchic, rate=rate, limit=limit
            )
            for entry in await self.heard(site)
        ]

    async def words(self, kind: type[M]) -> list[M]:
        """What the pool has said that nobody has dealt with yet, of this kind, oldest first."""
        return [one for one in await self._words() if isinstance(one, kind)]

    async def answered(self) -> list[Upload | GiveUp]:
        """Answers that the pool has given and nobody has dealt with yet, oldest first."""
        return [one for one in await self._words() if isinstance(one, Upload | GiveUp)]

    async def _words(self) -> list[Message]:
        rows = await self.client.call("XRANGE", self.keys.inbox(POOL), "-", "+")
        return [decode(fields[1], *_SAID) for _, fields in rows]

    async def attend(self) -> None:
        """The coordinator hears of the pool's trainers, and takes up what they ask for."""
        for entry in await self.heard():
            match decode(entry.data, *_SAID):
                case Presence() as said:
                    await self.ledger.hear(POOL, entry, said, most=100, rate=1000)
                case Trigger() as own:
                    await self.ledger.take_up(
                        POOL, entry, own, anarchic=True, rate=1000, limit=1000
                    )
                case _:  # stays where it is
                    continue

    async def heard(self, site: str = POOL) -> list[Entry]:
        """What a site has said, delivered to the coordinator."""
        inbox = Group(self.client, self.keys.inbox(site), COORDINATORS, "c")
        await inbox.ensure()
        return await inbox.read(count=1000, block_ms=0)

    async def hear(self, site: str, entry: Entry, *, most: int = 1000, rate: int = 1000) -> str:
        """A coordinator hears what a trainer says of itself."""
        said = decode(entry.data, Presence, Heartbeat)
        if isinstance(said, Heartbeat):
            return await self.ledger.beat(site, entry, said, rate=rate)
        return await self.ledger.hear(site, entry, said, most=most, rate=rate)

    async def announce(
        self, name: str, *owns: int, site: str = POOL, most: int = 1000, concurrent: bool = False
    ) -> list[str]:
        """A trainer says that it is there, and a coordinator hears it: what came of that.

        Where one is running, it may be that one.
        """
        before = await self.client.call("ZSCORE", self.keys.alive, member(site, name))
        await Outbox(self.client, self.keys, site).announce(name, owns, concurrent=concurrent)
        if entries := await self.heard(site):
            return [await self.hear(site, entry, most=most) for entry in entries]

        async def by_another() -> bool:
            now = await self.client.call("ZSCORE", self.keys.alive, member(site, name))
            return bool(now != before)

        await wait_until(by_another)
        return []

    async def goodbye(self, name: str) -> None:
        """A trainer of the pool says that it leaves, and the coordinator hears it."""
        await self.outbox.goodbye(name)
        for entry in await self.heard():
            await self.ledger.hear(POOL, entry, Presence.decode(entry.data), most=100, rate=1000)

    async def take(self, count: int = 1000) -> list[tuple[Entry, Assignment]]:
        """A trainer takes tasks."""
        await self.tasks.ensure()
        entries = await self.tasks.read(count=count, block_ms=0)
        return [(entry, Assignment.decode(entry.data)) for entry in entries]

    async def trained(
        self, task: Assignment | Trigger, *floats: float, write: bool = True, **changes: Any
    ) -> Upload:
        """A trainer has trained: its update is written, the answer is not yet said."""
        head = await self.ledger.head()
        assert head
        model = model_of(self.layout, *(floats or (1.0,)))
        about: dict[str, Any] = {
            "task": task.task,
            "attempt": "a1",
            "device": task.device,
            "trainer": "t",
            "tau": head.version,
            "base": head.given,
            "layout": self.layout.signature,
            "digest": model.digest(),
            "size": self.layout.nbytes,
            "samples": 10,
            "steps": 5,
            "lr": 0.1,
        }
        upload = Upload(**about | changes)
        if write:
            await blobs.write(self.client, self.keys.update(upload.blob), model, expire_s=60)
        return upload

    async def said(self, *answers: Upload | GiveUp | Heartbeat, site: str = POOL) -> list[Entry]:
        """The answers, said without a task's lease; delivered to the coordinator."""
        for answer in answers:
            await self.client.call("XADD", self.keys.inbox(site), "*", "m", answer.encode())
        return await self.heard(site)

    async def admit(
        self, *answers: Upload | GiveUp, site: str = POOL, trusted: bool = True
    ) -> list[tuple[str, str]]:
        """The coordinator decides on answers: the verdict and reason for each."""
        return [
            await self.ledger.admit(
                entry,
                decode(entry.data, Upload, GiveUp),
                size_limit=SIZE_LIMIT,
                site=site,
                trusted=trusted,
            )
            for entry in await self.said(*answers, site=site)
        ]

    async def admitted(self, *floats: float, **changes: Any) -> Upload:
        """A task from its trigger into the queue."""
        [trigger] = await self.open()
        await self.dispatch()
        for entry, _ in await self.take():
            await self.client.call("XACK", self.keys.tasks, TRAINERS, entry.id)
            await self.client.call("XDEL", self.keys.tasks, entry.id)
        upload = await self.trained(trigger, *floats, **changes)
        assert await self.admit(upload) == [("admitted", "")]
        return upload

    async def slip_in(self, upload: Upload) -> None:
        """An update that admission would not have let into the queue."""
        written = self.keys.update(upload.blob)
        if await self.client.call("EXISTS", written):
            await self.client.call("RENAME", written, self.keys.queued(upload.blob))
        await self.client.call("HSET", self.keys.admitted, upload.task, upload.attempt)
        await self.client.call("XADD", self.keys.queue, "*", "m", upload.encode())

    async def queue(
        self,
    ) -> list[tuple[str, Upload | RoundEnd | SetQuarantine | DevicesEvaluated | StepProposed]]:
        """What waits for the updater."""
        rows = await self.client.call("XRANGE", self.keys.queue, "-", "+")
        return [
            (
                id_.decode(),
                decode(fields[1], Upload, RoundEnd, SetQuarantine, DevicesEvaluated, StepProposed),
            )
            for id_, fields in rows
        ]

    async def queue_is_empty(self) -> bool:
        """Whether the updater has done everything."""
        return not await self.queue()

    async def commit(
        self, number: int | None, *uploads: Upload, write: bool = True, **changes: Any
    ) -> str:
        """The updater commits: the uploads are applied in version ``number``, or refused."""
        version = None if number is None else await self.publish(number, number, write=write)
        entries = {
            message.blob: id_ for id_, message in await self.queue() if isinstance(message, Upload)
        }
        about: dict[str, Any] = {
            "versions": [version] if version else [],
            "held": (),
            "mean_staleness": 0.5,
            "ends": [
                End(
                    task=upload.task,
                    attempt=upload.attempt,
                    device=upload.device,
                    outcome="applied" if version else "refused",
                    reason="" if version else "digest",
                    version=number,
                    staleness=0,
                    weight=0.6 if version else None,
                )
                for upload in uploads
            ],
            "entries": [entries[upload.blob] for upload in uploads if upload.blob in entries],
            "updates": [upload.blob for upload in uploads],
        }
        return (await self.ledger.commit(self.updater.token, Commit(**about | changes))).what

    async def events(self, what: str = "outcome") -> list[Event]:
        """The events of a kind, oldest first."""
        rows = await self.client.call("XRANGE", self.keys.events, "-", "+")
        told = [Event.decode(fields[1]) for _, fields in rows]
        return [event for event in told if event.what == what]

    async def balanced(self) -> None:
        """issued = applied + buffered + refused + given up + dead + open."""
        view = await self.ledger.look()
        assert view.issued == sum(view.outcomes.values()) + len(view.open), view.counts


def served_devices(view: View) -> tuple[int, ...]:
    """Devices that a trainer serves: the owned ones, and with a pool all others too."""
    return view.owned if view.owned and not view.pool else tuple(range(view.run.devices))


def askable(view: View) -> tuple[int, ...]:
    """Served devices that are not in quarantine, and have a privacy budget left."""
    return tuple(d for d in served_devices(view) if not view.head.bars(d))


async def snapshot(client: Client, keys: Keys) -> dict[str, object]:
    """Everything that a run has in Redis, so that 'nothing was done' can be said."""
    found: dict[str, object] = {}
    for name in sorted(await client.call("KEYS", keys.prefix + "*")):
        kind = (await client.call("TYPE", name)).decode()
        expires = await client.call("PTTL", name) >= 0
        value: Any
        if kind == "stream":
            groups = await client.call("XINFO", "GROUPS", name)
            pending = [
                await client.call("XPENDING", name, row[1], "-", "+", 1000) for row in groups
            ]
            value = (
                await client.call("XRANGE", name, "-", "+"),
                [[(row[0], row[1], row[3]) for row in rows] for rows in pending],
            )
        else:
            value = {
                "hash": lambda: client.call("HGETALL", name),  # noqa: B023
                "zset": lambda: client.call("ZRANGE", name, 0, -1, "WITHSCORES"),  # noqa: B023
                "string": lambda: client.call("GET", name),  # noqa: B023
                "set": lambda: client.call("SMEMBERS", name),  # noqa: B023
            }[kind]()
            value = await value
            if kind == "hash":  # in no order
                value = dict(zip(value[::2], value[1::2], strict=True))
        found[name.decode()] = (kind, expires, value)
    return found


def free_port() -> int:
    """A port of this machine for a program that cannot choose one itself."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


@asynccontextmanager
async def running(
    service: Service, context: Context, *, may_fail: bool = False
) -> AsyncIterator[asyncio.Task[None]]:
    """The service runs inside the block, and is then cut off wherever it is."""
    task = asyncio.create_task(service.run(context), name=service.role)
    failure: BaseException | None = None
    try:
        yield task
    except AssertionError as failed:
        if task.done() and not may_fail and (error := task.exception()):
            raise error from failed  # that is why
        raise
    finally:
        if task.done():
            failure = task.exception()
        task.cancel()
        await asyncio.wait({task})
    if failure is not None and not may_fail:
        raise failure


def context() -> Context:
    """What the runtime gives a service."""
    return Context(asyncio.Event(), Health(), CollectorRegistry(), structlog.get_logger())


def counted(context: Context, name: str, **labels: str) -> float:
    """A metric's value."""
    return context.registry.get_sample_value(name, labels) or 0.0


async def awaits_news(client: Client, name: str) -> bool:
    """Whether the client of this name is blocked in Redis, reading a stream."""
    listing = (await client.call("CLIENT", "LIST")).decode()
    found = (dict(word.split("=", 1) for word in line.split()) for line in listing.splitlines())
    return any(
        (one["name"], one["cmd"]) == (name, "xread") and "b" in one["flags"] for one in found
    )


async def at_rest(hand: Hand) -> int:
    """Bytes that Redis uses once it has taken back what large requests grew of its connections.

    It does so a second or two after them: until then a model may fit under a limit that is a
    little above what is used.
    """

    async def is_at_rest() -> bool:
        listing = (await hand.client.call("CLIENT", "LIST")).decode()
        held = re.findall(r"tot-mem=(\d+)", listing)
        assert held, listing
        return sum(map(int, held)) < 200_000

    await wait_until(is_at_rest)
    used, _ = await hand.ledger.memory()
    return used


class Clock:
    """Redis's clock as services in this process see it: goes on when the test says so.

    Time-outs and deadlines may be far away then: none passes by itself while a test is still on its
    way to it.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead_s = 0.0
        now = clock.Clock.now
        monkeypatch.setattr(clock.Clock, "now", lambda redis: now(redis) + self.ahead_s)

    def time(self) -> float:
        return time.time() + self.ahead_s


class Pauses:
    """In place of ``pause``: waits ``most_s`` at most, and notes what was asked for.

    What happens each quarter of a lease can so be seen under leases that no stall outlasts.
    """

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s
        self.asked_s: list[float] = []

    async def __call__(self, stop: asyncio.Event, seconds: float) -> bool:
        self.asked_s.append(seconds)
        return await pause(stop, min(seconds, self.most_s))


@asynccontextmanager
async def full(client: Client) -> AsyncIterator[None]:
    """Inside the block Redis refuses every write that takes memory."""
    await client.call("CONFIG", "SET", "maxmemory", 1)
    try:
        yield
    finally:
        await client.call("CONFIG", "SET", "maxmemory", 0)


class Proxy:
    """Stands between a client and Redis: cuts connections, or the reply to a request of choice."""

    def __init__(self, redis: RedisSettings, run: Keys | None = None) -> None:
        host, _, port = redis.url.removeprefix("redis://").partition("/")[0].partition(":")
        self.target = (host, int(port))
        self._of = Client(redis)  # which knows the node of a run
        self._run = run
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[Any]] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.cut_replies = 0
        self.reading = asyncio.Event()  # cleared: what clients send stays on the way
        self.reading.set()
        self.answering = asyncio.Event()  # cleared: replies stay on the way
        self.answering.set()
        self.refuse: Callable[[bytes], bool] | None = None  # instead of passing it on
        self.cut_reply_to: Callable[[bytes], bool] | None = None  # once

    @property
    def settings(self) -> RedisSettings:
        """Redis by way of the proxy."""
        port = self._server.sockets[0].getsockname()[1]
        return RedisSettings(url=f"redis://127.0.0.1:{port}/0")

    async def __aenter__(self) -> Self:
        if self._run is not None:
            self._of.bind(self._run.prefix)
            await self._of.call("PING")
            host, _, port = self._of.address.partition(":")
            self.target = (host, int(port))
            await self._of.close()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._server.close()
        # Whoever was only being connected would not be cut.
        await asyncio.gather(*self._serving, return_exceptions=True)
        self.cut()
        self.reading.set()
        self.answering.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Cuts every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        serving = asyncio.current_task()
        assert serving is not None
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)
        there, back = await asyncio.open_connection(*self.target)
        self._writers |= {writer, back}
        cut_next = asyncio.Event()
        self.tasks.add(asyncio.create_task(self._forward(reader, back, cut_next)))
        self.tasks.add(asyncio.create_task(self._answer(there, writer, cut_next)))

    async def _forward(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, cut_next: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while (data := await reader.read(1 << 16)) and await self.reading.wait():
                if self.refuse and self.refuse(data):
                    break
                if self.cut_reply_to and self.cut_reply_to(data):
                    self.cut_reply_to = None
                    cut_next.set()
                to.write(data)
                await to.drain()
        to.transport.abort()  # and so, when it ends, the other side too

    async def _answer(
        self, reader: asyncio.StreamReader, to: asyncio.StreamWriter, cut_next: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while (data := await reader.read(1 << 16)) and await self.answering.wait():
                if cut_next.is_set():
                    self.cut_replies += 1
                    break
                to.write(data)
                await to.drain()
        to.transport.abort()
