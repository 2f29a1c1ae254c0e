"""The updater publishes versions and ends tasks, all at once or not at all."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.link import Started
from fedstream.broker.streams import Look
from fedstream.core.messages import Event, Goal, Version
from fedstream.core.records import Best, Commit
from tests.broker.ledger.steps import exists, expires
from tests.support import Hand, model_of, snapshot


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


@pytest.mark.parametrize(("number", "found"), [(2, 0), (7, 0), (0, 0)])
async def test_version_must_follow_the_head(
    hand: Hand, client: Client, keys: Keys, number: int, found: int
) -> None:
    await hand.create()
    version = (await hand.publish(number)).model_copy(update={"digest": "other"})
    before = await snapshot(client, keys)
    commit = Commit(versions=[version], held=(), mean_staleness=0.0)
    done = await hand.ledger.commit(hand.updater.token, commit)
    assert done.what == f"behind:{found}"
    assert await snapshot(client, keys) == before


async def test_late_duplicate_commit_changes_nothing(
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


async def several(hand: Hand, *numbers: int, write: bool = True, **more: Any) -> str:
    """The updater commits these versions together. Only the last one's model is written."""
    versions = [
        await hand.publish(number, float(number), write=write and number == numbers[-1])
        for number in numbers
    ]
    commit = Commit(versions=versions, held=(), mean_staleness=0.0, **more)
    return (await hand.ledger.commit(hand.updater.token, commit)).what


async def test_several_versions_are_published_together(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """All are told of and known, but only the last one's model can still be asked for."""
    await hand.create()
    assert await several(hand, 1, 2, 3) == "done"
    published = [version.version for version in await hand.published()]
    assert (published, await hand.version()) == ([0, 1, 2, 3], 3)
    for version in await hand.published():
        assert await hand.ledger.digest(version.version) == version.digest
    last = (await hand.published())[-1]
    assert await client.call("PTTL", keys.model(last.blob)) == -1
    await hand.model(last)  # checks the digest
    kept = await hand.ledger.kept()
    assert list(kept.values()) == [0, 3]


async def test_versions_may_be_repeated_with_later_ones(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """The reply to the first commit was lost; meanwhile another version was made."""
    await hand.create()
    assert await several(hand, 1, 2) == "done"
    before = await snapshot(client, keys)
    assert await several(hand, 1, 2, write=False) == "done"
    assert await snapshot(client, keys) == before
    assert await several(hand, 1, 2, 3) == "done"
    versions = await hand.published()
    assert [version.version for version in versions] == [0, 1, 2, 3]
    # The second was the newest until now: somebody may be reading it.
    assert list((await hand.ledger.kept()).values()) == [0, 2, 3]
    for version in (versions[0], *versions[2:]):
        assert await client.call("PTTL", keys.model(version.blob)) == -1


async def test_model_sent_again_ahead_of_a_repetition_does_not_expire(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    assert await several(hand, 1, 2) == "done"
    assert await several(hand, 1, 2) == "done"
    assert await client.call("PTTL", keys.model((await hand.published())[-1].blob)) == -1


async def test_version_deleted_meanwhile_is_not_kept_when_repeated(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """Or nobody would ever delete it: it is not among the kept ones any more."""
    await hand.create()
    assert await several(hand, 1, 2) == "done"
    last = (await hand.published())[-1]
    assert await hand.ledger.retire(hand.updater.token, [last.blob]) == "done"
    assert await several(hand, 1, 2) == "done"
    assert 0 < await client.call("PTTL", keys.model(last.blob)) <= 60_000
    assert last.blob not in await hand.ledger.kept()


async def test_best_version_has_the_first_of_the_best_values(
    hand: Hand, client: Client, keys: Keys
) -> None:
    """A measurement of another metric begins anew; a version without its model can be the best."""
    await hand.create()

    async def told(version: int, value: float, goal: Goal = "max", metric: str = "f1") -> Any:
        event = Event(what="evaluation", service="evaluator", time=1.0, version=version)
        found = Best(metric, value, version, f"digest {version}", f"{version}.1")
        await hand.ledger.tell(event, found, goal)
        best = await hand.ledger.best()
        assert (await hand.ledger.look()).best == best
        return best and (best.metric, best.value, best.version, best.blob)

    assert await hand.ledger.best() is None
    assert await hand.ledger.pin("0.1")
    assert not await hand.ledger.pin("1.1")
    assert await hand.ledger.best() is None
    assert await told(0, 0.5) == ("f1", 0.5, 0, "0.1")
    assert await client.call("HGET", keys.best, "pinned") is None
    await hand.commit(1)
    for version, value in ((1, 0.5), (1, 0.4999), (1, -math.inf)):
        assert await told(version, value) == ("f1", 0.5, 0, "0.1")
    assert await told(1, 0.1 + 0.2 + 0.3) == ("f1", 0.1 + 0.2 + 0.3, 1, "1.1")
    assert await told(0, 0.7, "min", "loss") == ("loss", 0.7, 0, "0.1")
    assert await told(1, 0.7, "min", "loss") == ("loss", 0.7, 0, "0.1")
    assert await told(1, -1e-30, "min", "loss") == ("loss", -1e-30, 1, "1.1")
    assert await told(2, -1.0, "min", "loss") == ("loss", -1.0, 2, None)
    assert len(await hand.events("evaluation")) == 9
    assert await hand.ledger.given(2) == "digest 2", "though no version 2 was published"


@pytest.mark.parametrize(("numbers", "says"), [((2, 3), "behind:0"), ((5, 6), "behind:0")])
async def test_versions_must_follow_the_head(
    hand: Hand, numbers: tuple[int, ...], says: str
) -> None:
    await hand.create()
    assert await several(hand, *numbers) == says
    assert await hand.version() == 0


async def test_versions_on_another_than_the_head_are_not_published(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    assert await several(hand, 1) == "done"
    other = await hand.publish(1, 7.0, write=False)
    following = await hand.publish(2, 8.0)
    before = await snapshot(client, keys)
    commit = Commit(versions=[other, following], held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "behind:1"
    assert await snapshot(client, keys) == before


async def test_no_version_is_published_without_the_last_ones_model(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    await hand.publish(1)
    before = await snapshot(client, keys)
    assert await several(hand, 1, 2, 3, write=False) == "unwritten"
    assert await snapshot(client, keys) == before


# a look behind the commit


def look_at(hand: Hand, seconds: float, begun: list[Started]) -> Look:
    block = ("BLOCK", round(seconds * 1000)) if seconds else ()
    command = ("XREAD", *block, "STREAMS", hand.keys.queue, "0")
    return Look(command, seconds, begun.append)


async def test_commit_is_known_while_the_look_behind_it_waits(hand: Hand) -> None:
    await hand.create()
    begun: list[Started] = []
    commit = Commit(versions=[await hand.publish(1)], held=(), mean_staleness=0.0)
    done = await hand.ledger.commit(hand.updater.token, commit, look=look_at(hand, 60, begun))
    assert (done.what, await hand.version(), await hand.queue()) == ("done", 1, [])
    await hand.admitted()
    [looking] = begun
    [[_, [entry]]] = await looking.last()
    assert entry[0].decode() == (await hand.queue())[0][0]


async def test_commit_with_a_look_loads_its_script(hand: Hand, client: Client) -> None:
    """A Redis that was restarted has lost it; the model ahead of it is there then."""
    await hand.create()
    begun: list[Started] = []
    version = await hand.publish(1, write=False)
    ahead = await blobs.prepare(
        client, hand.keys.model(version.blob), model_of(hand.layout), expire_s=60
    )
    await client.call("SCRIPT", "FLUSH")
    commit = Commit(versions=[version], held=(), mean_staleness=0.0)
    done = await hand.ledger.commit(
        hand.updater.token, commit, ahead=ahead, look=look_at(hand, 0, begun)
    )
    assert (done.what, await hand.version(), begun) == ("done", 1, [])


async def test_nothing_is_committed_to_a_run_that_redis_lost(hand: Hand, client: Client) -> None:
    await hand.create()
    upload = await hand.admitted()
    await client.call("FLUSHALL")
    # The lease is taken again before the run is published again.
    assert await hand.updater.acquire(at_least=hand.updater.number)
    assert await hand.commit(None, upload) == "behind:-1"
    assert await hand.commit(1, upload) == "behind:-1"
    assert await hand.ledger.head() is None


async def test_the_last_version_finishes_the_run(hand: Hand) -> None:
    await hand.create()
    upload = await hand.admitted()
    assert await hand.commit(1, finish="version 1 reached") == "done"
    run = await hand.ledger.run()
    assert (run.state, run.why) == ("finished", "version 1 reached")
    assert run.finished is not None
    assert await hand.commit(None, upload) == "done"  # tasks still end
    await hand.balanced()


async def test_run_is_finished_from_outside_once(hand: Hand) -> None:
    await hand.create()
    assert await hand.ledger.finish("accuracy 0.9 reached")
    assert not await hand.ledger.finish("again")
    run = await hand.ledger.run()
    assert (run.state, run.why) == ("finished", "accuracy 0.9 reached")
    [event] = await hand.events("run")
    assert event.text == "finished: accuracy 0.9 reached"
    # What was journalled before the updater knew is published, and it learns of the end.
    done = await hand.ledger.commit(
        hand.updater.token, Commit(versions=[await hand.publish(1)], held=(), mean_staleness=0.0)
    )
    assert (done.what, done.finished) == ("done", True)
    assert await hand.ledger.run() == run


async def test_outdated_models_are_deleted_with_the_commit(
    hand: Hand, client: Client, keys: Keys
) -> None:
    await hand.create()
    assert await hand.commit(1, retired=["0.1"]) == "done"
    assert await hand.ledger.kept() == {"1.1": 1}
    assert not await exists(client, keys.model("0.1"))
    assert await hand.ledger.digest(0) is not None  # its descendants are still admitted


async def test_commit_of_very_many_updates_is_complete(hand: Hand) -> None:
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
