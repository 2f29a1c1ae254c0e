"""A Redis that is full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from tests.support import Hand, Proxy, context, layout_of, running, wait_until
from tests.updater.breaking import COMMIT, CREATE, LATE, limited, makes_more
from tests.updater.journalled import records


async def test_idle_updater_frees_a_full_redis(
    make: Any, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.layout = layout_of(250_000)
    updater = make(**LATE)
    real, limits = updater._recorder.flush, 0

    async def flush() -> None:
        """It is idle."""
        nonlocal limits
        if updater._loop.commits.retained and updater._loop.state.version == 4 and not limits:
            await limited(hand, -2_500_000)
            limits += 1
        await real()

    monkeypatch.setattr(updater._recorder, "flush", flush)
    async with running(updater, context()):
        await makes_more(hand, 1.0, 2.0, 3.0, 4.0)
        await wait_until(lambda: limits)
        await wait_until(hand.queue_is_empty)
        assert list((await hand.ledger.kept()).values()) == [4]


async def test_full_redis_is_freed_to_republish(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    hand.layout = layout_of(250_000)
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), context()):
        await makes_more(hand, 1.0, 2.0, 3.0, 4.0)
        proxy.refuse = lambda data: COMMIT in data
        await hand.admitted(5.0)
        await wait_until(lambda: len(records(folder)) == 5)
    await limited(hand, 500_000)  # enough for a lease, not for a model
    async with running(make(), context()):
        await hand.reaches(5)
        assert list((await hand.ledger.kept()).values()) == [4, 5]
    await hand.balanced()


async def test_lost_reply_to_republishing_keeps_no_extra_models(
    make: Any, hand: Hand, redis: RedisSettings, folder: Path
) -> None:
    async with Proxy(redis) as proxy:
        async with running(make(redis=proxy.settings, keep_versions=3), context()):
            await makes_more(hand, 1.0, 1.0)
            proxy.refuse = lambda data: COMMIT in data
            await hand.admitted(1.0)
            await wait_until(lambda: len(records(folder)) == 3)
        proxy.refuse = None
        proxy.cut_reply_to = lambda data: CREATE in data
        async with running(make(redis=proxy.settings, keep_versions=3), context()):
            await hand.reaches(3)
            await makes_more(hand, 1.0, 1.0, 1.0)
        assert proxy.cut_replies == 1
    assert list((await hand.ledger.kept()).values()) == [4, 5, 6]
