"""What a device hears of its attempt at a task, from what has become of the task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from fedstream.broker.errors import Unavailable
from fedstream.broker.ledger.gateway import Fate
from fedstream.coordinator.gateway.receipts import Receipts, receipt_of
from fedstream.coordinator.gateway.turns import Turn

OWN, ANOTHER = "0123456789ab", "ba9876543210"


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        (Fate(), None),
        (Fate(admitted=OWN), ("admitted", None)),
        (Fate(admitted=ANOTHER), ("refused", "answered twice")),
        (Fate(None, OWN, "applied"), ("admitted", None)),
        (Fate(None, OWN, "buffered"), ("admitted", None)),
        (Fate(None, OWN, "refused", "too stale"), ("refused", "too stale")),
        (Fate(None, ANOTHER, "applied"), ("refused", "answered twice")),
        (Fate(None, ANOTHER, "refused", "digest"), ("refused", "answered twice")),
        (Fate(None, "", "given_up", "timed out"), ("given up", "timed out")),
        (Fate(None, ANOTHER, "given_up", "dropped out"), ("given up", "dropped out")),
        (Fate(None, "", "dead", "unreadable"), ("given up", "unreadable")),
        (Fate(None, "", "retried", "unreadable"), ("given up", "unreadable")),
    ],
)
def test_a_fate_is_a_receipt(fate: Fate, said: tuple[str, str | None] | None) -> None:
    receipt = receipt_of(fate, OWN)
    assert (None if receipt is None else (receipt.state, receipt.reason)) == said


async def test_all_who_wait_are_asked_for_together() -> None:
    """Each hears of its own, as soon as it is decided."""
    asked: list[Sequence[str]] = []
    fates = {"a": Fate(), "b": Fate(), "c": Fate(admitted=OWN)}

    async def look(tasks: Sequence[str]) -> list[Fate]:
        asked.append(tasks)
        if len(asked) == 3:
            fates["a"] = Fate(admitted=ANOTHER)
        if len(asked) == 5:
            fates["b"] = Fate(None, "", "given_up", "timed out")
        return [fates[task] for task in tasks]

    receipts = Receipts(look)
    told = await asyncio.gather(*(receipts.of(task, OWN, Turn()) for task in fates))
    assert [receipt.reason for receipt in told] == ["answered twice", "timed out", None]
    assert asked == [["a", "b", "c"], ["a", "b"], ["a", "b"], ["b"], ["b"]]


async def test_who_waits_hears_that_redis_is_away() -> None:
    """And who comes later asks anew."""
    away = True

    async def look(tasks: Sequence[str]) -> list[Fate]:
        if away:
            raise Unavailable("away")
        return [Fate(admitted=OWN) for _ in tasks]

    receipts = Receipts(look)
    ends = await asyncio.gather(
        *(receipts.of(task, OWN, Turn()) for task in "ab"), return_exceptions=True
    )
    assert [type(end) for end in ends] == [Unavailable, Unavailable]
    away = False
    assert (await receipts.of("a", OWN, Turn())).state == "admitted"
