"""A live page in a thread, over a run that is played by hand: for a browser, which blocks."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.coordinator.access import tokens_of
from fedstream.core.messages import Assignment, Event, GiveUp
from fedstream.history.live import broadcast
from fedstream.history.live.service import LiveService
from fedstream.runtime.config import load
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.limits import ConnectionLimit
from fedstream.settings.config import Settings
from tests.support import EveryRole, Hand, context

T = TypeVar("T")


class Stage:
    """The run and its page. What is done to them happens in their own loop."""

    def __init__(self, redis: RedisSettings, run: str, *sets: str) -> None:
        self._redis = redis
        self._settings = load(
            Settings, path=None, environ={}, sets=[f"run.name={run}", *sets]
        ).model_copy(update={"redis": redis})
        self.run = self._settings.run.name
        self._keys = Keys(self.run)
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._end = asyncio.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve)
        self.address = ""
        self.hand: Hand

    def __enter__(self) -> Stage:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(60)

    def do(self, act: Coroutine[Any, Any, T]) -> T:
        """Do something to the run."""
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(60)

    def _serve(self) -> None:
        self._loop.run_until_complete(self._served())
        self._loop.close()

    async def _served(self) -> None:
        own, client = Client(self._redis, "hand"), Client(self._redis, "coordinator")
        self.hand = Hand(own, self._keys, EveryRole(own, self._keys, "test"))
        live = context()
        self._stop = live.stop
        service = LiveService(self._settings, client, tokens_of(self._settings.http))
        app = application(service.routes(), live.stop.is_set)
        http, log = HttpSettings(), structlog.get_logger()
        working = asyncio.create_task(service.run(live))
        async with listening(app, http, 0, ConnectionLimit(http.connections), log) as port:
            self.address = f"http://127.0.0.1:{port}"
            self._ready.set()
            await self._end.wait()
            live.stop.set()
            await working
        await self.hand.ledger.purge()
        for one in (own, client):
            await one.close()

    # acts

    async def stop(self) -> None:
        """The coordinator stops, though the run goes on."""
        self._stop.set()

    async def create(self) -> None:
        """A run of 100 versions with a trainer."""
        await self.hand.create()
        await self.hand.announce("trainer-1")

    async def update(self, version: int) -> None:
        """One task comes to a version."""
        await self.hand.commit(version, await self.hand.admitted())

    async def measure(self, version: int, accuracy: float) -> None:
        """The evaluator measures."""
        await self.hand.ledger.tell(
            Event(
                what="evaluation",
                service="evaluator",
                time=1e9 + version,
                version=version,
                metrics={"accuracy": accuracy},
            )
        )

    async def drop(self, n: int = 1) -> None:
        """So many tasks are given up."""
        for trigger in await self.hand.open(n):
            await self.hand.admit(
                GiveUp(
                    task=trigger.task,
                    attempt="1",
                    device=trigger.device,
                    trainer="trainer-1",
                    reason="dropped out",
                )
            )

    async def bury(self) -> None:
        """A task crashes its trainers."""
        await self.hand.open()
        await self.hand.dispatch()
        ((entry, task),) = await self.hand.take()
        await self.hand.ledger.bury(
            self._keys.tasks,
            TRAINERS,
            entry,
            "crashed its trainers",
            task=Assignment.model_validate(task.__dict__),
            deliveries=3,
            found=None,
            site="pool",
        )

    async def told(self) -> list[str]:
        """The ids of all events."""
        rows = await self.hand.client.call("XRANGE", self._keys.events, "-", "+")
        return [id_.decode() for id_, _ in rows]


class Cable:
    """Leads to an address, until it is cut; then it leads there again."""

    def __init__(self, address: str) -> None:
        self.lead_to(address)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._ends: list[socket.socket] = []
        self.is_out = False

    def __enter__(self) -> Cable:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._listener.close()
        self.cut()

    def lead_to(self, address: str) -> None:
        """Lead there, from the next connection on."""
        self._target = ("127.0.0.1", int(address.rpartition(":")[2]))

    def cut(self) -> None:
        """End all connections, wherever they are."""
        ends, self._ends = self._ends, []
        for end in ends:
            with _ignored():
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self.is_out:
                here.close()
                continue
            there = socket.create_connection(self._target)
            self._ends += [here, there]
            for one, other in ((here, there), (there, here)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(one: socket.socket, other: socket.socket) -> None:
    with _ignored():
        while some := one.recv(1 << 16):
            other.sendall(some)
    with _ignored():
        other.shutdown(socket.SHUT_RDWR)


@contextmanager
def _ignored() -> Iterator[None]:
    try:
        yield
    except OSError:
        return


@contextmanager
def every(seconds: float) -> Iterator[None]:
    """Inside the block a page is looked at so often."""
    before = broadcast._LEAST_S, broadcast._MOST_S
    broadcast._LEAST_S = broadcast._MOST_S = seconds
    try:
        yield
    finally:
        broadcast._LEAST_S, broadcast._MOST_S = before
