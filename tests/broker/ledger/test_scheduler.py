"""The scheduler opens tasks, as many as may be open, and hands them out."""

from __future__ import annotations

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.core.errors import BrokerError, Fenced
from fedstream.core.messages import Assignment
from tests.support import Hand


async def test_tasks_are_opened_only_up_to_the_limit(hand: Hand) -> None:
    await hand.create()
    triggers = [hand.trigger() for _ in range(5)]
    assert await hand.ledger.trigger(hand.scheduler.token, 3, 0, triggers) == 3
    view = await hand.ledger.look()
    assert (view.issued, {t.task for t in view.open}) == (3, {t.task for t in triggers[:3]})
    assert len(await hand.take(5)) == 3
    assert await hand.ledger.trigger(hand.scheduler.token, 3, 3, triggers[3:]) == 0
    assert await hand.ledger.trigger(hand.scheduler.token, 4, 3, triggers[3:]) == 1


async def test_a_repeated_trigger_after_a_lost_reply_opens_nothing(hand: Hand) -> None:
    await hand.create()
    triggers = [hand.trigger(), hand.trigger()]
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, triggers) == 2
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, triggers) == 0
    assert len(await hand.take(4)) == 2


async def test_a_task_goes_to_the_trainers_of_its_device(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("owner", 3)
    owned, other = [await hand.open(device=device, seed=2**62) for device in (3, 4)]
    assert [task for _, task in await hand.take(2)] == [Assignment.decode(other[0].assignment())]
    [(_, fields)] = await client.call("XRANGE", keys.tasks_of("owner"), "-", "+")
    assert Assignment.decode(fields[1]) == Assignment.decode(owned[0].assignment())
    view = await hand.ledger.look()
    assert view.triggers == 0
    assert {trigger.device: trigger for trigger in view.open} == {3: owned[0], 4: other[0]}


async def test_no_task_is_opened_that_cannot_be_handed_out(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Something foreign is where an owner's tasks go."""
    await hand.create()
    await hand.announce("owner", 3)
    await client.call("SET", keys.tasks_of("owner"), "junk")
    triggers = [hand.trigger(device=device) for device in (4, 3, 5)]
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await hand.ledger.trigger(hand.scheduler.token, 9, 0, triggers)
    view = await hand.ledger.look()
    assert (view.issued, view.open) == (1, (triggers[0],))
    assert [task.device for _, task in await hand.take(3)] == [4]


async def test_replaced_scheduler_triggers_nothing(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    other = Lease(client, keys, "scheduler", "s", seconds=60)
    assert await other.acquire()
    with pytest.raises(Fenced, match="another scheduler leads"):
        await hand.ledger.trigger(hand.scheduler.token, 9, 0, [hand.trigger()])
    assert (await hand.ledger.look()).issued == 0


async def test_nothing_is_triggered_before_or_after_a_run(hand: Hand) -> None:
    assert await hand.scheduler.acquire()
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, [hand.trigger()]) == 0
    await hand.create()
    assert await hand.ledger.finish("enough")
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, [hand.trigger()]) == 0
    assert (await hand.ledger.look()).issued == 0
