"""A role that one process holds at a time: waiting for it, leading, losing it, and leaving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.core.errors import Fenced
from fedstream.runtime.service import Context, lead
from tests.support import context, counted, wait_until

AN_HOUR_S = 3600.0  # of a lease: nobody waits for it to run out


def lease_of(client: Client, keys: Keys, name: str) -> Lease:
    return Lease(client, keys, "scheduler", name, seconds=AN_HOUR_S)


def says(watched: Context) -> float:
    return counted(watched, "fedstream_leading", role="scheduler")


@asynccontextmanager
async def leading(watched: Context, lease: Lease) -> AsyncIterator[asyncio.Task[None]]:
    async def work() -> None:
        await watched.stop.wait()

    task = asyncio.create_task(lead(watched, lease, work))
    try:
        yield task
    finally:
        watched.stop.set()
        await asyncio.wait({task})


async def test_leader_is_announced_and_releases_the_role_on_exit(
    client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.runtime.service._PAUSE_S", 0.01)
    first, second = context(), context()
    async with leading(second, lease_of(client, keys, "other")):
        await wait_until(lambda: says(second) == 1)
        async with leading(first, lease_of(client, keys, "one")):
            await wait_until(lambda: first.health.not_ready() == [])
            assert (says(first), says(second)) == (0, 1)
            second.stop.set()
            await wait_until(lambda: says(first) == 1)
    assert (says(first), says(second)) == (0, 0)


async def test_standby_that_stops_never_led(client: Client, keys: Keys) -> None:
    assert await lease_of(client, keys, "other").acquire()
    watched = context()
    async with leading(watched, lease_of(client, keys, "one")) as task:
        await wait_until(lambda: watched.health.not_ready() == [])
    task.result()
    assert says(watched) == 0


async def test_role_lost_by_redis_is_retaken_unless_another_was_faster(
    client: Client, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.runtime.service._PAUSE_S", 0.01)
    watched, lease = context(), lease_of(client, keys, "one")
    async with leading(watched, lease) as task:
        await wait_until(lambda: says(watched) == 1)
        before = lease.number
        await client.call("DEL", keys.leader("scheduler"), keys.tokens)
        await wait_until(lambda: lease.number > before)
        await client.pipeline(
            [
                ("MULTI",),
                ("DEL", keys.tokens),
                ("SET", keys.leader("scheduler"), "other|nonce", "PX", 3_600_000),
                ("EXEC",),
            ]
        )
        await asyncio.wait({task})
        with pytest.raises(ExceptionGroup) as ended:
            task.result()
    assert ended.group_contains(Fenced, match="another scheduler took over while Redis was away")
    assert says(watched) == 0
