"""A coordinator turns triggers into tasks."""

from __future__ import annotations

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.messages import Assignment, Trigger
from tests.broker.ledger.steps import give_up
from tests.support import Hand, wait_until


async def test_a_trigger_becomes_a_task_of_the_pool(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.request(device=3, steps=7, epochs=None, seed=2**62)
    assert (await hand.ledger.look()).triggers == 1
    assert await hand.dispatch() == ["sent"]
    [(_, task)] = await hand.take()
    assert task == Assignment.decode(trigger.assignment())
    assert (await hand.ledger.look()).triggers == 0


async def test_owned_device_is_served_by_its_owner(hand: Hand, client: Client) -> None:
    await hand.create()
    await hand.announce("owner", 3)
    await hand.request(device=3)
    await hand.request(device=4)
    assert await hand.dispatch() == ["sent", "sent"]
    assert [task.device for _, task in await hand.take()] == [4]
    [row] = await client.call("XRANGE", hand.keys.tasks_of("owner"), "-", "+")
    assert Assignment.decode(row[1][1]).device == 3
    assert (await hand.ledger.look()).owned == (3,)


async def test_dispatching_an_entry_twice_makes_one_task(hand: Hand) -> None:
    await hand.create()
    await hand.request()
    await hand.triggers.ensure()
    [entry] = await hand.triggers.read()
    trigger = Trigger.decode(entry.data)
    assert await hand.ledger.dispatch(entry, trigger) == "sent"
    assert await hand.ledger.dispatch(entry, trigger) == "repeated"
    assert len(await hand.take()) == 1


async def test_trigger_of_an_ended_task_makes_none(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.request()
    assert await hand.admit(give_up(trigger)) == [("given_up", "dropped out")]
    assert await hand.dispatch() == ["ended"]
    assert await hand.take() == []


async def test_a_device_triggers_itself_within_its_rate(hand: Hand, client: Client) -> None:
    """A site's, whatever names its trainers give themselves."""
    verdicts: list[bytes] = []

    async def in_one_second() -> bool:
        """By Redis's clock, which decides: where a second ended meanwhile, it is no such case."""
        await hand.ledger.purge()
        await hand.create()
        await hand.ledger.prepare()
        for origin in ("ann", "ann", "bob"):
            await hand.outbox.say(hand.trigger(origin=origin))
        decisions = [
            hand.ledger.take_up(
                "pool", entry, Trigger.decode(entry.data), anarchic=True, rate=2, limit=9
            ).command
            for entry in await hand.heard()
        ]
        began, *told, ended = await client.pipeline([("TIME",), *decisions, ("TIME",)])
        verdicts[:] = told
        return bool(began[0] == ended[0])

    await wait_until(in_one_second)
    assert verdicts == [b"sent", b"sent", b"limited"]
    view = await hand.ledger.look()
    assert (view.issued, len(view.open)) == (2, 2)
    assert view.reasons("stray") == {"trigger over the limit": 1}
    assert len(await hand.take()) == 2


async def test_sites_rate_is_per_second(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    await client.call("HSET", keys.rates, "", "1234", "trigger pool", 99, "trigger other", 1)
    assert await hand.take_up(hand.trigger(origin="ann"), rate=1) == ["sent"]
    assert set(await client.call("HKEYS", keys.rates)) == {b"", b"trigger pool"}


async def test_self_triggered_tasks_are_limited(hand: Hand) -> None:
    await hand.create()
    await hand.open(2)
    own = [hand.trigger(origin="ann") for _ in range(2)]
    assert await hand.take_up(*own, limit=3) == ["sent", "limited"]


async def test_devices_cannot_trigger_under_a_scheduler_policy(hand: Hand) -> None:
    await hand.create()
    assert await hand.take_up(hand.trigger(origin="ann"), anarchic=False) == ["unasked"]
    view = await hand.ledger.look()
    assert (view.issued, view.reasons("stray")) == (0, {"trigger of its own": 1})


async def test_a_site_triggers_only_its_own_devices(hand: Hand, client: Client) -> None:
    await hand.create(devices=10)
    await hand.announce("edge", 3, site="north")
    await hand.announce("edge", 4, site="south")
    for site, device in (("north", 4), ("north", 5), ("pool", 3), ("pool", 10)):
        asked = hand.trigger(origin="edge", device=device)
        assert await hand.take_up(asked, site=site) == ["foreign"]
    own = [hand.trigger(origin="x", device=device) for device in (3, 5)]
    assert await hand.take_up(own[0], site="north") == ["sent"]
    assert await hand.take_up(own[1]) == ["sent"]  # nobody owns it: the pool's
    assert await client.call("XLEN", hand.keys.tasks_of("north/edge")) == 1
    view = await hand.ledger.look()
    assert view.reasons("stray") == {"trigger for another's device": 4}
    assert view.issued == 2


async def test_busy_device_cannot_trigger(hand: Hand) -> None:
    """Two tasks of a device would start from the same control variate, and count it twice."""
    await hand.create()
    first = hand.trigger(origin="ann", device=3)
    more = [hand.trigger(origin="bob", device=device) for device in (3, 4)]
    assert await hand.take_up(first, *more) == ["sent", "busy", "sent"]
    assert (await hand.ledger.look()).reasons("stray") == {"trigger for a busy device": 1}
    assert await hand.admit(give_up(first)) == [("given_up", "dropped out")]
    assert await hand.take_up(hand.trigger(origin="bob", device=3)) == ["sent"]
    await hand.balanced()


async def test_duplicate_trigger_makes_one_task_even_after_its_end(hand: Hand) -> None:
    await hand.create()
    trigger = hand.trigger(origin="ann")
    assert await hand.take_up(trigger, trigger) == ["sent", "repeated"]
    assert await hand.admit(give_up(trigger)) == [("given_up", "dropped out")]
    assert await hand.take_up(trigger) == ["repeated"]
    await hand.balanced()


async def test_device_cannot_trigger_after_the_run(hand: Hand) -> None:
    await hand.create()
    await hand.ledger.finish("enough")
    assert await hand.take_up(hand.trigger(origin="ann")) == ["finished"]
    assert (await hand.ledger.look()).issued == 0
