"""What the tests of a scheduler wait for, and what they answer it."""

from __future__ import annotations

from fedstream.core.messages import GiveUp, Trigger
from tests.support import Hand, wait_until


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
