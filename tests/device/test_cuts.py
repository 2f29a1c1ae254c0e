"""A device at a real gateway, on a connection that breaks again and again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Self

import pytest
import structlog

from fedstream.broker import blobs
from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.service import Gateway
from fedstream.coordinator.gateway.settings import GatewaySettings
from fedstream.core.formats import F32
from fedstream.core.layout import Model
from fedstream.core.messages import Upload
from fedstream.device.connection import GatewayAddress
from fedstream.device.process import run_device
from fedstream.operate.enrolment import invite
from fedstream.runtime.http import HttpSettings, application, listening
from fedstream.runtime.limits import ConnectionLimit
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.trainer.vector import layout_of
from tests.coordinator.gateway.places import SITE, coordinating, owned_by
from tests.device.conftest import Options
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Adds

DEVICE = 7
PARAMETERS = 11_000_000
MIB = 1 << 20


class Line:
    """Carries what a device and a gateway send, and breaks after so many bytes, again and again."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: set[asyncio.StreamWriter] = set()
        self._carrying: set[asyncio.Task[None]] = set()
        self.up = self.down = 0  # bytes that were carried
        self.ups: list[int] = []  # breaks after so many more bytes up; the last one is next
        self.downs: list[int] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_error: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._carrying)

    def cut(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._to)
        self._open |= {writer, back}
        for source, to, cuts in ((reader, back, self.ups), (there, writer, self.downs)):
            self._carrying.add(asyncio.create_task(self._carry(source, to, cuts)))

    async def _carry(
        self, source: asyncio.StreamReader, to: asyncio.StreamWriter, cuts: list[int]
    ) -> None:
        with suppress(ConnectionError):
            while data := await source.read(1 << 16):
                if cuts is self.ups:
                    self.up += len(data)
                else:
                    self.down += len(data)
                if cuts:
                    cuts[-1] -= len(data)
                    if cuts[-1] <= 0:
                        cuts.pop()
                        self.cut()
                to.write(data)
                await to.drain()
        to.transport.abort()


@asynccontextmanager
async def at_gateway(hand: Hand, redis: RedisSettings) -> AsyncIterator[Line]:
    """A line to a gateway that serves the run."""
    settings = GatewaySettings(device_rate=10_000, retry_s=(0.01, 0.02), poll_s=1.0)
    gateway = Gateway(
        settings, LeaseSettings(), keys=hand.keys, redis=redis, name="gw-0", update=F32
    )
    its, http = context(), HttpSettings(connections=100)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(coordinating(hand, redis))
        app = application(gateway.routes(), its.stop.is_set)
        at = listening(app, http, 0, ConnectionLimit(100), structlog.get_logger())
        port = await stack.enter_async_context(at)
        await stack.enter_async_context(running(gateway, its))
        yield await stack.enter_async_context(Line(port))


def breaks(draw: random.Random, count: int, size: int) -> list[int]:
    """Distances between breaks at random places of so many bytes."""
    places = sorted(draw.randrange(size) for _ in range(count))
    return [b - a for a, b in zip([0, *places], places, strict=False)][::-1]


@pytest.fixture
def task() -> Adds:
    """A model of 44 MB, to which training adds one."""
    return Adds(PARAMETERS)


async def test_cut_upload_of_44_mb_sends_less_than_a_chunk_again_for_each_cut(
    hand: Hand, redis: RedisSettings, options: Options, task: Adds
) -> None:
    hand.layout = layout_of(task.model())
    await hand.create()
    x_new = Model(hand.layout)
    x_new.floats[:] = 1.0
    size, draw = hand.layout.nbytes, random.Random(5)
    async with at_gateway(hand, redis) as line:
        made = await invite(hand.client, hand.keys, SITE, [DEVICE], seconds=60)
        line.downs += breaks(draw, 10, size)
        told = options(
            address=GatewayAddress(line.url), invite=made.invites[DEVICE], load=lambda: task
        )
        life = asyncio.create_task(run_device(told, lambda _line: None, lambda _what: None))
        await owned_by(hand, DEVICE, "gw-0")
        await hand.open(device=DEVICE)
        await wait_until(lambda: line.downs == [] or life.done())
        before = line.up
        line.ups += breaks(draw, 20, size)
        await life
    assert (line.ups, line.downs) == ([], [])
    assert line.up - before - size < 21 * MIB
    assert line.down - size < 5 * MIB  # of 10 cuts
    entry = (await hand.client.call("XRANGE", hand.keys.queue, "-", "+"))[-1]
    upload = Upload.decode(entry[1][1])
    assert (upload.device, upload.digest, upload.size) == (DEVICE, x_new.digest(), size)
    found = Model(hand.layout)
    await blobs.read(
        hand.client,
        hand.keys.queued(upload.blob),
        found,
        digest=upload.digest,
        chunks=upload.chunks,
    )
    assert found.digest() == x_new.digest()
