"""The updater against a real Redis: restarts, lost connections, and a Redis that forgets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import Fenced
from tests.support import Hand, Proxy, context, running, wait_until
from tests.updater.journalled import backed_up, go_back, refused


async def test_standby_takes_over_and_fences_the_leader(
    make: Any, hand: Hand, client: Client, keys: Keys
) -> None:
    async with running(make(name="updater-0"), context(), may_fail=True) as deposed:
        await hand.join()
        async with running(make(name="updater-1", lease_s=0.2), context()) as standing_by:
            await hand.admitted(1.0)
            await hand.reaches(1)
            assert not standing_by.done()

            async def lease_is_the_seconds() -> bool:
                """As if the first had been stopped for longer than its lease."""
                await client.call("SET", keys.leader("updater"), "updater-1|", "PX", 1000)
                return deposed.done()

            await wait_until(lease_is_the_seconds)
            assert isinstance(error := deposed.exception(), BaseExceptionGroup)
            assert error.subgroup(Fenced)
            await hand.admitted(1.0)
            await hand.reaches(2)
    assert [version.epoch for version in await hand.published()] == [1, 1, 2]
    await hand.balanced()


async def test_lost_connections_neither_lose_nor_repeat_updates(
    make: Any, hand: Hand, redis: RedisSettings
) -> None:
    rng = np.random.default_rng(11)
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), context()):
        await hand.join()
        for number in range(1, 16):
            skip = int(rng.integers(0, 6))

            def some(_data: bytes, left: list[int] = [skip]) -> bool:  # noqa: B006
                left[0] -= 1
                return left[0] < 0

            proxy.cut_reply_to = some
            await hand.admitted(4.0)
            await hand.reaches(number)
        assert proxy.cut_replies > 3
    assert [version.version for version in await hand.published()] == list(range(16))
    assert (await hand.ledger.look()).outcomes["applied"] == 15
    await hand.balanced()


@pytest.mark.parametrize("idle", [True, False])
async def test_run_lost_by_redis_is_republished_without_going_back(
    make: Any, hand: Hand, client: Client, idle: bool
) -> None:
    updater = make(lease_s=0.4)
    async with running(updater, context()):
        await hand.join()
        for _ in range(3):
            await hand.admitted(4.0)
        await hand.reaches(3)
        *_, newest = await hand.published()
        if not idle:
            for task in await hand.open(5):
                await hand.admit(await hand.trained(task, 4.0))
        await client.call("FLUSHALL")
        await wait_until(lambda: published_again(hand))
        # What it had decided on before may still become a version.
        await wait_until(lambda: not updater._loop.unwritten and not updater._loop.commits.pending)
        head = await hand.ledger.head()
        assert head
        assert head.epoch > newest.epoch
        assert head.version >= newest.version
        if idle:
            assert head.digest == newest.digest
        [again, *_] = await hand.published()
        await hand.model(again)
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(head.version + 1)
        await hand.balanced()


async def test_republished_version_has_the_new_epoch(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease is taken again while its model is written."""
    updater = make()
    write, create = updater._publisher.write, updater._ledger.create
    shown: list[int] = []

    async def slowly_written(*args: Any) -> None:
        await write(*args)
        if not shown:
            assert await updater._lease.acquire(at_least=updater._lease.number)

    async def created(token: str, *args: Any, **about: Any) -> Any:
        shown.append(int(token.partition(":")[0]))
        return await create(token, *args, **about)

    async with running(updater, context()):
        await hand.reaches(0)
        monkeypatch.setattr(updater._publisher, "write", slowly_written)
        monkeypatch.setattr(updater._ledger, "create", created)
        await client.call("FLUSHALL")
        await hand.reaches(0)
        assert len(shown) > 1  # the first was not good any more
        assert [version.epoch for version in await hand.published()] == shown[-1:]


async def published_again(hand: Hand) -> bool:
    head = await hand.ledger.head()
    return head is not None and head.epoch > 1


async def test_redis_fallback_repeats_nothing(
    make: Any, hand: Hand, redis: RedisSettings, client: Client
) -> None:
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        proxy.reading.clear()
        await hand.admitted(8.0)
        await hand.admitted(math.nan)
        backup = await backed_up(client)
        proxy.reading.set()
        await refused(hand, "not finite")
        before = (await hand.published())[-1]
        proxy.reading.clear()  # the next look is ours, not the updater's
        await go_back(client, backup)
        assert await hand.version() == 1
        proxy.reading.set()
        await hand.reaches(2)
        again = (await hand.published())[-1]
        assert (again.version, again.digest) == (2, before.digest)
        await wait_until(hand.queue_is_empty)
        view = await hand.ledger.look()
        assert (view.outcomes["applied"], view.reasons("refused")) == (2, {"not finite": 1})
        assert view.open == ()
        await hand.admitted(0.0)
        await hand.reaches(3)
        assert (await hand.model((await hand.published())[-1])).floats.tolist() == [2.5] * 4
        await hand.balanced()


async def test_finished_run_lost_by_redis_is_republished_as_finished(
    make: Any, hand: Hand, client: Client
) -> None:
    async with running(make(lease_s=0.4, versions=1), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        await client.call("FLUSHALL")
        await wait_until(lambda: published_again(hand))
        run = await hand.ledger.run()
        assert (run.state, run.why) == ("finished", "version 1 reached")
        assert await hand.version() == 1
