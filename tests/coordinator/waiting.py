"""What the tests of a coordinator and of a scheduler wait for, and what they answer."""

from __future__ import annotations

from fedstream.broker.streams import Entry
from fedstream.core.messages import Assignment, Dead, GiveUp, Trigger, Upload
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


async def are_open(hand: Hand, n: int) -> tuple[Trigger, ...]:
    """Waits until exactly so many tasks are open."""

    async def there() -> bool:
        return len((await hand.ledger.look()).open) == n

    await wait_until(there, what=f"{n} open")
    return (await hand.ledger.look()).open


async def give_up(hand: Hand, *triggers: Trigger) -> None:
    for t in triggers:
        answer = GiveUp(
            task=t.task, attempt="1", device=t.device, trainer="t", reason="dropped out"
        )
        assert await hand.admit(answer) == [("given_up", "dropped out")]


async def issued(hand: Hand, n: int) -> bool:
    return (await hand.ledger.look()).issued == n


async def has_issued(hand: Hand, n: int) -> None:
    await wait_until(lambda: issued(hand, n), what=f"{n} issued")


async def asked(hand: Hand) -> bool:
    return int(await hand.client.call("XLEN", hand.keys.triggers)) > 0


async def of_version(hand: Hand, version: int, n: int) -> tuple[Trigger, ...]:
    found = (await hand.ledger.look()).open
    mine = tuple(trigger for trigger in found if trigger.version == version)
    return mine if len(mine) == n else ()
