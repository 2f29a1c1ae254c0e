"""The ledger, script by script: every verdict, and what it leaves behind."""

from __future__ import annotations

import math
import os
from functools import partial
from typing import Any

import msgpack
import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.errors import BrokerError, Fenced, NoRun
from fedstream.broker.keys import COORDINATORS, TRAINERS, Keys
from fedstream.broker.layout import Model
from fedstream.broker.lease import Lease
from fedstream.broker.messages import (
    Assignment,
    CloseRound,
    Dead,
    GiveUp,
    RoundEnd,
    Trigger,
    Version,
    Withdraw,
    task_id,
)
from fedstream.broker.records import Commit, End, Run
from fedstream.broker.streams import Entry
from tests.support import SIZE_LIMIT, Hand, layout_of, model_of, snapshot, wait_until


def give_up(
    trigger: Trigger | Assignment, attempt: str = "a1", reason: str = "dropped out"
) -> GiveUp:
    return GiveUp(
        task=trigger.task, attempt=attempt, device=trigger.device, trainer="t", reason=reason
    )


async def exists(client: Client, key: str) -> bool:
    return bool(await client.call("EXISTS", key))


async def expires(client: Client, key: str) -> bool:
    return int(await client.call("PTTL", key)) > 0


# creating a run


async def test_before_it_is_created_there_is_no_run(hand: Hand, keys: Keys) -> None:
    for ask in (hand.ledger.look, hand.ledger.run):
        with pytest.raises(NoRun, match=keys.name):
            await ask()
    assert await hand.ledger.head() is None


async def test_a_created_run_reads_back_as_it_was_made(hand: Hand, client: Client) -> None:
    hand.layout = layout_of(3, buffers=2, integers=1)
    version = await hand.create(max_staleness=7, versions=5, seed=2**40, created=1234.5)
    run = await hand.ledger.run()
    assert run == hand.run(max_staleness=7, versions=5, seed=2**40, created=1234.5)
    head = await hand.ledger.head()
    assert head
    assert (head.version, head.digest, head.blob, head.epoch) == (0, version.digest, "0.1", 1)
    assert await hand.ledger.kept() == {"0.1": 0}
    assert await hand.ledger.digest(0) == version.digest
    assert await hand.ledger.digest(1) is None
    view = await hand.ledger.look()
    assert (view.run, view.head, view.issued, view.open) == (run, head, 0, ())
    assert not await expires(client, hand.keys.model("0.1"))


async def test_an_emptied_redis_gets_the_counts_and_what_was_open_is_given_up(
    hand: Hand, client: Client
) -> None:
    await hand.create()
    await hand.open(3)
    await hand.commit(1, await hand.admitted())
    counts = dict((await hand.ledger.look()).counts)
    version = await hand.publish(2)
    # A Redis that has the run keeps its own.
    for _ in range(2):
        reply = await hand.ledger.create(hand.updater.token, hand.run(), version, counts=counts)
        assert reply.what == "created"
        assert (await hand.ledger.look()).counts == counts
    await client.call("FLUSHALL")
    assert await hand.updater.acquire(at_least=1)
    version = await hand.publish(2)
    await hand.ledger.create(hand.updater.token, hand.run(), version, counts=counts, held=[3, 5])
    view = await hand.ledger.look()
    assert (view.issued, view.outcomes["applied"], view.outcomes["given_up"]) == (4, 1, 3)
    assert view.reasons("given_up") == {"lost with Redis": 3}
    assert view.head.held == (3, 5)
    await hand.balanced()


async def test_a_redis_that_is_older_than_the_journal_gets_what_it_lacks(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """As after the fail-over to a replica that lagged."""
    await hand.create()
    first, second = await hand.admitted(), await hand.admitted()
    await hand.open(2)
    old = [keys.open, keys.admitted, keys.counts, keys.ended, keys.queue]
    was = [await client.call("DUMP", name) for name in old]
    third = await hand.admitted()
    [tired] = await hand.open()
    about: dict[str, Any] = {"task": tired.task, "device": tired.device, "reason": "dropped out"}
    await hand.admit(GiveUp(attempt="1", trainer="t", **about))
    await hand.open(3)  # of which nobody knows anything later
    for version, upload in enumerate((first, second, third), 1):
        await hand.commit(version, upload)
    counts = dict((await hand.ledger.look()).counts)
    assert (counts["issued"], counts["applied"], counts["given_up"]) == (9, 3, 1)
    done = {
        upload.task: End(upload.task, upload.attempt, "applied", version=version)
        for version, upload in enumerate((first, second, third), 1)
    }
    for name, value in zip(old, was, strict=True):
        await client.call("DEL", name)
        if value is not None:
            await client.call("RESTORE", name, 0, value)
    for _ in range(2):  # repeated, it changes nothing
        reply = await hand.ledger.create(
            hand.updater.token, hand.run(), await hand.publish(3), counts=counts,
            journalled={"applied": 3}, done=done.get,
        )  # fmt: skip
        assert reply.what == "created"
        view = await hand.ledger.look()
        assert (view.issued, view.outcomes["applied"], len(view.open)) == (9, 3, 2)
        # Also of the one that dropped out there is no trace: who knows what it would become.
        assert view.reasons("given_up") == {"lost with Redis": 4}
        assert "applied:" not in view.counts  # without a reason none is counted
        assert view.admitted == 0
        await hand.balanced()
    # The entries are still there; what is done with them counts nothing twice.
    assert len(await hand.queue()) == 2
    await hand.commit(None, first, second, ends=list(done.values()))
    assert (await hand.ledger.look()).counts == view.counts


async def test_a_redis_that_is_newer_than_the_journals_counts_keeps_its_own(hand: Hand) -> None:
    """The updater died between record and commit: nothing is lost."""
    await hand.create()
    upload = await hand.admitted()
    counts = dict((await hand.ledger.look()).counts) | {"applied": 1}
    await hand.open(2)
    done = {upload.task: End(upload.task, upload.attempt, "applied", version=1)}
    version = await hand.publish(1)
    await hand.ledger.create(
        hand.updater.token, hand.run(), version, counts=counts, journalled={"applied": 1},
        done=done.get,
    )  # fmt: skip
    view = await hand.ledger.look()
    assert (view.issued, view.outcomes["applied"], len(view.open)) == (3, 1, 2)
    assert view.reasons("given_up") == {}
    await hand.balanced()


async def test_what_the_journal_lost_and_redis_counts_is_not_lost_with_redis(hand: Hand) -> None:
    """The model is published again before the queue has made the journal's end again."""
    await hand.create()
    uploads = [await hand.admitted(), await hand.admitted()]
    ends = [End(u.task, u.attempt, "refused", "digest", u.device) for u in uploads]
    for n, upload in enumerate(uploads):
        told = {"refused": n + 1, "refused:digest": n + 1}
        await hand.commit(None, upload, ends=[ends[n]], before=n, journalled=told)
    counts = dict((await hand.ledger.look()).counts)
    await hand.ledger.create(
        hand.updater.token, hand.run(), await hand.publish(0), counts={"issued": 2},
        journalled={"refused": 1, "refused:digest": 1}, done={uploads[0].task: ends[0]}.get,
    )  # fmt: skip
    assert (await hand.ledger.look()).counts == counts
    assert await hand.commit(None, ends=[ends[1]], before=1, journalled=told) == "done"
    view = await hand.ledger.look()
    assert (view.counts, view.head.journalled) == (counts, told)
    await hand.balanced()


async def test_an_end_that_redis_lost_is_told_and_counted_with_its_reason(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    refused = End(upload.task, upload.attempt, "refused", "norm", upload.device)
    version = await hand.publish(0)
    counts = dict((await hand.ledger.look()).counts)
    await hand.ledger.create(
        hand.updater.token, hand.run(), version, counts=counts, done={upload.task: refused}.get
    )
    assert (await hand.ledger.look()).reasons("refused") == {"norm": 1}
    [event] = await hand.events()
    assert (event.task, event.outcome, event.reason) == (upload.task, "refused", "norm")


async def test_a_run_is_not_created_on_a_model_that_is_not_there(hand: Hand) -> None:
    assert await hand.updater.acquire()
    version = await hand.publish(0, write=False)
    reply = await hand.ledger.create(hand.updater.token, hand.run(), version)
    assert reply.what == "unwritten"
    with pytest.raises(NoRun):
        await hand.ledger.run()


async def test_only_the_holder_creates_or_commits_or_retires(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    stale = hand.updater.token
    assert await Lease(client, keys, "updater", "u", seconds=60).acquire()
    before = await snapshot(client, keys)
    version = await hand.publish(1, write=False)
    nothing = Commit(version=version, held=(), mean_staleness=0.0)
    with pytest.raises(Fenced, match="another updater has taken over"):
        await hand.ledger.create(stale, hand.run(), version)
    with pytest.raises(Fenced):
        await hand.ledger.commit(stale, nothing)
    with pytest.raises(Fenced):
        await hand.ledger.retire(stale, ["0.1"])
    with pytest.raises(Fenced):
        await hand.ledger.hand_out(stale, 1, "digest", 16)
    assert await snapshot(client, keys) == before


async def test_a_token_that_redis_lost_is_lost_and_not_fenced(hand: Hand, client: Client) -> None:
    await hand.create()
    await client.call("FLUSHALL")
    version = await hand.publish(1)
    token = hand.updater.token
    assert (await hand.ledger.create(token, hand.run(), version)).what == "lost"
    assert await hand.ledger.retire(token, ["0.1"]) == "lost"
    assert await hand.ledger.hand_out(token, 1, "digest", 16) == "lost"
    commit = Commit(version=version, held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(token, commit)).what == "lost"


async def test_a_process_that_takes_its_own_lease_again_is_not_fenced_by_itself(
    hand: Hand,
) -> None:
    """Its loops may still show the token that it had a moment ago."""
    await hand.create()
    before = hand.updater.token
    assert await hand.updater.acquire()
    commit = Commit(version=await hand.publish(1), held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(before, commit)).what == "lost"
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
    before = hand.scheduler.token
    assert await hand.scheduler.acquire()
    assert await hand.ledger.trigger(before, 9, 0, [hand.trigger()]) == 0


async def test_a_run_that_redis_lost_is_published_again_where_it_was(
    hand: Hand, client: Client
) -> None:
    await hand.create()
    await client.call("FLUSHALL")
    assert await hand.updater.acquire(at_least=hand.updater.number)
    version = await hand.publish(41, 1.0)
    reply = await hand.ledger.create(hand.updater.token, hand.run(), version)
    assert reply.what == "created"
    head = await hand.ledger.head()
    assert head
    assert (head.version, head.epoch, head.blob) == (41, 2, "41.2")


# triggers


async def test_tasks_are_opened_up_to_the_limit(hand: Hand) -> None:
    await hand.create()
    triggers = [hand.trigger() for _ in range(5)]
    assert await hand.ledger.trigger(hand.scheduler.token, 3, 0, triggers) == 3
    view = await hand.ledger.look()
    assert (view.issued, {t.task for t in view.open}) == (3, {t.task for t in triggers[:3]})
    assert view.triggers == 3
    assert await hand.ledger.trigger(hand.scheduler.token, 3, 3, triggers[3:]) == 0
    assert await hand.ledger.trigger(hand.scheduler.token, 4, 3, triggers[3:]) == 1


async def test_a_repeated_trigger_after_a_lost_reply_opens_nothing(hand: Hand) -> None:
    await hand.create()
    triggers = [hand.trigger(), hand.trigger()]
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, triggers) == 2
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, triggers) == 0
    assert (await hand.ledger.look()).triggers == 2


async def test_a_scheduler_that_was_replaced_triggers_nothing(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    other = Lease(client, keys, "scheduler", "s", seconds=60)
    assert await other.acquire()
    with pytest.raises(Fenced, match="another scheduler leads"):
        await hand.ledger.trigger(hand.scheduler.token, 9, 0, [hand.trigger()])
    assert (await hand.ledger.look()).issued == 0


async def test_nothing_is_triggered_before_a_run_or_after_it(hand: Hand) -> None:
    assert await hand.scheduler.acquire()
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, [hand.trigger()]) == 0
    await hand.create()
    assert await hand.ledger.finish("enough")
    assert await hand.ledger.trigger(hand.scheduler.token, 9, 0, [hand.trigger()]) == 0
    assert (await hand.ledger.look()).issued == 0


# dispatch


async def test_a_trigger_becomes_a_task_of_the_pool(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open(device=3, steps=7, epochs=None, seed=2**62)
    assert await hand.dispatch() == ["sent"]
    [(_, task)] = await hand.take()
    assert task == Assignment.of(trigger)
    assert (await hand.ledger.look()).triggers == 0


async def test_a_device_that_is_owned_is_served_by_its_owner(hand: Hand, client: Client) -> None:
    await hand.create()
    await hand.announce("owner", 3)
    await hand.open(device=3)
    await hand.open(device=4)
    assert await hand.dispatch() == ["sent", "sent"]
    assert [task.device for _, task in await hand.take()] == [4]
    [row] = await client.call("XRANGE", hand.keys.tasks_of("owner"), "-", "+")
    assert Assignment.decode(row[1][1]).device == 3
    assert (await hand.ledger.look()).owned == (3,)


async def test_dispatching_an_entry_twice_makes_one_task(hand: Hand) -> None:
    await hand.create()
    await hand.open()
    await hand.triggers.ensure()
    [entry] = await hand.triggers.read()
    trigger = Trigger.decode(entry.data)
    assert await hand.ledger.dispatch(entry, trigger) == "sent"
    assert await hand.ledger.dispatch(entry, trigger) == "repeated"
    assert len(await hand.take()) == 1


async def test_a_trigger_whose_task_has_ended_makes_none(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open()
    assert await hand.admit(give_up(trigger)) == [("given_up", "dropped out")]
    assert await hand.dispatch() == ["ended"]
    assert await hand.take() == []


async def test_a_device_triggers_itself_within_its_rate(hand: Hand, client: Client) -> None:
    """A site's, whatever names its trainers give themselves."""
    verdicts: list[bytes] = []

    async def in_one_second() -> bool:
        """By Redis's clock, which decides: where a second ended meanwhile, it is no such case."""
        await hand.ledger.purge()
        await hand.create()
        await hand.ledger.prepare()
        for origin in ("ann", "ann", "bob"):
            await hand.outbox.say(hand.trigger(origin=origin))
        decisions = [
            hand.ledger.take_up(
                "pool", entry, Trigger.decode(entry.data), anarchic=True, rate=2, limit=9
            ).command
            for entry in await hand.heard()
        ]
        began, *told, ended = await client.pipeline([("TIME",), *decisions, ("TIME",)])
        verdicts[:] = told
        return bool(began[0] == ended[0])

    await wait_until(in_one_second)
    assert verdicts == [b"sent", b"sent", b"limited"]
    view = await hand.ledger.look()
    assert (view.issued, len(view.open)) == (2, 2)
    assert view.reasons("stray") == {"trigger over the limit": 1}
    assert len(await hand.take()) == 2


async def test_a_sites_rate_begins_anew_every_second(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await client.call("HSET", keys.rates, "", "1234", "trigger pool", 99, "trigger other", 1)
    assert await hand.take_up(hand.trigger(origin="ann"), rate=1) == ["sent"]
    assert set(await client.call("HKEYS", keys.rates)) == {b"", b"trigger pool"}


async def test_devices_trigger_themselves_only_up_to_the_limit(hand: Hand) -> None:
    await hand.create()
    await hand.open(2)
    own = [hand.trigger(origin="ann") for _ in range(2)]
    assert await hand.take_up(*own, limit=3) == ["sent", "limited"]


async def test_devices_trigger_nothing_where_the_scheduler_decides(hand: Hand) -> None:
    await hand.create()
    assert await hand.take_up(hand.trigger(origin="ann"), anarchic=False) == ["unasked"]
    view = await hand.ledger.look()
    assert (view.issued, view.reasons("stray")) == (0, {"trigger of its own": 1})


async def test_a_site_triggers_only_its_own_devices(hand: Hand, client: Client) -> None:
    await hand.create(devices=10)
    await hand.announce("edge", 3, site="north")
    await hand.announce("edge", 4, site="south")
    for site, device in (("north", 4), ("north", 5), ("pool", 3), ("pool", 10)):
        asked = hand.trigger(origin="edge", device=device)
        assert await hand.take_up(asked, site=site) == ["foreign"]
    own = [hand.trigger(origin="x", device=device) for device in (3, 5)]
    assert await hand.take_up(own[0], site="north") == ["sent"]
    assert await hand.take_up(own[1]) == ["sent"]  # nobody owns it: the pool's
    assert await client.call("XLEN", hand.keys.tasks_of("north/edge")) == 1
    view = await hand.ledger.look()
    assert view.reasons("stray") == {"trigger for another's device": 4}
    assert view.issued == 2


async def test_a_device_that_is_busy_triggers_nothing_more(hand: Hand) -> None:
    """Two tasks of a device would start from the same control variate, and count it twice."""
    await hand.create()
    first = hand.trigger(origin="ann", device=3)
    more = [hand.trigger(origin="bob", device=device) for device in (3, 4)]
    assert await hand.take_up(first, *more) == ["sent", "busy", "sent"]
    assert (await hand.ledger.look()).reasons("stray") == {"trigger for a busy device": 1}
    assert await hand.admit(give_up(first)) == [("given_up", "dropped out")]
    assert await hand.take_up(hand.trigger(origin="bob", device=3)) == ["sent"]
    await hand.balanced()


async def test_a_devices_trigger_that_was_said_twice_is_one_task_even_after_its_end(
    hand: Hand,
) -> None:
    await hand.create()
    trigger = hand.trigger(origin="ann")
    assert await hand.take_up(trigger, trigger) == ["sent", "repeated"]
    assert await hand.admit(give_up(trigger)) == [("given_up", "dropped out")]
    assert await hand.take_up(trigger) == ["repeated"]
    await hand.balanced()


async def test_a_device_triggers_nothing_after_the_run(hand: Hand) -> None:
    await hand.create()
    await hand.ledger.finish("enough")
    assert await hand.take_up(hand.trigger(origin="ann")) == ["finished"]
    assert (await hand.ledger.look()).issued == 0


# a trainer's answer


async def test_an_answer_is_said_once_and_ends_the_lease(hand: Hand) -> None:
    await hand.create()
    await hand.open()
    await hand.dispatch()
    [(entry, task)] = await hand.take()
    upload = await hand.trained(task)
    keys = hand.keys
    assert await hand.outbox.answer(keys.tasks, entry, upload) == "said"
    assert await hand.outbox.answer(keys.tasks, entry, upload) == "over"
    view = await hand.ledger.look(inboxes=True)
    assert (view.inbox, len(view.open)) == (1, 1)
    assert not await hand.tasks.renew(entry)


async def test_an_answer_waits_until_its_update_is_there_and_renews_its_expiry(
    hand: Hand, client: Client
) -> None:
    await hand.create()
    await hand.open()
    await hand.dispatch()
    [(entry, task)] = await hand.take()
    upload = await hand.trained(task, write=False)
    update, model = hand.keys.update(upload.blob), model_of(hand.layout, 1.0)
    answer = partial(hand.outbox.answer, hand.keys.tasks, entry, upload, expire_s=500)
    assert await answer() == "unwritten"
    assert (await hand.ledger.look(inboxes=True)).inbox == 0
    ahead = await blobs.prepare(client, update, model, expire_s=60)
    assert await answer(ahead=ahead) == "said"
    assert await client.call("PTTL", update) > 400_000
    await blobs.read(client, update, Model(hand.layout), digest=upload.digest, chunks=None)


# admission


async def test_an_answer_is_admitted_and_its_blob_stays(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    upload = await hand.admitted()
    [(_, queued)] = await hand.queue()
    assert queued == upload
    assert await client.call("PTTL", keys.queued(upload.blob)) == -1
    assert not await exists(client, keys.update(upload.blob))  # out of its site's reach
    view = await hand.ledger.look(inboxes=True)
    assert (view.admitted, view.queue, view.inbox, len(view.open)) == (1, 1, 0, 1)


async def test_the_same_answer_told_again_is_admitted_without_a_second_entry(
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


async def test_deciding_on_an_entry_twice_decides_once(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open()
    [entry] = await hand.said(upload := await hand.trained(trigger))
    verdicts = [await hand.ledger.admit(entry, upload, size_limit=SIZE_LIMIT) for _ in range(2)]
    assert verdicts == [("admitted", ""), ("repeated", "")]
    assert len(await hand.queue()) == 1


@pytest.mark.parametrize("ended", [False, True])
async def test_a_second_answer_to_a_task_is_a_stray_and_its_blob_goes(
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


async def test_of_how_tasks_ended_the_newest_20_000_are_remembered(
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


async def test_an_answer_to_nothing_is_a_stray(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    upload = await hand.trained(hand.trigger())
    assert await hand.admit(upload) == [("stray", "unknown task")]
    assert not await exists(client, keys.update(upload.blob))
    await hand.balanced()


async def test_an_answer_after_the_task_was_given_up_is_late(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open()
    await hand.ledger.ask(CloseRound(version=0, tasks=(trigger.task,), why="round over"))
    assert await hand.dispatch() == ["sent", "closed"]
    assert await hand.admit(await hand.trained(trigger)) == [("stray", "late")]


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
async def test_an_answer_is_refused_for_what_it_says_of_itself(
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


async def test_another_type_in_the_place_of_an_update_is_no_update(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger, write=False)
    await client.call("SET", keys.update(upload.blob), b"x" * upload.size)
    assert await hand.admit(upload) == [("refused", "blob missing")]
    assert not await exists(client, keys.update(upload.blob))
    await hand.balanced()


async def test_staleness_is_judged_by_the_version_that_is_current_now(hand: Hand) -> None:
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


async def test_a_device_that_gives_up_ends_the_task(hand: Hand) -> None:
    await hand.create()
    [trigger] = await hand.open()
    assert await hand.admit(give_up(trigger)) == [("given_up", "dropped out")]
    view = await hand.ledger.look()
    assert (view.outcomes["given_up"], view.reasons("given_up")) == (1, {"dropped out": 1})
    assert await hand.admit(give_up(trigger)) == [("admitted", "")]  # told again
    await hand.balanced()


async def test_reasons_of_a_trainers_own_are_told_and_not_counted_one_by_one(
    hand: Hand, client: Client
) -> None:
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
    await hand.dispatch()
    *_, (entry, task) = await hand.take()
    assert await hand.ledger.bury(
        hand.keys.tasks, TRAINERS, entry, "the moon is full", task=task, deliveries=1
    )
    assert (await hand.ledger.look()).reasons("dead") == {"unreadable": 1}
    assert (await hand.events())[-1].text == "the moon is full"
    [row] = await client.call("XRANGE", hand.keys.dead, "-", "+")
    assert Dead.decode(row[1][1]).reason == "the moon is full"
    await hand.balanced()


async def test_an_answer_for_another_device_than_was_asked_is_refused(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    [trigger] = await hand.open(device=3)
    upload = await hand.trained(trigger, device=4)
    assert await hand.admit(upload) == [("refused", "another device")]
    assert await hand.queue() == []
    assert not await exists(client, keys.update(upload.blob))
    await hand.balanced()


async def test_giving_up_what_another_has_answered_changes_nothing(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    task = Assignment(task=upload.task, device=0, seed=0)
    assert await hand.admit(give_up(task, attempt="a2")) == [("stray", "answered twice")]
    assert len(await hand.queue()) == 1


async def test_an_answer_after_the_run_is_given_up(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger)
    await hand.ledger.finish("enough")
    assert await hand.admit(upload) == [("given_up", "run finished")]
    assert not await exists(client, keys.update(upload.blob))
    await hand.balanced()


# rounds


async def test_the_end_of_a_round_gives_up_what_was_not_answered_and_comes_last_in_the_queue(
    hand: Hand,
) -> None:
    await hand.create()
    answered, open_one = await hand.open(2)
    upload = await hand.trained(answered)
    assert await hand.admit(upload) == [("admitted", "")]
    closing = CloseRound(version=0, tasks=(answered.task, open_one.task), why="time is up")
    await hand.ledger.ask(closing)
    assert await hand.dispatch() == ["sent", "sent", "closed"]
    assert [message for _, message in await hand.queue()] == [
        upload, RoundEnd(version=0, why="time is up")
    ]  # fmt: skip
    view = await hand.ledger.look()
    assert view.reasons("given_up") == {"round over": 1}
    assert [trigger.task for trigger in view.open] == [answered.task]
    await hand.balanced()


async def test_a_round_is_closed_once_for_each_entry(hand: Hand) -> None:
    await hand.create()
    closing = CloseRound(version=0, tasks=("gone",), why="time is up")
    await hand.ledger.ask(closing)
    await hand.triggers.ensure()
    [entry] = await hand.triggers.read()
    assert await hand.ledger.close_round(entry, closing) == "closed"
    assert await hand.ledger.close_round(entry, closing) == "repeated"
    assert len(await hand.queue()) == 1


# tasks that take too long


async def test_a_task_that_is_withdrawn_is_given_up_and_its_trainer_loses_its_lease(
    hand: Hand,
) -> None:
    await hand.create()
    hung, waiting, answered, other = await hand.open(4)
    await hand.dispatch()
    taken = {task.task: entry for entry, task in await hand.take(3)}
    assert await hand.admit(await hand.trained(answered)) == [("admitted", "")]
    overdue = tuple(trigger.task for trigger in (hung, waiting, answered))
    await hand.ledger.ask(Withdraw(tasks=overdue, why="timed out"))
    assert await hand.dispatch() == ["withdrawn"]
    view = await hand.ledger.look()
    assert view.reasons("given_up") == {"timed out": 2}
    assert {trigger.task for trigger in view.open} == {answered.task, other.task}
    assert not await hand.tasks.renew(taken[hung.task])
    late = await hand.trained(hung)
    said = await hand.outbox.answer(hand.keys.tasks, taken[hung.task], late)
    assert said == "over"
    assert {task.task for _, task in await hand.take()} == {other.task}
    # An answer that was on its way by then comes too late.
    assert await hand.admit(late) == [("stray", "late")]
    await hand.balanced()


async def test_an_owners_task_is_withdrawn_from_its_own_stream(hand: Hand) -> None:
    await hand.create()
    await hand.announce("owner", 3)
    [trigger] = await hand.open(device=3)
    await hand.dispatch()
    stream = hand.keys.tasks_of("owner")
    assert await hand.client.call("XLEN", stream) == 1
    wish = Withdraw(tasks=(trigger.task, "gone"), why="deadline passed")
    for verdict in ("withdrawn", "repeated"):
        if verdict == "withdrawn":
            await hand.ledger.ask(wish)
            [entry] = await hand.triggers.read()
        assert await hand.ledger.withdraw(entry, wish) == verdict
        assert (await hand.ledger.look()).reasons("given_up") == {"deadline passed": 1}
        assert await hand.client.call("XLEN", stream) == 0
    await hand.balanced()


# commits


async def test_a_commit_publishes_ends_and_deletes(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    uploads = [await hand.admitted(), await hand.admitted()]
    assert await hand.commit(1, *uploads, held=(4, 7, 4), retained=2) == "done"
    assert await hand.queue() == []
    for upload in uploads:
        assert not await exists(client, keys.queued(upload.blob))
    assert not await expires(client, keys.model("1.1"))
    head = await hand.ledger.head()
    assert head
    assert (head.version, head.blob, head.held, head.mean_staleness) == (1, "1.1", (4, 7, 4), 0.5)
    assert (head.buffered, head.retained) == (3, 2)
    assert await hand.ledger.digest(1) == head.digest
    assert await hand.ledger.kept() == {"0.1": 0, "1.1": 1}
    view = await hand.ledger.look()
    assert (view.outcomes["applied"], view.admitted, view.open) == (2, 0, ())
    rows = await client.call("XRANGE", keys.models, "-", "+")
    assert [Version.decode(fields[1]).version for _, fields in rows] == [0, 1]
    assert [(e.task, e.outcome, e.version, e.weight) for e in await hand.events()] == [
        (upload.task, "applied", 1, 0.6) for upload in uploads
    ]
    await hand.balanced()


async def test_a_commit_repeated_after_a_lost_reply_is_done_and_counts_once(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    upload = await hand.admitted()
    assert await hand.commit(1, upload) == "done"
    before = await snapshot(client, keys)
    assert await hand.commit(1, upload, write=False) == "done"
    assert await snapshot(client, keys) == before


async def test_a_refusal_repeated_after_a_lost_reply_counts_once(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    assert await hand.commit(None, upload) == "done"
    assert await hand.commit(None, upload) == "done"
    view = await hand.ledger.look()
    assert (view.counts["refused"], view.reasons("refused")) == (1, {"digest": 1})
    assert len(await hand.events()) == 1
    await hand.balanced()


@pytest.mark.parametrize(("number", "found"), [(2, 0), (7, 0), (0, 0)])
async def test_a_version_that_is_not_the_heads_child_is_not_published(
    hand: Hand, client: Client, keys: Keys, number: int, found: int
) -> None:
    await hand.create()
    version = (await hand.publish(number)).model_copy(update={"digest": "other"})
    before = await snapshot(client, keys)
    commit = Commit(version=version, held=(), mean_staleness=0.0)
    done = await hand.ledger.commit(hand.updater.token, commit)
    assert done.what == f"behind:{found}"
    assert await snapshot(client, keys) == before


async def test_a_commit_that_comes_behind_its_repetition_and_later_versions_changes_nothing(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Redis knows more ends than it asks for, and its token is good: only the head says so."""
    await hand.create()
    first, second = await hand.admitted(), await hand.admitted()
    assert await hand.commit(1, first, journalled={"applied": 1}) == "done"
    assert await hand.commit(2, second, journalled={"applied": 2}, before=1) == "done"
    before = await snapshot(client, keys)
    assert await hand.commit(1, first, journalled={"applied": 1}, write=False) == "behind:2"
    assert await snapshot(client, keys) == before


async def test_nothing_is_committed_to_a_run_that_redis_lost(hand: Hand, client: Client) -> None:
    await hand.create()
    upload = await hand.admitted()
    await client.call("FLUSHALL")
    # The lease is taken again before the run is published again.
    assert await hand.updater.acquire(at_least=hand.updater.number)
    assert await hand.commit(None, upload) == "behind:-1"
    assert await hand.commit(1, upload) == "behind:-1"
    assert await hand.ledger.head() is None


async def test_a_version_whose_model_is_not_there_is_not_published(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    upload = await hand.admitted()
    before = await snapshot(client, keys)
    assert await hand.commit(1, upload, write=False) == "unwritten"
    assert await snapshot(client, keys) == before
    assert await hand.commit(1, upload) == "done"


async def test_the_last_version_finishes_the_run(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    assert await hand.commit(1, finish="version 1 reached") == "done"
    run = await hand.ledger.run()
    assert (run.state, run.why) == ("finished", "version 1 reached")
    assert run.finished is not None
    assert await hand.commit(None, upload) == "done"  # tasks still end
    await hand.balanced()


async def test_finishing_a_run_from_outside_is_done_once(hand: Hand) -> None:
    await hand.create()
    assert await hand.ledger.finish("accuracy 0.9 reached")
    assert not await hand.ledger.finish("again")
    run = await hand.ledger.run()
    assert (run.state, run.why) == ("finished", "accuracy 0.9 reached")
    [event] = await hand.events("run")
    assert event.text == "finished: accuracy 0.9 reached"
    # What was journalled before the updater knew is published, and it learns of the end.
    done = await hand.ledger.commit(
        hand.updater.token, Commit(version=await hand.publish(1), held=(), mean_staleness=0.0)
    )
    assert (done.what, done.finished) == ("done", True)
    assert await hand.ledger.run() == run


async def test_models_that_outlived_their_use_go_with_the_commit(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    assert await hand.commit(1, retired=["0.1"]) == "done"
    assert await hand.ledger.kept() == {"1.1": 1}
    assert not await exists(client, keys.model("0.1"))
    assert await hand.ledger.digest(0) is not None  # its descendants are still admitted


async def test_models_are_retired_out_of_turn(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    await hand.commit(1)
    assert await hand.ledger.retire(hand.updater.token, ["0.1"]) == "done"
    assert await hand.ledger.kept() == {"1.1": 1}
    assert not await exists(client, keys.model("0.1"))


async def test_a_commit_of_very_many_updates_is_whole(hand: Hand) -> None:
    await hand.create()
    ids = [f"{n}-1" for n in range(1, 10_001)]  # more than Lua's stack holds
    assert await hand.commit(1, entries=ids) == "done"
    head = await hand.ledger.head()
    assert head
    assert head.version == 1


async def test_lineage_goes_back_4096_versions(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    await client.call("HSET", keys.head, "version", 4096)
    assert await hand.commit(4097) == "done"
    assert await hand.ledger.digest(0) is not None
    await client.call("HSET", keys.head, "version", 4095)
    assert await hand.commit(4096) == "done"
    assert await hand.ledger.digest(0) is None


# dead letters


async def test_a_poisonous_task_is_buried_and_ends(hand: Hand, client: Client) -> None:
    await hand.create()
    [trigger] = await hand.open()
    await hand.dispatch()
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
        "tasks", entry.id, crashed, 3
    )  # fmt: skip
    assert Assignment.decode(dead.data).task == trigger.task
    await hand.balanced()


async def test_of_two_letters_about_a_task_one_is_retried_and_the_other_says_as_what(
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


async def test_burying_a_second_answer_does_not_end_a_task_whose_first_was_admitted(
    hand: Hand,
) -> None:
    await hand.create()
    upload = await hand.admitted()
    [entry] = await hand.said(upload)
    assert await hand.ledger.bury(
        hand.keys.inbox("pool"), COORDINATORS, entry, "crashed", task=upload, deliveries=3
    )
    assert [trigger.task for trigger in (await hand.ledger.look()).open] == [upload.task]
    assert await hand.commit(1, upload) == "done"
    assert (await hand.ledger.look()).outcomes["applied"] == 1
    await hand.balanced()


async def test_an_entry_of_a_stream_without_a_group_is_buried(hand: Hand, client: Client) -> None:
    await hand.create()
    id_ = (await client.call("XADD", hand.keys.queue, "*", "m", b"junk")).decode()
    entry = Entry(id_, b"junk")
    assert await hand.ledger.bury(hand.keys.queue, "", entry, "not msgpack")
    assert not await hand.ledger.bury(hand.keys.queue, "", entry, "not msgpack")
    assert (await hand.ledger.look()).dead == 1


async def test_a_task_that_a_trainer_cannot_read_goes_by_way_of_the_coordinator(
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
    assert await hand.ledger.bury(
        keys.inbox("pool"), "coordinators", said, found.reason, found=found
    )
    [row] = await client.call("XRANGE", keys.dead, "-", "+")
    kept = Dead.decode(row[1][1])
    assert kept == dead.model_copy(update={"time": kept.time})
    assert kept.time > dead.time  # the coordinator's clock, as for every letter
    assert await client.call("XLEN", keys.inbox("pool")) == 0


async def test_dead_letters_are_capped_and_the_losses_counted(
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


async def test_a_sites_letters_push_out_none_but_its_own(
    hand: Hand, client: Client, keys: Keys
) -> None:
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


async def test_of_a_site_that_says_junk_without_end_not_all_is_kept(
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
    await hand.dispatch()
    await says(b"about a task", Assignment.of(trigger))
    assert await letters(hand) == [("inbox:north", "x")]
    assert (await hand.ledger.look()).outcomes["dead"] == 1


async def test_a_sites_letters_take_so_much_memory_and_no_more(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    inbox = keys.inbox("north")
    for _ in range(110):
        await client.call("XADD", inbox, "*", "m", b"x" * 200_000)
        await client.call("DEL", keys.rates)
        [entry] = await hand.heard("north")
        await hand.ledger.bury(inbox, COORDINATORS, entry, "é" * 100_000, site="north")
    assert await client.call("MEMORY", "USAGE", keys.dead, "SAMPLES", 0) < 100 * (84 << 10)


async def test_letters_go_when_they_are_old(hand: Hand, client: Client, keys: Keys) -> None:
    await hand.create()
    now = int((await client.call("TIME"))[0])
    for days in (31, 29):
        dead = Dead(stream="tasks", entry="1-1", reason=str(days), time=1.0).encode()
        await client.call("XADD", keys.dead, f"{(now - days * 86_400) * 1000}-0", "m", dead)
    assert [await hand.ledger.age_letters(30) for _ in range(2)] == [1, 0]
    assert await letters(hand) == [("tasks", "29")]
    assert (await hand.ledger.look()).counts["dead_letters_lost"] == 1


async def test_of_a_reason_of_any_length_only_its_beginning_is_told(hand: Hand) -> None:
    await hand.create()
    [_] = await hand.open()
    await hand.dispatch()
    [(entry, task)] = await hand.take()
    await hand.ledger.bury(hand.keys.tasks, TRAINERS, entry, "r" * 100_000, task=task)
    [(_, reason)] = await letters(hand)
    [told] = await hand.events("outcome")
    assert (len(reason), len(told.text or "")) == (1000, 1000)


# trainers


async def test_a_trainer_joins_once_and_says_what_it_likes(hand: Hand) -> None:
    await hand.create()
    assert await hand.announce("ann") == ["heard"]
    assert await hand.announce("ann", 7) == ["heard"]
    [(name, about)] = (await hand.ledger.trainers()).items()
    assert (name, about["pid"], about["owns"]) == ("ann", os.getpid(), [7])
    assert await hand.ledger.owners() == {7: "ann"}
    assert (await hand.ledger.look()).trainers == 1
    assert [event.text for event in await hand.events("trainer")] == ["ann joined"]


async def test_a_trainer_leaves_once(hand: Hand) -> None:
    await hand.create()
    await hand.announce("ann", 7)
    await hand.announce("bob", 8)
    assert await hand.ledger.leave(b"ann") == 0
    assert await hand.ledger.leave(b"ann") is None
    assert await hand.ledger.owners() == {8: "bob"}
    assert list(await hand.ledger.trainers()) == ["bob"]
    assert [e.text for e in await hand.events("trainer")][-1] == "ann left"


async def test_a_trainer_that_said_goodbye_is_struck_off_unless_it_is_back(hand: Hand) -> None:
    await hand.create()
    await hand.goodbye("nobody")  # who never joined
    await hand.announce("ann")
    await hand.goodbye("ann")
    assert await hand.ledger.left() == [b"ann"]
    assert await hand.ledger.silent(5) == []  # which would be a loss
    await hand.announce("ann")
    assert await hand.ledger.left() == []
    assert await hand.ledger.leave(b"ann", silent_s=30) is None
    await hand.goodbye("ann")
    assert await hand.ledger.leave(b"ann", silent_s=30) == 0
    assert await hand.ledger.trainers() == {}
    assert [e.text for e in await hand.events("trainer")] == ["ann joined", "ann left"]


async def test_a_trainer_is_silent_only_after_a_while(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann")
    await hand.announce("bob")
    await client.call("ZINCRBY", keys.alive, -60, "ann")
    assert await hand.ledger.silent(30) == [b"ann"]
    assert await hand.ledger.leave(b"bob", silent_s=30) is None
    await hand.announce("ann")  # it came back in the last moment
    assert await hand.ledger.leave(b"ann", silent_s=30) is None
    await client.call("ZINCRBY", keys.alive, -60, "ann")
    assert await hand.ledger.leave(b"ann", silent_s=30) == 0
    assert [e.text for e in await hand.events("trainer")][-1] == "ann was not heard for 30 s"


async def test_what_waits_for_an_owner_that_left_is_given_up(hand: Hand, client: Client) -> None:
    await hand.create()
    await hand.announce("owner", 3, 4)
    await hand.open(device=3)
    await hand.open(device=4)
    await hand.open(device=5)
    await hand.dispatch()
    await client.call("XADD", hand.keys.tasks_of("owner"), "*", "m", b"junk")
    assert await hand.ledger.leave(b"owner") == 2
    view = await hand.ledger.look()
    assert [trigger.device for trigger in view.open] == [5]
    assert view.reasons("given_up") == {"owner gone": 2}
    assert {event.task for event in await hand.events()}.isdisjoint({view.open[0].task})
    assert not await exists(client, hand.keys.tasks_of("owner"))
    await hand.balanced()


@pytest.mark.parametrize("owned", [True, False], ids=["of an owner", "in the pool"])
async def test_what_was_admitted_is_given_up_by_nobody_though_its_entry_is_still_there(
    hand: Hand, owned: bool
) -> None:
    """A trainer may append to its inbox, and leave the task as if it had not answered."""
    await hand.create()
    if owned:
        await hand.announce("ann", 3)
    [trigger] = await hand.open(device=3)
    await hand.dispatch()
    upload = await hand.trained(trigger)
    assert await hand.admit(upload) == [("admitted", "")]
    if owned:
        assert await hand.ledger.leave(b"ann") == 0
    else:
        await hand.announce("ann", 1)
        assert await hand.ledger.settle_unserved(60_000) == 0
    assert await hand.commit(1, upload) == "done"
    outcomes = (await hand.ledger.look()).outcomes
    assert (outcomes["applied"], outcomes["given_up"]) == (1, 0)
    await hand.balanced()


async def test_junk_on_the_register_hides_nobody_else(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Any trainer's user may write there; coordinators, the scheduler and status read it."""
    await hand.create()
    await hand.announce("ann", 7)
    junk: list[object] = [
        "x", 7, [], {}, {"owns": 7}, {"owns": [b"\xff"]}, {"owns": [], "at": msgpack.Timestamp(1)},
        {"owns": [], "pid": float("nan")},
    ]  # fmt: skip
    for n, data in enumerate((b"", b"\xc1", b"\x91" * 10_000 + b"\x01", *map(msgpack.packb, junk))):
        await client.call("HSET", keys.trainers, f"junk-{n}", data)
    await client.call("HSET", keys.trainers, b"\xff", msgpack.packb({"owns": []}))
    for field in (b"", b"seven", b"\xff", b"7.5", b"-1", b"07", "\u0663".encode(), b"9" * 5000):
        await client.call("HSET", keys.owners, field, "ann")
    await client.call("HSET", keys.owners, 8, b"\xff")
    await client.call("ZADD", keys.alive, 0, b"\xfe", 1, b"\xff")
    assert list(await hand.ledger.trainers()) == ["ann"]
    assert await hand.ledger.owners() == {7: "ann"}
    assert (await hand.ledger.look()).owned == (7, 8)
    assert await hand.ledger.leases(60_000, ["ann"]) == (0, [])
    assert await hand.ledger.settle_unserved(60_000) == 0
    assert await hand.ledger.left() == [b"\xfe"]
    assert await hand.ledger.silent(60) == [b"\xff"]
    for name in (b"ann", b"\xfe", b"\xff"):
        assert await hand.ledger.leave(name, silent_s=60 * (name != b"ann")) == 0
    assert await client.call("ZCARD", keys.alive) == 0
    told = [event.text for event in await hand.events("trainer")]
    assert told[-3:] == ["ann left", "\ufffd left", "\ufffd was not heard for 60 s"]


# the end


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


async def test_a_script_that_fails_says_so(hand: Hand, client: Client, keys: Keys) -> None:
    await client.call("SET", keys.run, "no hash")
    with pytest.raises(BrokerError, match="WRONGTYPE"):
        await hand.ledger.look()


async def test_a_redis_that_forgot_the_scripts_is_told_them_again(
    hand: Hand, client: Client
) -> None:
    await hand.create()
    await client.call("SCRIPT", "FLUSH")
    await hand.admitted()
    assert isinstance((await hand.ledger.run()), Run)
    await client.call("SCRIPT", "FLUSH")
    assert (await hand.ledger.look()).admitted == 1


# waiting for news


async def test_what_a_view_contains_is_no_news(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    before = await hand.ledger.look()
    assert await hand.commit(1, upload) == "done"  # an event and a version: one piece of news
    _, after = await hand.ledger.look_after(before, block_ms=60_000)
    assert (after.head.version, after.told.keys()) == (1, before.told.keys())
    _, then = await hand.ledger.look_after(after, block_ms=50)
    assert then.told == after.told
    assert then.now - after.now >= 0.05


async def test_inboxes_are_counted_only_for_whoever_asks(hand: Hand, client: Client) -> None:
    """There may be thousands, one for each site, and the scheduler looks for every version."""
    await hand.create()
    await hand.ledger.prepare(["north", "south"])
    for site, entries in (("north", 1), ("south", 2)):
        for _ in range(entries):
            await client.call("XADD", hand.keys.inbox(site), "*", "m", "x")

    async def counted() -> int:
        info: bytes = await client.call("INFO", "commandstats")
        return int(info.partition(b"cmdstat_xlen:calls=")[2].split(b",")[0])

    before = await counted()
    view = await hand.ledger.look()
    _, view = await hand.ledger.look_after(view, block_ms=1)
    assert (view.inbox, await counted() - before) == (None, 2 * 3)  # queue, triggers, dead letters
    assert (await hand.ledger.look(inboxes=True)).inbox == 3


async def test_opening_waiting_and_looking_are_one_exchange(hand: Hand, client: Client) -> None:
    await hand.create()
    view = await hand.ledger.look()
    for n in range(2):
        opening = hand.ledger.trigger(hand.scheduler.token, 9, n, [hand.trigger()])
        opened, view = await hand.ledger.look_after(view, block_ms=1, opening=opening)
        assert (opened, len(view.open)) == (1, n + 1)
        await client.call("SCRIPT", "FLUSH")
    fenced = hand.ledger.trigger("1:another", 9, 2, [hand.trigger()])
    await hand.ledger.prepare()
    with pytest.raises(Fenced):
        await hand.ledger.look_after(view, block_ms=1, opening=fenced)


# owners


async def test_a_trainer_owns_what_it_announced_last(hand: Hand) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2, 3)
    await hand.announce("ann", 3, 4)
    assert await hand.ledger.owners() == {3: "ann", 4: "ann"}
    await hand.announce("ann")
    assert await hand.ledger.owners() == {}


async def test_a_device_stays_with_its_first_owner_while_that_lives(hand: Hand) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2)
    for _ in range(3):
        await hand.announce("bob", 2, 3)
    assert await hand.ledger.owners() == {1: "ann", 2: "ann", 3: "bob"}
    refusals = [event for event in await hand.events("trainer") if event.device is not None]
    assert [(event.device, event.text) for event in refusals] == [
        (2, "bob does not get device 2: it is owned by ann")  # told once
    ]
    await hand.ledger.leave(b"ann")
    await hand.announce("bob", 2, 3)
    assert await hand.ledger.owners() == {2: "bob", 3: "bob"}


async def test_who_gives_up_on_a_device_takes_it_from_nobody(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Nor is what it owns, and goes on to own, new to it."""
    await hand.create()
    await hand.announce("ann", 1, 2)
    await hand.announce("bob", 2, 3)
    await client.call("XADD", keys.tasks, "*", "m", Assignment.of(hand.trigger(device=3)).encode())
    await hand.announce("bob", 3)
    assert await hand.ledger.owners() == {1: "ann", 2: "ann", 3: "bob"}
    assert await client.call("XLEN", keys.tasks) == 1


async def test_a_device_of_a_trainer_that_is_not_alive_goes_to_the_next_that_owns_it(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2)
    await client.call("ZREM", keys.alive, "ann")
    await hand.announce("bob", 2)
    assert await hand.ledger.owners() == {1: "ann", 2: "bob"}


async def test_who_owns_a_device_is_not_refused_it_though_the_register_forgot_who_it_is(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann", 1, 2)
    await client.call("HDEL", keys.trainers, "ann")  # as junk there is deleted
    await hand.announce("ann", 1, 2)
    assert await hand.ledger.owners() == {1: "ann", 2: "ann"}
    assert [event.text for event in await hand.events("trainer")] == ["ann joined"]


async def test_devices_that_the_run_does_not_have_cannot_be_owned(hand: Hand) -> None:
    await hand.announce("ann", 9, 10)  # before the run: nobody knows
    await hand.create(devices=10)
    for _ in range(2):
        await hand.announce("bob", 0, 11)
    await hand.announce("ann", 9, 10)
    assert await hand.ledger.owners() == {0: "bob", 9: "ann"}
    [event] = [event for event in await hand.events("trainer") if event.device == 11]
    assert event.text == "bob does not get device 11: the run has 10 devices"


async def test_an_owner_of_one_device_more_takes_up_its_earlier_tasks(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.announce("ann", 1)
    [task] = await hand.open(device=2)
    await hand.dispatch()
    assert await client.call("XLEN", keys.tasks) == 1
    await hand.announce("ann", 1, 2)
    assert await client.call("XLEN", keys.tasks) == 0
    [(_, fields)] = await client.call("XRANGE", keys.tasks_of("ann"), "-", "+")
    assert Assignment.decode(fields[1]).task == task.task


async def test_what_the_pool_holds_is_settled_where_only_owners_are_alive(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    [taken] = await hand.open(device=1)
    await hand.dispatch()
    [(entry, _)] = await hand.take()
    await hand.open(device=2)
    await hand.open(device=3)
    await hand.dispatch()
    assert await hand.ledger.settle_unserved(60_000) == 0  # somebody may come
    await hand.announce("ann", 1, 2)
    await hand.announce("pool")
    assert await hand.ledger.settle_unserved(60_000) == 0  # the pool serves anybody
    assert await client.call("XLEN", keys.tasks) == 2
    await hand.ledger.leave(b"pool")
    assert await hand.ledger.settle_unserved(60_000) == 1
    view = await hand.ledger.look()
    assert view.reasons("given_up") == {"nobody serves this device": 1}
    assert sorted(trigger.device for trigger in view.open) == [1, 2]
    # The one that was taken has its lease; when that ran out, its device's owner has it.
    await client.call("XCLAIM", keys.tasks, TRAINERS, "t", 0, entry.id, "IDLE", 61_000)
    assert await hand.ledger.settle_unserved(60_000) == 0
    assert await client.call("XLEN", keys.tasks) == 0
    assert await client.call("XPENDING", keys.tasks, TRAINERS) == [0, None, None, None]
    rows = await client.call("XRANGE", keys.tasks_of("ann"), "-", "+")
    assert [Assignment.decode(fields[1]).device for _, fields in rows] == [2, 1]
    assert Assignment.decode(rows[1][1][1]).task == taken.task
    await hand.balanced()


async def test_the_pool_serves_what_nobody_owns_while_a_trainer_of_it_is_there(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create(devices=4)

    async def served() -> tuple[int, ...]:
        return (await hand.ledger.look()).served

    assert await served() == (0, 1, 2, 3)  # somebody may come
    await hand.announce("ann", 1, 2)
    assert await served() == (1, 2)
    await hand.announce("bob")
    await hand.announce("cat")
    assert await served() == (0, 1, 2, 3)
    await hand.announce("bob", 3)  # it owns one now
    assert await served() == (0, 1, 2, 3)
    await hand.goodbye("cat")  # and is still on the register
    assert await served() == (1, 2, 3)
    await hand.announce("bob")
    assert await served() == (0, 1, 2, 3)
    await hand.ledger.leave(b"bob")
    assert await served() == (1, 2)
    await hand.ledger.leave(b"cat")
    assert not await client.call("EXISTS", keys.pool)
    await client.call("SADD", keys.pool, "ghost")  # that is not alive
    assert await served() == (1, 2)


async def test_what_is_no_task_stops_nobody_who_looks_for_one(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Trainers may write these streams and the register, and not all that is there is ours."""
    await hand.create()
    await hand.open(device=3)
    await hand.dispatch()
    junk: list[object] = [
        {"task": {"a": 1}, "device": 3}, {"task": "x"}, {"task": "x", "device": "3"}, "x", [],
    ]  # fmt: skip
    for stream in (keys.tasks, keys.tasks_of("ann")):
        for one in (b"", b"\xc1", *map(msgpack.packb, junk)):
            await client.call("XADD", stream, "*", "m", one)
    for said in (b"\xc1", *(msgpack.packb({"owns": one}) for one in ([math.nan], [[1]], "1"))):
        await client.call("HSET", keys.trainers, "ann", said)
        await hand.announce("ann", 1)
    assert await hand.ledger.settle_unserved(60_000) == 1
    await hand.announce("ann", 1, 3)
    assert await hand.ledger.leave(b"ann") == 0
    await client.call("ZADD", keys.alive, 1, "nobody on the register")
    assert await hand.ledger.settle_unserved(60_000) == 0
    assert await client.call("XLEN", keys.tasks) == 7
    await hand.balanced()
