"""The updater makes a run, and publishes it again where Redis lost some of it."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.lease import Lease
from fedstream.core.errors import Fenced, NoRun
from fedstream.core.messages import GiveUp
from fedstream.core.records import Commit, End
from tests.broker.ledger.steps import expires
from tests.support import Hand, layout_of, snapshot


async def test_no_run_before_it_is_created(hand: Hand, keys: Keys) -> None:
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


async def test_emptied_redis_gets_the_counts_and_open_tasks_are_given_up(
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


async def test_redis_behind_the_journal_is_brought_up_to_date(
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
            hand.updater.token,
            hand.run(),
            await hand.publish(3),
            counts=counts,
            journalled={"applied": 3},
            done=done.get,
        )
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


async def test_redis_ahead_of_the_journal_keeps_its_counts(hand: Hand) -> None:
    """The updater died between record and commit: nothing is lost."""
    await hand.create()
    upload = await hand.admitted()
    counts = dict((await hand.ledger.look()).counts) | {"applied": 1}
    await hand.open(2)
    done = {upload.task: End(upload.task, upload.attempt, "applied", version=1)}
    version = await hand.publish(1)
    await hand.ledger.create(
        hand.updater.token,
        hand.run(),
        version,
        counts=counts,
        journalled={"applied": 1},
        done=done.get,
    )
    view = await hand.ledger.look()
    assert (view.issued, view.outcomes["applied"], len(view.open)) == (3, 1, 2)
    assert view.reasons("given_up") == {}
    await hand.balanced()


async def test_ends_lost_by_the_journal_survive_in_redis(hand: Hand) -> None:
    """The model is published again before the queue has made the journal's end again."""
    await hand.create()
    uploads = [await hand.admitted(), await hand.admitted()]
    ends = [End(u.task, u.attempt, "refused", "digest", u.device) for u in uploads]
    for n, upload in enumerate(uploads):
        told = {"refused": n + 1, "refused:digest": n + 1}
        await hand.commit(None, upload, ends=[ends[n]], before=n, journalled=told)
    counts = dict((await hand.ledger.look()).counts)
    await hand.ledger.create(
        hand.updater.token,
        hand.run(),
        await hand.publish(0),
        counts={"issued": 2},
        journalled={"refused": 1, "refused:digest": 1},
        done={uploads[0].task: ends[0]}.get,
    )
    assert (await hand.ledger.look()).counts == counts
    assert await hand.commit(None, ends=[ends[1]], before=1, journalled=told) == "done"
    view = await hand.ledger.look()
    assert (view.counts, view.head.journalled) == (counts, told)
    await hand.balanced()


async def test_end_lost_by_redis_is_reported_with_its_reason(hand: Hand) -> None:
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


async def test_run_is_not_created_without_its_model(hand: Hand) -> None:
    assert await hand.updater.acquire()
    version = await hand.publish(0, write=False)
    reply = await hand.ledger.create(hand.updater.token, hand.run(), version)
    assert reply.what == "unwritten"
    with pytest.raises(NoRun):
        await hand.ledger.run()


async def test_only_the_leader_creates_commits_and_retires(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    stale = hand.updater.token
    assert await Lease(client, keys, "updater", "u", seconds=60).acquire()
    before = await snapshot(client, keys)
    version = await hand.publish(1, write=False)
    nothing = Commit(versions=[version], held=(), mean_staleness=0.0)
    with pytest.raises(Fenced, match="another updater has taken over"):
        await hand.ledger.create(stale, hand.run(), version)
    with pytest.raises(Fenced):
        await hand.ledger.commit(stale, nothing)
    with pytest.raises(Fenced):
        await hand.ledger.retire(stale, ["0.1"])
    with pytest.raises(Fenced):
        await hand.ledger.hand_out(stale, 1, "digest", 16)
    assert await snapshot(client, keys) == before


async def test_token_lost_by_redis_does_not_fence(hand: Hand, client: Client) -> None:
    await hand.create()
    await client.call("FLUSHALL")
    version = await hand.publish(1)
    token = hand.updater.token
    assert (await hand.ledger.create(token, hand.run(), version)).what == "lost"
    assert await hand.ledger.retire(token, ["0.1"]) == "lost"
    assert await hand.ledger.hand_out(token, 1, "digest", 16) == "lost"
    commit = Commit(versions=[version], held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(token, commit)).what == "lost"


async def test_retaking_its_own_lease_does_not_fence(hand: Hand) -> None:
    """Its loops may still show the token that it had a moment ago."""
    await hand.create()
    before = hand.updater.token
    assert await hand.updater.acquire()
    commit = Commit(versions=[await hand.publish(1)], held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(before, commit)).what == "lost"
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"
    before = hand.scheduler.token
    assert await hand.scheduler.acquire()
    assert await hand.ledger.trigger(before, 9, 0, [hand.trigger()]) == 0


async def test_run_lost_by_redis_is_republished(hand: Hand, client: Client) -> None:
    await hand.create()
    await client.call("FLUSHALL")
    assert await hand.updater.acquire(at_least=hand.updater.number)
    version = await hand.publish(41, 1.0)
    reply = await hand.ledger.create(hand.updater.token, hand.run(), version)
    assert reply.what == "created"
    head = await hand.ledger.head()
    assert head
    assert (head.version, head.epoch, head.blob) == (41, 2, "41.2")
