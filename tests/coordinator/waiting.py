"""What a coordinator's tests wait for."""

from __future__ import annotations

from fedstream.broker.streams import Entry
from fedstream.core.messages import Assignment, Dead, Upload
from tests.support import Hand, wait_until


async def tasks(hand: Hand, n: int) -> list[tuple[Entry, Assignment]]:
    """Waits for so many tasks, and takes them."""
    found: list[tuple[Entry, Assignment]] = []

    async def come() -> bool:
        found.extend(await hand.take())
        return len(found) >= n

    await wait_until(come, what=f"{n} tasks")
    assert len(found) == n
    return found


async def queued(hand: Hand, n: int) -> list[Upload]:
    """Waits until so many updates are in the queue."""

    async def come() -> bool:
        return len(await hand.queue()) == n

    await wait_until(come, what=f"{n} in the queue")
    return [message for _, message in await hand.queue() if isinstance(message, Upload)]


async def is_open(hand: Hand, n: int) -> bool:
    return len((await hand.ledger.look()).open) == n


async def dead(hand: Hand, n: int) -> list[Dead]:
    """Waits for so many dead letters."""

    async def come() -> bool:
        return (await hand.ledger.look()).dead == n

    await wait_until(come, what=f"{n} dead")
    rows = await hand.client.call("XRANGE", hand.keys.dead, "-", "+")
    return [Dead.decode(row[1][1]) for row in rows]
