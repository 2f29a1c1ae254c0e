"""What the updater sees to although nothing comes: room in Redis, and nothing read in vain."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from tests.support import Hand, at_rest, context, layout_of, running, wait_until
from tests.updater.breaking import Disk, makes_more
from tests.updater.journalled import forget_newest


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The updater is idle when the queue was empty for 20 ms."""
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


async def test_older_models_are_freed_even_when_idle(make: Any, hand: Hand, client: Client) -> None:
    """Trainers can't write their updates, and so nothing comes that would have them freed."""
    hand.layout = layout_of(250_000)
    async with running(make(), context()):
        await makes_more(hand, 1.0, 2.0, 3.0, 4.0)
        await wait_until(hand.queue_is_empty)
        await client.call("CONFIG", "SET", "maxmemory", await at_rest(hand) + 500_000)

        async def freed() -> bool:
            return list((await hand.ledger.kept()).values()) == [4]

        await wait_until(freed)


async def test_stale_prefetches_are_dropped(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold its model, and the one place there is for an update that is read ahead."""
    hand.layout = layout_of(blobs.CHUNK // 4 + 1)
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    updater = make()
    async with running(updater, context()):
        await makes_more(hand, 1.0)
        disk.full = True
        await hand.admitted(2.0)
        await wait_until(lambda: updater._loop.unwritten and disk.refused > 1)
        lost = await hand.admitted(3.0)
        await wait_until(lambda: updater._intake.fetches)
        await forget_newest(hand, lost, ("HSET", hand.keys.head, "version", 0))
        updater._intake.backlog.clear()  # or it would be taken before the rest is known
        disk.full = False
        await hand.reaches(2)
        await wait_until(lambda: not updater._intake.fetches)
