"""What a device hears of its attempt at a task, from what has become of the task."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from fedstream.broker.ledger.gateway import Fate
from fedstream.coordinator.gateway.receipts import ADMITTED, RECEIVED, Receipts, receipt_of
from fedstream.coordinator.gateway.upload_locks import UploadLock
from fedstream.core.errors import Unavailable
from fedstream.protocol.messages import Receipt

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


async def is_waiting(_task: str) -> bool:
    """Every task is open."""
    return True


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

    receipts = Receipts(look, is_waiting)
    told = await asyncio.gather(*(receipts.of(task, OWN, UploadLock()) for task in fates))
    assert [receipt and receipt.reason for receipt in told] == ["answered twice", "timed out", None]
    assert asked == [["a", "b", "c"], ["a", "b"], ["a", "b"], ["b"], ["b"]]


async def test_who_waits_hears_that_redis_is_away() -> None:
    """And who comes later asks anew."""
    away = True

    async def look(tasks: Sequence[str]) -> list[Fate]:
        if away:
            raise Unavailable("away")
        return [Fate(admitted=OWN) for _ in tasks]

    receipts = Receipts(look, is_waiting)
    ends = await asyncio.gather(
        *(receipts.of(task, OWN, UploadLock()) for task in "ab"), return_exceptions=True
    )
    assert [type(end) for end in ends] == [Unavailable, Unavailable]
    away = False
    assert await receipts.of("a", OWN, UploadLock()) == ADMITTED


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("open_", "fate", "said"),
    [(True, Fate(), RECEIVED), (False, Fate(), None), (False, Fate(admitted=OWN), ADMITTED)],
    ids=["open", "forgotten", "decided meanwhile"],
)
async def test_what_is_not_decided_in_time_is_open_or_forgotten(
    open_: bool, fate: Fate, said: Receipt | None
) -> None:
    """A task that ends between the last look and the question whether it is open has ended."""
    fates = {"a": Fate()}

    async def look(tasks: Sequence[str]) -> list[Fate]:
        return [fates[task] for task in tasks]

    async def is_open(task: str) -> bool:
        fates[task] = fate
        return open_

    assert await Receipts(look, is_open).of("a", OWN, UploadLock()) == said
