"""A coordinator admits an answer, or says why not."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.core.messages import Assignment, CloseRound, Dead, task_id
from tests.broker.ledger.steps import exists, give_up
from tests.support import SIZE_LIMIT, Hand


async def test_answer_is_admitted_and_its_blob_kept(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    upload = await hand.admitted()
    [(_, queued)] = await hand.queue()
    assert queued == upload
    assert await client.call("PTTL", keys.queued(upload.blob)) == -1
    assert not await exists(client, keys.update(upload.blob))  # out of its site's reach
    view = await hand.ledger.look(inboxes=True)
    assert (view.admitted, view.queue, view.inbox, len(view.open)) == (1, 1, 0, 1)


async def test_repeated_answer_is_admitted_without_a_second_entry(
    hand: Hand, keys: Keys, client: Client
) -> None:
    await hand.create()
    upload = await hand.admitted()
    written = keys.update(upload.blob)
    for ended in (False, True):
        await client.call("HSET", written, "size", "junk")  # nobody will admit that
        assert await hand.admit(upload) == [("admitted", "")]
        assert not await exists(client, written)
        assert await exists(client, keys.queued(upload.blob)) != ended
        if not ended:
            assert len(await hand.queue()) == 1
            assert await hand.commit(1, upload) == "done"
    assert await hand.queue() == []
    assert (await hand.ledger.look()).reasons("stray") == {}


async def test_deciding_twice_on_an_entry_decides_once(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open()
    [entry] = await hand.said(upload := await hand.trained(trigger))
    verdicts = [await hand.ledger.admit(entry, upload, size_limit=SIZE_LIMIT) for _ in range(2)]
    assert verdicts == [("admitted", ""), ("repeated", "")]
    assert len(await hand.queue()) == 1


@pytest.mark.parametrize("ended", [False, True])
async def test_second_answer_is_a_stray_and_its_blob_is_deleted(
    hand: Hand, client: Client, keys: Keys, ended: bool
) -> None:
    await hand.create()
    first = await hand.admitted()
    second = await hand.trained(Assignment(task=first.task, device=0, seed=1), attempt="a2")
    if ended:
        await hand.commit(1, first)
    assert await hand.admit(second) == [("stray", "answered twice")]
    assert not await exists(client, keys.update(second.blob))
    assert await exists(client, keys.queued(first.blob)) == (not ended)
    view = await hand.ledger.look()
    assert view.reasons("stray") == {"answered twice": 1}
    [event] = await hand.events("stray")
    assert (event.task, event.reason) == (first.task, "answered twice")
    await hand.balanced()


async def test_newest_20_000_task_ends_are_remembered(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    older = [f"{task_id(0, n.to_bytes(10))}|a1|applied|" for n in range(20_000)]
    await client.call("ZADD", keys.ended, *(part for end in older for part in (0, end)))
    for trigger in await hand.open(2):
        await hand.admit(give_up(trigger))
        assert await client.call("ZCARD", keys.ended) == 20_000
    assert await client.call("ZRANGE", keys.ended, 0, 0) == [older[2].encode()]
    newest = await client.call("ZRANGE", keys.ended, -1, -1)
    assert newest == [f"{trigger.task}|a1|given_up|dropped out".encode()]


async def test_answer_to_an_unknown_task_is_a_stray(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    upload = await hand.trained(hand.trigger())
    assert await hand.admit(upload) == [("stray", "unknown task")]
    assert not await exists(client, keys.update(upload.blob))
    await hand.balanced()


POLICY = '{"word_bits":32}'


@pytest.mark.parametrize(
    ("policy", "changes", "decided"),
    [
        (POLICY, {"format": "mask32", "sealed": b"seal"}, ("admitted", "")),
        (POLICY, {"sealed": b"seal"}, ("refused", "wire format")),
        (POLICY, {"format": "mask16", "sealed": b"seal"}, ("refused", "wire format")),
        (POLICY, {"format": "mask32"}, ("refused", "seal")),
        (POLICY, {"format": "mask32", "sealed": b""}, ("refused", "seal")),
        ("", {"format": "mask32", "sealed": b"seal"}, ("refused", "wire format")),
        ("", {"sealed": b"seal"}, ("admitted", "")),
    ],
)
async def test_updates_of_a_private_run_are_masked_and_sealed_or_deleted_unread(
    hand: Hand, client: Client, policy: str, changes: dict[str, Any], decided: tuple[str, str]
) -> None:
    await hand.create(policy=policy)
    [trigger] = await hand.open()
    upload = await hand.trained(trigger, **changes)
    assert await hand.admit(upload) == [decided]
    is_admitted = decided[0] == "admitted"
    assert await exists(client, hand.keys.queued(upload.blob)) == is_admitted
    assert not await exists(client, hand.keys.update(upload.blob))
    assert len(await hand.queue()) == is_admitted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "another"}, "layout"),
        ({"size": 4}, "size"),
        ({"size": SIZE_LIMIT + 1}, "too large"),
        ({"base": "another"}, "unknown base"),
        ({"tau": 1}, "unknown base"),
        ({"tau": 2**60}, "unknown base"),
        ({"write": False}, "blob missing"),
    ],
)
async def test_answer_with_invalid_metadata_is_refused(
    hand: Hand, client: Client, keys: Keys, changes: dict[str, Any], reason: str
) -> None:
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger, **changes)
    assert await hand.admit(upload) == [("refused", reason)]
    assert await hand.queue() == []
    assert not await exists(client, keys.update(upload.blob))
    view = await hand.ledger.look()
    assert (view.outcomes["refused"], view.reasons("refused")) == (1, {reason: 1})
    [event] = await hand.events()
    assert (event.task, event.outcome, event.reason) == (trigger.task, "refused", reason)
    await hand.balanced()


async def test_staleness_counts_from_the_current_version(hand: Hand) -> None:
    await hand.create(max_staleness=1)
    first, second = await hand.open(2)
    stale = await hand.trained(first)
    in_time = await hand.trained(second)
    await hand.commit(1)
    assert await hand.admit(in_time) == [("admitted", "")]
    await hand.commit(2)
    assert await hand.admit(stale) == [("refused", "too stale")]
    [event] = await hand.events()
    assert event.staleness == 2
    await hand.commit(3, in_time)


async def test_giving_up_ends_the_task(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open()
    assert await hand.admit(give_up(trigger)) == [("given_up", "dropped out")]
    view = await hand.ledger.look()
    assert (view.outcomes["given_up"], view.reasons("given_up")) == (1, {"dropped out": 1})
    assert await hand.admit(give_up(trigger)) == [("admitted", "")]  # told again
    await hand.balanced()


async def test_custom_reasons_are_reported_but_counted_together(hand: Hand, client: Client) -> None:
    """Each would stay in the counts for ever, and be a label of a metric."""
    await hand.create()
    for n, trigger in enumerate(await hand.open(5)):
        answer = give_up(trigger, reason=f"battery at {n} %")
        assert await hand.admit(answer) == [("given_up", "another reason")]
    [trigger] = await hand.open()
    await hand.ledger.ask(CloseRound(version=0, tasks=(trigger.task,), why="because I say so"))
    assert (await hand.dispatch())[-1] == "closed"
    view = await hand.ledger.look()
    assert view.reasons("given_up") == {"another reason": 5, "round over": 1}
    told = [event.text for event in await hand.events()]
    assert told == [*(f"battery at {n} %" for n in range(5)), None]
    [trigger] = await hand.open()
    *_, (entry, task) = await hand.take()
    assert await hand.ledger.bury(
        hand.keys.tasks, TRAINERS, entry, "the moon is full", task=task, deliveries=1
    )
    assert (await hand.ledger.look()).reasons("dead") == {"unreadable": 1}
    assert (await hand.events())[-1].text == "the moon is full"
    [row] = await client.call("XRANGE", hand.keys.dead, "-", "+")
    assert Dead.decode(row[1][1]).reason == "the moon is full"
    await hand.balanced()


async def test_answer_for_another_device_is_refused(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    [trigger] = await hand.open(device=3)
    upload = await hand.trained(trigger, device=4)
    assert await hand.admit(upload) == [("refused", "another device")]
    assert await hand.queue() == []
    assert not await exists(client, keys.update(upload.blob))
    await hand.balanced()


async def test_answer_after_the_run_is_given_up(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger)
    await hand.ledger.finish("enough")
    assert await hand.admit(upload) == [("given_up", "run finished")]
    assert not await exists(client, keys.update(upload.blob))
    await hand.balanced()
