"""A trainer takes its next task along with an answer, and none that it will not do."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any

import pytest
from structlog.testing import capture_logs

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import TRAINERS
from fedstream.broker.ledger.trainer import TrainerLedger
from fedstream.broker.streams import Group
from fedstream.core.messages import GiveUp
from fedstream.runtime.task_settings import LeaseSettings
from tests.support import Hand, Proxy, context, full, running, wait_until
from tests.trainer.adding import Adds, Cooldowns, Make, answers, pending


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is taken along is waited for without end."""
    take_after = TrainerLedger.take_after

    async def patiently(ledger: TrainerLedger, commands: Any, group: Group) -> Any:
        return await take_after(ledger, commands, group, block_ms=3_600_000)

    monkeypatch.setattr(TrainerLedger, "take_after", patiently)


async def blocked(hand: Hand) -> bool:
    """Whether a trainer waits for a task."""
    return b"flags=b" in await hand.client.call("CLIENT", "LIST")


async def delivered(hand: Hand) -> list[tuple[bytes, int]]:
    """Who holds which tasks, oldest first, and how often each was delivered."""
    rows = await hand.client.call("XPENDING", hand.keys.tasks, TRAINERS, "-", "+", 9)
    return [(holder, times) for _, holder, _, times in rows]


@pytest.mark.usefixtures("patient")
async def test_refused_answer_does_not_wait_for_the_next_task(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    task.gate.clear()
    with capture_logs() as logs:
        async with running(make(), context()):
            await hand.open()
            await wait_until(lambda: task.seen)
            async with full(hand.client):
                task.gate.set()
                said = "answer not delivered yet"
                await wait_until(lambda: [one["event"] for one in logs].count(said) > 1)
            await answers(hand)
    assert len(task.seen) == 1


async def test_task_taken_along_with_a_refused_answer_is_handed_back(
    hand: Hand, make: Make, task: Adds
) -> None:
    """Others have room for it, maybe; and that it was delivered does not count against it."""
    await hand.create()
    task.gate.clear()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with running(make("t1"), context()):
        await hand.open(2)
        await wait_until(lambda: task.seen)
        async with full(hand.client):
            task.gate.set()

            async def taken() -> bool:
                return bool((await other.claim(idle_ms=60_000, most=9))[0])

            await wait_until(taken)
            assert await delivered(hand) == [(b"t1", 1), (b"t2", 1)]
        [first] = await answers(hand)
        assert first.device == 1
    assert await delivered(hand) == [(b"t2", 1)]


async def test_task_taken_along_with_a_lost_reply_is_done_at_once(
    hand: Hand, make: Make, task: Adds, redis: RedisSettings
) -> None:
    await hand.create()
    task.gate.clear()
    async with Proxy(redis) as proxy:
        trainer = make(redis=proxy.settings, lease=LeaseSettings(seconds=3600, attempts=1))
        async with running(trainer, context()):
            await hand.open(2)
            await wait_until(lambda: task.seen)
            proxy.cut_reply_to = lambda data: b"base" in data
            task.gate.set()
            said = await answers(hand, 2)
    assert proxy.cut_replies == 1
    assert [one.device for one in said] == [1, 2]
    assert [device for device, _ in task.seen] == [1, 2]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("before", [0, 1])
async def test_stopped_trainer_hands_back_a_task_that_comes_late(
    hand: Hand, make: Make, task: Adds, redis: RedisSettings, before: int
) -> None:
    """The first one that it waits for, or one that it takes along."""
    await hand.create()
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), live) as service:
        await hand.open(before)
        await answers(hand, before)
        await wait_until(lambda: blocked(hand))
        proxy.answering.clear()
        await hand.open()
        await wait_until(lambda: pending(hand))
        live.stop.set()
        proxy.answering.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
        assert len(task.seen) == before
        taken, _ = await other.claim(idle_ms=60_000, most=9)
        assert len(taken) == 1


async def test_trainer_stopped_while_it_answers_hands_back_what_it_took_along(
    hand: Hand, make: Make, task: Adds, redis: RedisSettings
) -> None:
    await hand.create()
    task.gate.clear()
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with Proxy(redis) as proxy, running(make(redis=proxy.settings), live) as service:
        await hand.open(2)
        await wait_until(lambda: task.seen)
        proxy.answering.clear()
        task.gate.set()
        await answers(hand)
        live.stop.set()
        proxy.answering.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
        taken, _ = await other.claim(idle_ms=60_000, most=9)
        assert (len(taken), len(task.seen)) == (1, 1)


async def test_no_task_is_taken_along_before_a_rest(hand: Hand, make: Make) -> None:
    await hand.create()
    async with running(make(rests=Cooldowns(3600.0)), context()):
        await hand.open(device=9)
        await hand.open(device=1)
        [given_up] = await answers(hand)
        assert isinstance(given_up, GiveUp)
        assert await pending(hand) == 0


async def test_busy_trainer_takes_over_a_dead_trainers_task(hand: Hand, make: Make) -> None:
    """Although there always is a task to take along."""
    await hand.create()
    dead = Group(hand.client, hand.keys.tasks, TRAINERS, "dead")
    await dead.ensure()
    await hand.open(device=1)
    [entry] = await dead.read()
    async with running(make(lease=LeaseSettings(seconds=4)), context()), asyncio.timeout(60):
        for done in count(1):
            await hand.open(2, device=2)
            said = await answers(hand, done)
            if done == 1:
                long_ago = ("IDLE", 60_000, "JUSTID")
                await hand.client.call(
                    "XCLAIM", dead.stream, TRAINERS, "dead", 0, entry.id, *long_ago
                )
            if any(one.device == 1 for one in said):
                break
