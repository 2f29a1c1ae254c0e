"""Dead letters: what is kept of an entry that nobody can process, and for how long."""

from __future__ import annotations

import pytest

from fedstream.broker.client import Client
from fedstream.broker.clock import uptime
from fedstream.broker.keys import COORDINATORS, TRAINERS, Keys
from fedstream.broker.streams import Entry
from fedstream.core.messages import Assignment, Dead
from tests.broker.ledger.steps import give_up
from tests.support import Hand


async def test_poison_task_becomes_a_dead_letter_and_ends(hand: Hand, client: Client) -> None:
    await hand.create()
    [trigger] = await hand.open()
    [(entry, task)] = await hand.take()
    keys, crashed = hand.keys, "crashed its trainers"
    buried = [
        await hand.ledger.bury(keys.tasks, TRAINERS, entry, crashed, task=task, deliveries=3)
        for _ in range(2)
    ]
    assert buried == [True, False]
    view = await hand.ledger.look()
    assert (view.dead, view.open, view.outcomes["dead"]) == (1, (), 1)
    assert view.reasons("dead") == {crashed: 1}
    [row] = await client.call("XRANGE", keys.dead, "-", "+")
    dead = Dead.decode(row[1][1])
    assert (dead.stream, dead.entry, dead.reason, dead.deliveries) == (
        "tasks",
        entry.id,
        crashed,
        3,
    )
    assert Assignment.decode(dead.data).task == trigger.task
    await hand.balanced()


async def test_second_letter_about_a_task_names_the_retry(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    [trigger] = await hand.open()
    await hand.dispatch()
    [(entry, task)] = await hand.take()
    await hand.ledger.bury(keys.tasks, TRAINERS, entry, "poison", task=task)
    await client.call("XADD", keys.tasks, "*", "m", entry.data)  # it was dispatched twice
    [(twice, _)] = await hand.take()
    await hand.ledger.bury(keys.tasks, TRAINERS, twice, "poison", task=task)
    letters = [id_.decode() for id_, _ in await client.call("XRANGE", keys.dead, "-", "+")]
    first, second = [hand.trigger(device=task.device) for _ in letters]
    assert await hand.ledger.retry(letters[0], trigger.task, first) == ("sent", "")
    assert await hand.ledger.retry(letters[1], trigger.task, second) == ("retried", first.task)
    await hand.admit(give_up(first))  # the task that it was retried as has ended too
    assert await hand.ledger.retry(letters[1], trigger.task, second) == ("retried", first.task)
    assert (await hand.ledger.look()).issued == 2


async def test_entry_of_a_stream_without_a_group_is_buried(hand: Hand, client: Client) -> None:
    await hand.create()
    id_ = (await client.call("XADD", hand.keys.queue, "*", "m", b"junk")).decode()
    entry = Entry(id_, b"junk")
    assert await hand.ledger.bury(hand.keys.queue, "", entry, "not msgpack")
    assert not await hand.ledger.bury(hand.keys.queue, "", entry, "not msgpack")
    assert (await hand.ledger.look()).dead == 1


async def test_task_unreadable_to_a_trainer_is_buried_by_the_coordinator(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.tasks.ensure()
    await client.call("XADD", keys.tasks, "*", "m", b"junk")
    [entry] = await hand.tasks.read()
    dead = Dead(stream="tasks", entry=entry.id, reason="not msgpack", time=1.0, data=entry.data)
    assert await hand.outbox.answer(keys.tasks, entry, dead) == "said"
    assert await client.call("XLEN", keys.tasks) == 0
    await hand.inbox.ensure()
    [said] = await hand.inbox.read()
    found = Dead.decode(said.data)
    client.clock.read(5e9, uptime())
    assert await hand.ledger.bury(
        keys.inbox("pool"), "coordinators", said, found.reason, found=found
    )
    [row] = await client.call("XRANGE", keys.dead, "-", "+")
    kept = Dead.decode(row[1][1])
    assert kept == dead.model_copy(update={"time": kept.time})
    assert kept.time == pytest.approx(5e9, abs=60), "Redis's clock, whatever the sender's shows"
    assert await client.call("XLEN", keys.inbox("pool")) == 0


async def test_dead_letters_are_capped_and_deletions_counted(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    for n in range(1003):
        id_ = (await client.call("XADD", keys.queue, "*", "m", b"junk")).decode()
        await hand.ledger.bury(keys.queue, "", Entry(id_, b"junk"), str(n))
    view = await hand.ledger.look()
    assert (view.dead, view.counts["dead_letters"]) == (1000, 1003)
    assert view.counts["dead_letters_lost"] == 3
    [oldest] = await client.call("XRANGE", keys.dead, "-", "+", "COUNT", 1)
    assert Dead.decode(oldest[1][1]).reason == "3"


async def junk(hand: Hand, site: str, reason: str = "junk") -> None:
    """A site says what nobody can read, in a second of its own, and it is buried."""
    await hand.client.call("XADD", hand.keys.inbox(site), "*", "m", b"junk")
    await hand.client.call("DEL", hand.keys.rates)
    [entry] = await hand.heard(site)
    stream = hand.keys.inbox(site)
    assert await hand.ledger.bury(stream, COORDINATORS, entry, reason, site=site)


async def letters(hand: Hand) -> list[tuple[str, str]]:
    """Stream and reason of each, oldest first."""
    rows = await hand.client.call("XRANGE", hand.keys.dead, "-", "+")
    found = [Dead.decode(fields[1]) for _, fields in rows]
    return [(dead.stream, dead.reason) for dead in found]


async def test_sites_letters_displace_only_its_own(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    for site in ("pool", "south", "north-2"):  # names that begin alike are no matter
        await junk(hand, site, "first")
    for n in range(103):
        await junk(hand, "north", str(n))
    others = [(f"inbox:{site}", "first") for site in ("pool", "south", "north-2")]
    assert await letters(hand) == [*others, *(("inbox:north", str(n)) for n in range(3, 103))]
    assert (await hand.ledger.look()).counts["dead_letters_lost"] == 3
    # What an operator has dropped is not lost, and makes room no earlier than the others.
    [*_, newest] = await client.call("XRANGE", keys.dead, "-", "+")
    await client.call("XTRIM", keys.dead, "MINID", newest[0])
    await junk(hand, "north", "103")
    assert await letters(hand) == [("inbox:north", "102"), ("inbox:north", "103")]
    assert (await hand.ledger.look()).counts["dead_letters_lost"] == 3


async def test_endless_junk_of_a_site_is_only_partly_kept(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """What ends a task is: there are no more of those than tasks."""
    await hand.create()
    await hand.announce("edge", 3, site="north")

    async def says(data: bytes, task: Assignment | None = None) -> bool:
        """In a second in which the site has said as much as it may: whether it stayed one."""
        second = (await client.call("TIME"))[0]
        await client.call("HSET", keys.rates, "", second, "letter north", 10)
        await client.call("XADD", keys.inbox("north"), "*", "m", data)
        [entry] = await hand.heard("north")
        stream = keys.inbox("north")
        assert await hand.ledger.bury(stream, COORDINATORS, entry, "x", task=task, site="north")
        return bool((await client.call("TIME"))[0] == second)

    while not await says(b"junk"):
        await client.call("DEL", keys.dead)
    assert await letters(hand) == []
    assert (await hand.ledger.look()).reasons("stray")["letter over the limit"] >= 1
    assert await client.call("XLEN", keys.inbox("north")) == 0
    [trigger] = await hand.open(device=3)
    await says(b"about a task", Assignment.decode(trigger.assignment()))
    assert await letters(hand) == [("inbox:north", "x")]
    assert (await hand.ledger.look()).outcomes["dead"] == 1


async def test_sites_letters_use_bounded_memory(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    inbox = keys.inbox("north")
    for _ in range(110):
        await client.call("XADD", inbox, "*", "m", b"x" * 200_000)
        await client.call("DEL", keys.rates)
        [entry] = await hand.heard("north")
        await hand.ledger.bury(inbox, COORDINATORS, entry, "é" * 100_000, site="north")
    assert await client.call("MEMORY", "USAGE", keys.dead, "SAMPLES", 0) < 100 * (84 << 10)


async def test_old_letters_are_deleted(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    now = int((await client.call("TIME"))[0])
    for days in (31, 29):
        dead = Dead(stream="tasks", entry="1-1", reason=str(days), time=1.0).encode()
        await client.call("XADD", keys.dead, f"{(now - days * 86_400) * 1000}-0", "m", dead)
    assert [await hand.ledger.age_letters(30) for _ in range(2)] == [1, 0]
    assert await letters(hand) == [("tasks", "29")]
    assert (await hand.ledger.look()).counts["dead_letters_lost"] == 1


async def test_long_reasons_are_truncated(hand: Hand) -> None:
    await hand.create()
    [_] = await hand.open()
    [(entry, task)] = await hand.take()
    await hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, "r" * 100_000, task=task)
    [(_, reason)] = await letters(hand)
    [told] = await hand.events("outcome")
    assert (len(reason), len(told.text or "")) == (1000, 1000)
