"""Redis falls back and no version goes with it: its counts are the journal's again nevertheless."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import pytest

from fedstream.broker.cleanup import ended_unlike
from fedstream.broker.client import Client, RedisSettings
from fedstream.core.messages import CloseRound, Event, Trigger, Upload, Withdraw
from fedstream.core.reasons import LOST_WITH_REDIS
from fedstream.core.records import Best, End, Head
from fedstream.strategies import FedAvgSettings
from fedstream.updater.loop import Loop
from tests.support import Hand, Proxy, context, running, wait_until
from tests.updater.breaking import COMMIT, CREATE, Disk, makes_more
from tests.updater.journalled import backed_up, go_back, held, reasons, records

ROUNDS = FedAvgSettings(clients_per_round=9)


def idle_after(monkeypatch: pytest.MonkeyPatch, milliseconds: int) -> None:
    """The updater is idle when the queue was empty for so long."""
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", milliseconds)


Why = Literal["timed out", "deadline passed"]


async def given_up(hand: Hand, trigger: Trigger, why: Why = "timed out") -> None:
    """By a coordinator: for it the task is open."""
    await hand.ledger.ask(Withdraw(tasks=(trigger.task,), why=why))
    assert (await hand.dispatch())[-1] == "withdrawn"


async def ready(hand: Hand) -> tuple[Trigger, Upload]:
    """A task whose answer is not said yet."""
    [trigger] = await hand.open()
    return trigger, await hand.trained(trigger, 4.0)


async def nonzero(hand: Hand) -> dict[str, int]:
    """The run's counts but for those that are nothing."""
    return {name: n for name, n in (await hand.ledger.look()).counts.items() if n}


async def buffered_and_given_up(
    make: Any, hand: Hand, client: Client, *, restarts: int = 0
) -> Trigger:
    """Redis falls back behind an update that is buffered, and a coordinator gives its task up."""
    async with running(make(ROUNDS), context()):
        await hand.join()
        trigger, upload = await ready(hand)
        backup = await backed_up(client)
        assert await hand.admit(upload) == [("admitted", "")]
        await wait_until(lambda: held(hand, 1))
    for _ in range(restarts):  # each begins a segment
        async with running(make(ROUNDS), context()):
            await wait_until(hand.queue_is_empty)
        assert len(await hand.published()) == 1  # Redis had forgotten nothing
    await go_back(client, backup)
    await given_up(hand, trigger)
    assert await nonzero(hand) == {"issued": 1, "given_up": 1, "given_up:timed out": 1}
    return trigger


@pytest.mark.parametrize("restarts", [0, 2])
async def test_successor_notices_a_fallback_within_a_version(
    make: Any, hand: Hand, client: Client, restarts: int
) -> None:
    trigger = await buffered_and_given_up(make, hand, client, restarts=restarts)
    async with running(make(ROUNDS), context()):
        await wait_until(lambda: held(hand, 1))
        assert await nonzero(hand) == {"issued": 1, "buffered": 1}
        assert await hand.ledger.ends([trigger.task]) == ["buffered"]


@pytest.mark.parametrize("idle_ms", [20, 3_600_000])  # by a look at Redis, or by the next commit
async def test_running_updater_notices_a_fallback_within_a_version(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch, idle_ms: int
) -> None:
    idle_after(monkeypatch, idle_ms)
    async with running(make(ROUNDS), context()):
        await hand.join()
        trigger, upload = await ready(hand)
        backup = await backed_up(client)
        for _ in range(2):
            await hand.admit(upload)
            await wait_until(lambda: held(hand, 1))
            await go_back(client, backup)
            await given_up(hand, trigger)
            if idle_ms > 20:
                await hand.ledger.ask(CloseRound(version=5, tasks=(), why="its entry is new"))
                assert await hand.dispatch() == ["closed"]
            await wait_until(lambda: held(hand, 1))
            assert await nonzero(hand) == {"issued": 1, "buffered": 1}
            await wait_until(hand.queue_is_empty)
            await go_back(client, backup)  # where it counts as what it is, and as nothing else
    async with running(make(ROUNDS), context()):
        await wait_until(lambda: held(hand, 1))
        assert await nonzero(hand) == {"issued": 1, "buffered": 1}


async def test_decided_tasks_do_not_count_as_lost(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its record comes, though Redis was emptied before."""
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    updater = make(lease_s=0.4)
    async with running(updater, context()):
        await makes_more(hand, 1.0)
        disk.full = True
        await hand.admitted(2.0)
        await wait_until(lambda: updater._loop.unwritten)
        await client.call("FLUSHALL")
        await wait_until(lambda: updater._lease.number > 1)
        disk.full = False
        await hand.reaches(2)
        assert await nonzero(hand) == {"issued": 2, "applied": 2}


async def test_newer_counts_of_a_fallen_back_redis_win(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_after(monkeypatch, 20)
    async with running(make(lease_s=0.4), context()):
        await hand.join()
        trigger, _ = await ready(hand)
        backup = await backed_up(client)
        await given_up(hand, trigger)
        await hand.admitted(1.0)
        await hand.reaches(1)
        await go_back(client, backup)
        await hand.reaches(1)
        assert await nonzero(hand) == {"issued": 2, "applied": 1}
        await client.call("FLUSHALL")
        await wait_until(lambda: reasons(hand, "given_up", {LOST_WITH_REDIS: 1}))
        assert (await hand.ledger.look()).issued == 2


async def test_fallen_back_redis_keeps_the_best_version_that_it_knows(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an emptied one the best since then."""
    idle_after(monkeypatch, 20)

    async def best(value: float, expected: float) -> Head:
        head = await hand.ledger.head()
        assert head is not None
        assert await hand.ledger.pin(head.blob)
        event = Event(what="evaluation", service="evaluator", time=1.0, version=head.version)
        found = Best("accuracy", value, head.version, head.digest, head.blob)
        await hand.ledger.tell(event, found)
        known = await hand.ledger.best()
        assert known is not None
        assert known.value == expected
        return head

    async with running(make(lease_s=0.4, keep_versions=2), context()):
        await hand.join()
        await makes_more(hand, 1.0)
        first = await best(0.5, 0.5)
        backup = await backed_up(client)
        await makes_more(hand, 1.0, 1.0)
        await best(0.9, 0.9)
        await go_back(client, backup)
        await hand.reaches(3)
        third = await best(0.4, 0.5)
        await makes_more(hand, 1.0, 1.0)
        kept = await hand.ledger.kept()
        assert list(kept.values()) == [1, 4, 5]
        assert (first.blob in kept, third.blob in kept) == (True, False)
        await client.call("FLUSHALL")
        await hand.reaches(5)
        assert await hand.ledger.best() is None
        await best(0.1, 0.1)


# one step


async def test_commit_detects_forgotten_ends(hand: Hand, client: Client) -> None:
    await hand.create()
    first, second = await hand.admitted(), await hand.admitted()
    backup = await backed_up(client)
    ends = [End(one.task, one.attempt, "buffered") for one in (first, second)]
    assert await hand.commit(None, ends=ends[:1], journalled={"buffered": 1}) == "done"
    await go_back(client, backup)
    behind = await hand.commit(None, ends=ends[1:], journalled={"buffered": 2}, before=1)
    assert behind == "behind:0"
    assert (await hand.ledger.look()).outcomes["buffered"] == 0
    for n in (1, 2, 1):  # the first once more: its request came twice, and late
        told = {"buffered": n}
        assert await hand.commit(None, ends=[ends[n - 1]], journalled=told, before=n - 1) == "done"
        view = await hand.ledger.look()
        assert view.head.journalled == {"buffered": view.outcomes["buffered"]}
    assert view.outcomes["buffered"] == 2
    await hand.balanced()


async def test_forgotten_task_is_counted_once_with_its_end(hand: Hand, client: Client) -> None:
    """It was issued behind the moment to which Redis fell back."""
    await hand.create()
    backup = await backed_up(client)
    upload = await hand.admitted()
    await go_back(client, backup)
    end = End(upload.task, upload.attempt, "refused", "digest")
    told = {"refused": 1, "refused:digest": 1}
    for _ in range(2):  # the second time its reply was lost
        assert await hand.commit(None, ends=[end], journalled=told) == "done"
        assert await nonzero(hand) == {"issued": 1, **told}
    await client.call("DEL", hand.keys.ended)  # where the newest 20,000 are remembered
    assert await hand.commit(None, ends=[end], journalled=told) == "done"
    assert await nonzero(hand) == {"issued": 1, **told}
    await hand.balanced()


async def again(hand: Hand, counts: dict[str, int], journalled: dict[str, int]) -> None:
    """The updater publishes its newest version again."""
    made = await hand.ledger.create(
        hand.updater.token,
        hand.run(),
        await hand.publish(0),
        counts=counts,
        journalled=journalled,
        done=lambda _: None,
    )
    assert made.what == "created"
    assert made.counts == (await hand.ledger.look()).counts
    await hand.balanced()


async def test_ends_from_two_histories_are_not_added_up(hand: Hand, client: Client) -> None:
    await hand.create()
    [one, other] = await hand.open(2)
    backup = await backed_up(client)
    await given_up(hand, one, "timed out")
    await given_up(hand, other, "timed out")
    counts = await nonzero(hand)
    await go_back(client, backup)
    await given_up(hand, one, "deadline passed")
    for _ in range(2):  # the second time its reply was lost
        await again(hand, counts, {})
        assert await nonzero(hand) == {"issued": 2, "given_up": 1, "given_up:deadline passed": 1}


async def test_recovered_task_is_not_counted_as_lost(hand: Hand, client: Client) -> None:
    """An old backup is played back after Redis was emptied."""
    await hand.create()
    await hand.open(2)
    backup = await backed_up(client)
    [trigger] = await hand.open()
    await given_up(hand, trigger)
    counts = await nonzero(hand)
    await client.call("FLUSHALL")
    assert await hand.updater.acquire(at_least=1)
    await again(hand, counts, {})
    told = {"given_up": 3, "given_up:timed out": 1, f"given_up:{LOST_WITH_REDIS}": 2}
    assert await nonzero(hand) == {"issued": 3, **told}
    lost = await nonzero(hand)
    await go_back(client, backup)
    hand.updater.number = 1
    await again(hand, lost, {})
    assert len((await hand.ledger.look()).open) == 2
    assert await nonzero(hand) == {"issued": 3, "given_up": 1, f"given_up:{LOST_WITH_REDIS}": 1}


# publishing again


async def test_lost_reply_to_publishing_several_versions_is_harmless(
    make: Any,
    hand: Hand,
    client: Client,
    redis: RedisSettings,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Proxy(redis) as proxy:
        updater = make(redis=proxy.settings)
        read_new, together = updater._intake.read, 1

        async def at_once(block_ms: int) -> bool:
            return len(await hand.queue()) == together and bool(await read_new(block_ms))

        monkeypatch.setattr(updater._intake, "read", at_once)
        monkeypatch.setattr(Loop, "_look", lambda self: None)
        async with running(updater, context()):
            await hand.join()
            backup = await backed_up(client)
            await makes_more(hand, 1.0)
            await wait_until(hand.queue_is_empty)
            together, proxy.refuse = 2, lambda data: COMMIT in data
            await hand.admitted(1.0)
            await hand.admitted(1.0)
            await wait_until(lambda: len(updater._loop.commits.pending) == 2)
            await go_back(client, backup)
            together, proxy.refuse, proxy.cut_reply_to = 1, None, lambda data: CREATE in data
            await hand.reaches(3)
            await makes_more(hand, 1.0)
        assert proxy.cut_replies == 1
    assert [record.version for record in records(folder)] == [1, 2, 3, 4]
    assert await nonzero(hand) == {"issued": 4, "applied": 4}


async def test_redis_may_fall_back_again_during_a_repair(
    make: Any, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its look at what is open and the script."""
    backups: list[dict[bytes, Any]] = []

    async def overtaken(*about: Any) -> list[End]:
        found = await ended_unlike(*about)
        if backups:
            assert found == []  # all is as it should be, there
            await go_back(client, backups.pop())
        return found

    monkeypatch.setattr("fedstream.broker.ledger.updater.ended_unlike", overtaken)
    idle_after(monkeypatch, 20)
    async with running(make(ROUNDS), context()):
        await hand.join()
        _, upload = await ready(hand)
        backup = await backed_up(client)
        await hand.admit(upload)
        await wait_until(lambda: held(hand, 1))
        await wait_until(hand.queue_is_empty)
        backups.append(backup)
        head = await hand.ledger.head()
        assert head
        await client.call("DEL", hand.keys.model(head.blob))  # so that there is something to repair
        await wait_until(lambda: not backups)
        await wait_until(lambda: held(hand, 1))
    assert await nonzero(hand) == {"issued": 1, "buffered": 1}
    assert (await hand.ledger.look()).open == ()
    assert await client.call("HGET", hand.keys.tokens, "look") is None
