"""An answer is said until it is heard, and its update written once."""

from __future__ import annotations

import asyncio

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.messages import Presence, Upload, decode
from fedstream.runtime.backoff import pause
from tests.support import Hand, Proxy, context, running, wait_until
from tests.trainer.adding import Adds, Make, answers


async def test_answer_survives_a_lost_connection_without_retraining(
    hand: Hand, make: Make, task: Adds, redis: RedisSettings
) -> None:
    await hand.create()
    async with Proxy(redis) as proxy:
        trainer = make(redis=proxy.settings)
        async with running(trainer, context()):
            await hand.open()
            task.gate.clear()
            await wait_until(lambda: task.seen)
            proxy.cut_reply_to = lambda data: b"raised" not in data and b"base" in data
            task.gate.set()
            await wait_until(lambda: proxy.cut_replies)
            [upload] = await answers(hand)
            await hand.open()
            assert len(await answers(hand, 2)) == 2  # nothing was said twice
    assert isinstance(upload, Upload)
    assert len(task.seen) == 2


async def test_resent_answer_does_not_rewrite_its_update(
    hand: Hand, make: Make, redis: RedisSettings, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply was lost: the trainer can't know that it was heard, and the update taken away."""
    admitted: list[tuple[str, str]] = []
    async with Proxy(redis) as proxy:

        async def admits(stop: asyncio.Event, seconds: float) -> bool:
            """Before the trainer tries again, a coordinator hears what it said."""
            if proxy.cut_replies and not admitted:
                heard = [(one, decode(one.data, Upload, Presence)) for one in await hand.heard()]
                [(entry, said)] = [(one, said) for one, said in heard if isinstance(said, Upload)]
                admitted.append(await hand.ledger.admit(entry, said, size_limit=1 << 20))
            return await pause(stop, seconds)

        monkeypatch.setattr("fedstream.trainer.leases.pause", admits)
        await hand.create()
        async with running(make(redis=proxy.settings), context()):
            await hand.open()
            task.gate.clear()
            await wait_until(lambda: task.seen)
            proxy.cut_reply_to = lambda data: b"raised" not in data and b"base" in data
            task.gate.set()
            await wait_until(lambda: admitted)
            await hand.open()  # the first answer has been said again when it is at the second
            await wait_until(lambda: len(task.seen) == 2)
    assert admitted == [("admitted", "")]
    [(_, upload)] = await hand.queue()
    assert isinstance(upload, Upload)
    assert not await hand.client.call("EXISTS", hand.keys.update(upload.blob))
