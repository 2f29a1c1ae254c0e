"""The receipt that a device gets for its update, however often it asks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from fedstream.broker.blobs import CHUNK
from fedstream.broker.keys import member
from fedstream.broker.ledger.gateway import Fate
from fedstream.coordinator.gateway.upload_locks import UploadLock
from fedstream.coordinator.gateway.upload_state import ADMITTED, RECEIVED, Receipts, receipt_of
from fedstream.core.errors import Unavailable
from fedstream.core.messages import Withdraw
from fedstream.protocol.messages import Receipt
from tests.coordinator.gateway.places import SITE
from tests.coordinator.gateway.uploading import DEVICE, SEVERAL, Scene, queued
from tests.support import wait_until


@pytest.mark.usefixtures("impatient")
async def test_the_last_part_may_come_again(make: Any, scene: Scene) -> None:
    """It gets the same receipt: undecided, decided, after a restart, and at another replica."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 4 * CHUNK], complete=False)).status == 201
        undecided = await phone.patches(at, 4 * CHUNK)
        assert undecided.receipt == (202, "received", None)
        assert undecided.headers["Retry-After"] in ("1", "2", "3")
        state = (await phone.looks(at)).headers
        assert (state["Upload-Complete"], state["Upload-Offset"]) == ("?1", str(len(phone.data)))
        told = await phone.asks(at, "DELETE", phone.about())  # somebody may just be deciding
        assert told.refusal == (409, "complete")
        async with scene.deciding():
            for _ in range(2):
                assert (await phone.patches(at, 4 * CHUNK)).receipt == (200, "admitted", None)
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
            assert (await phone.looks(at)).headers["Upload-Complete"] == "?1"
    async with scene.replica(name="gw-1") as another:
        assert (await phone.patches(another, 4 * CHUNK)).receipt == (200, "admitted", None)
    async with scene.replica() as at:
        assert (await phone.patches(at, len(phone.data))).receipt == (200, "admitted", None)
        assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    view = await hand.ledger.look()
    assert view.reasons("stray") == {}


@pytest.mark.usefixtures("impatient")
async def test_a_small_update_may_come_again(make: Any, scene: Scene) -> None:
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        for _ in range(2):
            assert (await phone.posts(at, phone.data)).receipt == (202, "received", None)
        # It may be long until somebody decides, and the device must be known until then.
        [note] = await hand.client.call("KEYS", hand.keys.upload_note(SITE, "*"))
        assert await hand.client.call("PTTL", note) > 500_000
        async with scene.deciding():
            for _ in range(2):
                assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    assert (await hand.ledger.look()).reasons("stray") == {}


async def test_a_wrong_digest_is_admitted_and_refused_by_the_updater(
    make: Any, scene: Scene
) -> None:
    """Nobody but the updater reads the bytes: who asks later hears of it."""
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at, digest="0" * 64)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
        upload, _ = await queued(hand)
        assert await hand.commit(None, upload) == "done"
        assert (await phone.posts(at, phone.data)).receipt == (422, "refused", "digest")
    await hand.balanced()


@pytest.mark.usefixtures("impatient")
async def test_what_was_forgotten_is_not_asked_for_ever(make: Any, scene: Scene) -> None:
    """Redis knows how the newest 20,000 tasks ended; this one ended before them."""
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
        upload, _ = await queued(hand)
        assert await hand.commit(None, upload) == "done"
        await hand.client.call("DEL", hand.keys.ended)
        assert (await phone.patches(at, len(phone.data))).refusal == (404, "no upload")
        # The device came lately, but no other replica can have the task.
        assert (await phone.posts(at, phone.data)).refusal == (404, "unknown task")


@pytest.mark.usefixtures("impatient")
async def test_an_update_whose_task_was_forgotten_is_not_waited_for(
    make: Any, scene: Scene
) -> None:
    """Redis fell back to before this task was made, while the replica still had it in hand.

    A coordinator that is slow or away is waited for all the same.
    """
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        slow = await scene.phone(at, device=DEVICE + 1)
        assert (await slow.posts(at, slow.data)).receipt == (202, "received", None)
        await hand.client.call("HDEL", hand.keys.open, phone.offer.task.id)
        await hand.client.call("DEL", hand.keys.tasks_of(member(SITE, "gw-0")))
        assert (await phone.posts(at, phone.data)).refusal == (404, "no upload")
        blobs = hand.keys.update(f"{SITE}/{phone.offer.task.id}*")
        assert await hand.client.call("KEYS", blobs) == []
        assert (await phone.patches(at, len(phone.data))).refusal == (404, "unknown task")
        assert (await phone.posts(at, phone.data)).refusal == (404, "unknown task")
        assert (await slow.patches(at, len(slow.data))).receipt == (202, "received", None)
        async with scene.deciding():
            assert (await slow.posts(at, slow.data)).receipt == (200, "admitted", None)
    assert [upload.task for _, upload in await hand.queue()] == [slow.offer.task.id]


async def test_an_answer_to_a_task_that_was_given_up_hears_so(make: Any, scene: Scene) -> None:
    """The gateway has not heard of it yet: the lease's entry is gone."""
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        overdue = Withdraw(tasks=(phone.offer.task.id,), why="timed out")
        await hand.client.call("XADD", hand.keys.triggers, "*", "m", overdue.encode())
        async with scene.deciding():

            async def withdrawn() -> bool:
                return not (await hand.ledger.look()).open

            await wait_until(withdrawn)
            told = await phone.posts(at, phone.data)
            assert told.receipt == (422, "given up", "timed out")
        assert await hand.queue() == []


# receipts from the fates of tasks, without a gateway

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
