"""A gateway's view of the run is never older than the one that a task was sent with."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedstream.coordinator.gateway.replica import RunCache
from fedstream.core.errors import Unavailable
from fedstream.core.formats import F32
from fedstream.core.records import Head
from tests.support import Hand


def head(version: int) -> Head:
    return Head(version, f"{version:064}", f"{version}.1", 0.0, 1)


class Slow:
    """A ledger whose reads take as long as the test says."""

    def __init__(self, hand: Hand) -> None:
        self.keys = hand.keys
        self.record = hand.run()
        self.newest = head(0)
        self.go_on = asyncio.Event()
        self.reads = self.fails = 0

    async def run(self) -> Any:
        self.reads += 1
        if self.reads == self.fails:
            raise Unavailable("once")
        return self.record

    async def head(self) -> Head:
        found = self.newest
        await self.go_on.wait()
        return found


def run_cache(ledger: Slow) -> RunCache:
    return RunCache(ledger, F32)  # type: ignore[arg-type]


async def test_look_does_not_share_a_read_that_began_before(hand: Hand) -> None:
    ledger = Slow(hand)
    one = run_cache(ledger)
    first = asyncio.create_task(one.look())
    await asyncio.sleep(0)  # it has read version 0, which is on its way
    await asyncio.sleep(0)
    assert ledger.reads == 1
    ledger.newest = head(1)
    others = [asyncio.create_task(one.look()) for _ in range(5)]
    await asyncio.sleep(0)
    ledger.go_on.set()
    await first
    await asyncio.gather(*others)
    assert one.head.version == 1
    assert ledger.reads == 2, "one read for all of them"


async def test_version_seen_meanwhile_is_not_taken_back(hand: Hand) -> None:
    ledger = Slow(hand)
    one = run_cache(ledger)
    ledger.go_on.set()
    await one.look()
    ledger.go_on.clear()
    looking = asyncio.create_task(one.look())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    one.saw(head(3))  # with a task
    ledger.go_on.set()
    await looking
    assert one.head.version == 3
    one.saw(head(2))
    assert one.head.version == 3


async def test_redis_that_fell_back_is_believed(hand: Hand) -> None:
    ledger = Slow(hand)
    one = run_cache(ledger)
    ledger.go_on.set()
    ledger.newest = head(5)
    await one.look()
    ledger.newest = head(3)
    await one.look()
    assert one.head.version == 3


async def test_read_that_fails_is_repeated_for_the_next(hand: Hand) -> None:
    ledger = Slow(hand)
    one = run_cache(ledger)
    ledger.go_on.set()
    ledger.fails = 1
    failing, waiting = (asyncio.create_task(one.look()) for _ in range(2))
    with pytest.raises(Unavailable):
        await failing
    await waiting
    assert one.head.version == 0
