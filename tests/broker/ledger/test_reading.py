"""What roles read of a run, and how they wait for news."""

from __future__ import annotations

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.core.errors import BrokerError, Fenced
from fedstream.core.records import Run
from tests.support import Hand


async def test_what_a_view_contains_is_not_reported_as_news(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    before = await hand.ledger.look()
    assert await hand.commit(1, upload) == "done"  # an event and a version: one piece of news
    after = await hand.ledger.look_after(before, block_ms=60_000)
    assert (after.head.version, after.told.keys()) == (1, before.told.keys())
    then = await hand.ledger.look_after(after, block_ms=50)
    assert then.told == after.told
    assert then.now - after.now >= 0.05


async def test_inboxes_are_counted_only_on_request(hand: Hand, client: Client) -> None:
    """There may be thousands, one for each site, and the scheduler looks for every version."""
    await hand.create()
    await hand.ledger.prepare(["north", "south"])
    for site, entries in (("north", 1), ("south", 2)):
        for _ in range(entries):
            await client.call("XADD", hand.keys.inbox(site), "*", "m", "x")

    async def counted() -> int:
        info: bytes = await client.call("INFO", "commandstats")
        calls = info.partition(b"cmdstat_xlen:calls=")[2].split(b",")[0]
        return int(calls or 0)  # there is no line of what was never called

    before = await counted()
    view = await hand.ledger.look()
    view = await hand.ledger.look_after(view, block_ms=1)
    assert (view.inbox, await counted() - before) == (None, 2 * 3)  # queue, triggers, dead letters
    assert (await hand.ledger.look(inboxes=True)).inbox == 3


async def test_opening_waiting_and_looking_are_one_exchange(hand: Hand, client: Client) -> None:
    await hand.create()
    seen, _ = await hand.ledger.changes()
    for n in range(2):
        opening = hand.ledger.trigger(hand.scheduler.token, 9, n, [hand.trigger()])
        opened, seen, changes = await hand.ledger.changes_after(
            seen, None, block_ms=1, opening=opening
        )
        assert (opened, seen.tasks, len(changes.tasks)) == (1, n + 1, n + 1)
        await client.call("SCRIPT", "FLUSH")
    fenced = hand.ledger.trigger("1:another", 9, 2, [hand.trigger()])
    await hand.ledger.prepare()
    with pytest.raises(Fenced):
        await hand.ledger.changes_after(seen, None, block_ms=1, opening=fenced)


async def test_looking_again_after_redis_lost_its_scripts(hand: Hand, client: Client) -> None:
    await hand.create()
    view = await hand.ledger.look()
    await hand.open()
    await client.call("SCRIPT", "FLUSH")
    view = await hand.ledger.look_after(view, block_ms=1)
    assert len(view.open) == 1


# scripts


async def test_failing_script_raises(hand: Hand, client: Client, keys: Keys) -> None:
    await client.call("SET", keys.run, "no hash")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await hand.ledger.look()


async def test_scripts_lost_by_redis_are_loaded_again(hand: Hand, client: Client) -> None:
    await hand.create()
    await client.call("SCRIPT", "FLUSH")
    await hand.admitted()
    assert isinstance((await hand.ledger.run()), Run)
    await client.call("SCRIPT", "FLUSH")
    assert (await hand.ledger.look()).admitted == 1
