"""Which services serve a run, and when a run may be deleted."""

from __future__ import annotations

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.core.errors import FedstreamError
from fedstream.operate.presence import elsewhere, purge
from tests.support import Hand


async def test_served_run_is_not_purged(hand: Hand) -> None:

    await hand.create()
    await hand.announce("t")
    with pytest.raises(FedstreamError, match="served by scheduler, updater, t: stop them"):
        await purge(hand.client, hand.keys, force=False)
    await hand.scheduler.release()
    await hand.updater.release()
    await hand.ledger.leave(b"t")
    there = len(await hand.ledger.stored())
    assert there > 3
    assert await purge(hand.client, hand.keys, force=False) == there


async def test_other_databases_are_told_of_and_left_alone(hand: Hand, redis: RedisSettings) -> None:
    other = Client(redis.model_copy(update={"url": redis.url.replace("/0", "/1")}), "other")
    try:
        assert other.database == 1
        before = await elsewhere(hand.client)
        await other.call("SET", hand.keys.run, "x")
        assert await elsewhere(hand.client) == {**before, 1: before.get(1, 0) + 1}
        assert 1 not in await elsewhere(other)
        await hand.create()
        await purge(hand.client, hand.keys, force=True)
        assert await other.call("GET", hand.keys.run) == b"x"
    finally:
        await other.call("DEL", hand.keys.run)
        await other.close()
