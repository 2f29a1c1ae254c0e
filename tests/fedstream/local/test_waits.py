"""Waits in the run's own Redis are ended, as if their time were over."""

from __future__ import annotations

import asyncio
import time

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.local.redis_server import RedisServer
from fedstream.local.supervisor import end_waits
from tests.support import wait_until

pytestmark = pytest.mark.process


async def test_waits_of_the_named_alone_end_with_nothing() -> None:
    with RedisServer() as server:
        url = RedisSettings(url=server.url)
        clients = {name: Client(url, name) for name in ("trainer-1", "trainer-2", "run")}
        began = time.monotonic()
        waits = {
            name: asyncio.create_task(
                clients[name].call("XREAD", "BLOCK", 20_000, "STREAMS", "s", "0", wait_s=20)
            )
            for name in ("trainer-1", "trainer-2")
        }

        async def both_wait() -> bool:
            listing = await clients["run"].call("CLIENT", "LIST")
            return bool(listing.count(b" cmd=xread ") == 2)

        await wait_until(both_wait)
        await end_waits(clients["run"], ["trainer-1", "updater"])
        assert await waits["trainer-1"] is None
        assert time.monotonic() - began < 10
        assert not waits["trainer-2"].done()
        await clients["run"].call("XADD", "s", "1-0", "m", "news")
        assert await waits["trainer-2"] == [[b"s", [[b"1-0", [b"m", b"news"]]]]]
        await end_waits(clients["run"], ["trainer-1", "trainer-2"])  # nobody waits
        for client in clients.values():
            await client.close()
