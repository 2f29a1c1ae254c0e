"""The ways to Redis: what arrives, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

from tests.chaos.wire import Wire
from tests.support import wait_until


@asynccontextmanager
async def listening(heard: list[bytes]) -> AsyncIterator[int]:
    """A server that answers each request with itself: its port."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            heard.append(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def asked(wire: Wire, request: bytes) -> bytes:
    """The reply on a connection of its own; b"" where that is lost."""
    there, back = await asyncio.open_connection("127.0.0.1", urlsplit(wire.url).port)
    back.write(request)
    try:
        return await there.read(1000)
    except ConnectionError:
        return b""
    finally:
        back.transport.abort()


async def test_straggler_arrives_after_its_repetition_and_later_requests() -> None:
    heard: list[bytes] = []
    async with asyncio.timeout(30.0), listening(heard) as port, Wire(port) as wire:
        async with wire.straggling(b"commit", b"version") as kept:
            assert await asked(wire, b"commit") == b"commit"
            assert not kept.is_set()
            assert await asked(wire, b"commit of version 1") == b""
            assert kept.is_set()
            assert await asked(wire, b"commit of version 1") != b""
            assert await asked(wire, b"commit of version 2") != b""
        await wait_until(lambda: len(heard) == 4)
    assert [said[-1:] for said in heard] == [b"t", b"1", b"2", b"1"]
