"""However many calls are made at once, there are only so many connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from fedstream.broker.bounded_client import BoundedClient
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import BrokerError, Unavailable
from tests.support import wait_until

LINKS = 3
NAME = "bounded"


@pytest.fixture
async def bounded(redis: RedisSettings) -> AsyncIterator[BoundedClient]:
    one = BoundedClient(redis, NAME, links=LINKS)
    yield one
    await one.close()


async def connections(client: Client) -> list[bytes]:
    """What the connections of the bounded client do."""
    listed: bytes = await client.call("CLIENT", "LIST")
    return [line for line in listed.splitlines() if f"name={NAME} ".encode() in line]


async def busy(bounded: BoundedClient, client: Client, keys: Keys) -> list[asyncio.Task[Any]]:
    """Takes all connections, until so many words are pushed to `open`."""
    tasks = [asyncio.create_task(bounded.call("BLPOP", keys.open, 0)) for _ in range(LINKS)]

    async def blocked() -> bool:
        return sum(b"cmd=blpop" in line for line in await connections(client)) == LINKS

    await wait_until(blocked)
    return tasks


async def test_a_crowd_waits_for_its_turn(
    bounded: BoundedClient, client: Client, keys: Keys
) -> None:
    held = await busy(bounded, client, keys)
    calls = [asyncio.create_task(bounded.call("INCR", keys.run)) for _ in range(50)]
    calls += [asyncio.create_task(bounded.pipeline([("INCR", keys.run)])) for _ in range(50)]
    await client.call("INCR", keys.head)
    assert len(await connections(client)) == LINKS
    assert await client.call("GET", keys.run) is None
    await client.call("RPUSH", keys.open, *range(LINKS))
    await asyncio.gather(*held, *calls)
    assert await client.call("GET", keys.run) == b"100"
    assert len(await connections(client)) == LINKS


async def test_who_waits_too_long_has_sent_nothing(
    bounded: BoundedClient, client: Client, keys: Keys
) -> None:
    held = await busy(bounded, client, keys)
    bounded.hurry(0.2)
    with pytest.raises(Unavailable, match=r"all 3 connections were in use for 0\.2 s"):
        await bounded.call("INCR", keys.run)
    await client.call("RPUSH", keys.open, *range(LINKS))
    await asyncio.gather(*held)
    assert await bounded.call("GET", keys.run) is None


async def test_places_are_free_again_whatever_happens(
    bounded: BoundedClient, client: Client, keys: Keys
) -> None:
    """Calls that are cancelled at work or while they wait, and calls that fail."""
    for _ in range(2):
        held = await busy(bounded, client, keys)
        waiting = [asyncio.create_task(bounded.call("INCR", keys.run)) for _ in range(9)]
        await asyncio.sleep(0)
        for one in (*waiting, *held):
            one.cancel()
        await asyncio.gather(*waiting, *held, return_exceptions=True)
        for _ in range(LINKS):
            with pytest.raises(BrokerError, match="unknown command"):
                await bounded.call("NONSENSE")
    assert await bounded.call("GET", keys.run) is None


async def test_reads_that_block_keep_nobody_waiting(
    bounded: BoundedClient, client: Client, keys: Keys
) -> None:
    blocked = [
        asyncio.create_task(bounded.call("BLPOP", keys.open, 5, wait_s=5)) for _ in range(LINKS)
    ]
    assert await bounded.call("INCR", keys.run) == 1
    await client.call("RPUSH", keys.open, *range(LINKS))
    await asyncio.gather(*blocked)
