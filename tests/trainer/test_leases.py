"""A task has one trainer at a time: leases are renewed, lost, handed back and found again."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from fedstream.broker.keys import TRAINERS
from fedstream.broker.streams import Group
from fedstream.core.messages import Upload
from fedstream.runtime.task_settings import LeaseSettings
from tests.support import Hand, Pauses, context, counted, running, wait_until
from tests.trainer.adding import Adds, Make, answers, pending


async def test_lease_is_renewed_during_training(
    hand: Hand, make: Make, task: Adds, pauses: Pauses
) -> None:
    await hand.create()
    task.gate.clear()
    idle_ms: list[int] = []

    async def renewals() -> int:
        [(_, holder, idle, deliveries)] = await hand.client.call(
            "XPENDING", hand.keys.tasks, TRAINERS, "-", "+", 9
        )
        assert (holder, deliveries) == (b"t1", 1)
        idle_ms.append(idle)
        return sum(later < earlier for earlier, later in pairwise(idle_ms))

    async def goes_on() -> bool:
        return await renewals() >= 3

    async with running(make(lease=LeaseSettings(seconds=2)), context()):
        await hand.open()
        await wait_until(lambda: task.seen)
        await wait_until(goes_on)
        task.gate.set()
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert 0.5 in pauses.asked_s  # a quarter of the lease


async def test_error_in_lease_renewal_is_not_swallowed(
    hand: Hand, make: Make, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hand.create()
    task.gate.clear()

    async def broken(_group: Group, _entry: object) -> bool:
        task.gate.set()
        raise RuntimeError("a bug")

    monkeypatch.setattr(Group, "renew", broken)
    trainer = make(lease=LeaseSettings(seconds=0.2))
    async with running(trainer, context(), may_fail=True) as service:
        await hand.open()
        await asyncio.wait({service}, timeout=10)
        with pytest.raises(BaseExceptionGroup) as ended:
            await service
    assert ended.group_contains(RuntimeError, match="a bug")


async def test_trainer_that_lost_its_lease_stops_silently(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    task.gate.clear()
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with running(make(lease=LeaseSettings(seconds=0.2)), live):
        await hand.open()
        await wait_until(lambda: task.seen)
        taken, _ = await other.claim(idle_ms=0, most=9)
        assert len(taken) == 1
        await wait_until(lambda: counted(live, "fedstream_trainer_tasks_total", end="lease lost"))
    assert len(await hand.answered()) == 0
    assert await pending(hand) == 1  # the other's


async def test_stopped_trainer_hands_back_its_task_at_once(
    hand: Hand, make: Make, task: Adds
) -> None:
    await hand.create()
    task.gate.clear()
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    async with running(make(), live) as service:
        await hand.open()
        await wait_until(lambda: task.seen)
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
        taken, _ = await other.claim(idle_ms=60_000, most=9)
        assert len(taken) == 1
    await hand.attend()
    assert await hand.ledger.left() == [b"t1"]  # a coordinator strikes it off


async def test_restarted_trainer_resumes_its_task(hand: Hand, make: Make, task: Adds) -> None:
    await hand.create()
    task.gate.clear()
    async with running(make(), context()):
        await hand.open()
        await wait_until(lambda: task.seen)  # and here it is cut off
    task.gate.set()
    async with running(make(), context()):
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert len(task.seen) == 2


async def test_starting_trainer_takes_no_leased_task(hand: Hand, make: Make, task: Adds) -> None:
    """It looks for tasks of its own from before, however short they were idle."""
    await hand.create()
    task.gate.clear()
    async with running(make("t1"), context()):
        await hand.open(device=1)
        await wait_until(lambda: task.seen)
        async with running(make("t2"), context()):
            await hand.open(device=2)
            await wait_until(lambda: len(task.seen) == 2)
            task.gate.set()
            said = await answers(hand, 2)
    assert {(one.device, one.trainer) for one in said} == {(1, "t1"), (2, "t2")}


async def test_trainer_takes_over_a_dead_trainers_task(hand: Hand, make: Make) -> None:
    await hand.create()
    dead = Group(hand.client, hand.keys.tasks, TRAINERS, "dead")
    await dead.ensure()
    await hand.open(device=1)
    [entry] = await dead.read()
    async with running(make(lease=LeaseSettings(seconds=4)), context()):
        await hand.open(device=2)
        assert [one.device for one in await answers(hand)] == [2]
        long_ago = ("IDLE", 60_000, "JUSTID")
        await hand.client.call("XCLAIM", dead.stream, TRAINERS, "dead", 0, entry.id, *long_ago)
        assert [one.device for one in await answers(hand, 2)] == [2, 1]


async def test_redis_outage_does_not_make_a_task_poison(hand: Hand, make: Make, task: Adds) -> None:
    first = await hand.create()
    await hand.client.call("DEL", hand.keys.model(first.blob))
    live = context()
    async with running(make(lease=LeaseSettings(seconds=60, attempts=2)), live):
        await hand.open()
        await wait_until(lambda: counted(live, "fedstream_retries_total", loop="tasks") > 3)
        assert await hand.commit(1) == "done"
        [upload] = await answers(hand)
    assert isinstance(upload, Upload)
    assert (upload.tau, len(task.seen)) == (1, 1)
