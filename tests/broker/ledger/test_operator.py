"""An operator deletes a run."""

from __future__ import annotations

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from tests.support import Hand


async def test_purging_deletes_this_run_and_no_other(client: Client, hand: Hand) -> None:
    await hand.create()
    await hand.admitted()
    other = Keys(hand.keys.name + "-other")
    await client.call("SET", other.run, "x")
    assert await hand.ledger.purge() >= 10
    assert await client.call("KEYS", hand.keys.prefix + "*") == []
    assert await client.call("GET", other.run) == b"x"
    assert await hand.ledger.purge() == 0
    await client.call("DEL", other.run)
