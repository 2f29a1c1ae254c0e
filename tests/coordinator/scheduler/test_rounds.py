"""The scheduler against a real Redis, in rounds: they follow the versions, are asked to close, and
end or begin again when they time out."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.rounds import Rounds
from fedstream.core.messages import CloseRound, RoundEnd, Trigger
from fedstream.core.records import Commit, End
from fedstream.journal import Taken
from fedstream.journal.replay import Replayer
from tests.broker.pipeline import finished, pipeline
from tests.coordinator.waiting import (
    are_open,
    asked,
    has_issued,
    of_version,
)
from tests.support import Clock, Hand, awaits_news, context, counted, running, wait_until


async def test_rounds_follow_versions_and_close_old_tasks(make: Any, run: Hand) -> None:
    async with running(make(Rounds(k=3)), context()):
        first = await are_open(run, 3)
        assert {trigger.version for trigger in first} == {0}
        answered, *late = first
        upload = await run.trained(answered)
        assert await run.admit(upload) == [("admitted", "")]
        assert await run.commit(1, upload) == "done"
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["closed"]
        second = await wait_until(lambda: of_version(run, 1, 3))
        assert {t.task for t in second}.isdisjoint({t.task for t in late})
        assert (await run.ledger.look()).reasons("given_up") == {"round over": 2}
        [(_, end)] = await run.queue()
        assert end == RoundEnd(version=0, why="round over")
        await run.balanced()


@pytest.mark.usefixtures("patient")
async def test_timed_out_round_ends_with_its_arrivals(make: Any, run: Hand, clock: Clock) -> None:
    async with running(make(Rounds(k=3, timeout_s=600.0)), context()):
        first = await are_open(run, 3)
        upload = await run.trained(first[0])
        assert await run.admit(upload) == [("admitted", "")]
        clock.ahead_s = 601.0
        await run.announce("bob")  # an event, which it looks at
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["withdrawn"]
        # The updater is slow: what is in the queue is counted before anything is decided.
        await run.announce("ann")
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert (await run.ledger.look()).issued == 3
        buffered = End(task=upload.task, attempt=upload.attempt, outcome="buffered")
        commit = Commit(held=[upload.device], retained=1, mean_staleness=0.0, ends=[buffered])
        assert (await run.ledger.commit(run.updater.token, commit)).what == "done"
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["closed"]
        [(_, queued), (_, end)] = await run.queue()
        assert (queued, end) == (upload, RoundEnd(version=0, why="round over"))
        await run.announce("cat")
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert (await run.ledger.look()).issued == 3, "nor until the end of the round is seen"
        entries = [id_ for id_, _ in await run.queue()]
        assert await run.commit(1, entries=entries, updates=[upload.blob]) == "done"
        # A version wakes it, though no task ended with it.
        second = await wait_until(lambda: of_version(run, 1, 3))
        assert all(t.deadline and t.deadline > time.time() + 601.0 for t in second)


@pytest.mark.usefixtures("patient")
async def test_round_with_too_few_answers_keeps_them_and_asks_others(
    make: Any, run: Hand, clock: Clock
) -> None:
    watched = context()
    async with running(make(Rounds(k=3, min_answers=2, timeout_s=600.0)), watched):
        first, *late = await are_open(run, 3)
        await have_answered(run, first)
        clock.ahead_s = 601.0
        await run.announce("bob")  # an event, which it looks at
        await wait_until(lambda: asked(run))
        assert await run.dispatch() == ["withdrawn"]
        await has_issued(run, 5)
        again = await are_open(run, 2)
        assert first.device not in {t.device for t in again}
        assert {t.task for t in again}.isdisjoint({t.task for t in late})
        assert all(t.version == 0 and t.deadline and t.deadline > clock.time() for t in again)
        assert await run.queue() == [], "no end of the round"
        await wait_until(lambda: counted(watched, "fedstream_rounds_again_total") == 1)
        await run.balanced()


@pytest.mark.usefixtures("patient")
async def test_round_with_too_few_answers_may_be_dropped(
    make: Any, run: Hand, clock: Clock
) -> None:
    """And another one begins from the same version; each as often as it takes."""
    policy = Rounds(k=3, min_answers=2, timeout_s=600.0, too_few="drop")
    async with running(make(policy), context()):
        for n in range(1, 3):
            first, *_ = await wait_until(lambda: of_version(run, 0, 3))
            await have_answered(run, first)
            clock.ahead_s += 601.0
            await run.announce(f"bob-{n}")  # an event, which it looks at
            await wait_until(lambda: asked_to_close(run, 1))
            assert {"closed"} <= {*await run.dispatch()} <= {"closed", "withdrawn"}
            [(entry, end)] = await run.queue()
            assert end == RoundEnd(version=0, why="round over", drops=(first.device,))
            done = Commit(held=[], mean_staleness=0.0, entries=[entry])
            assert (await run.ledger.commit(run.updater.token, done)).what == "done"
            await run.announce(f"ann-{n}")
            await has_issued(run, 3 * n + 3)
        assert all(
            task.deadline and task.deadline > clock.time() for task in await are_open(run, 3)
        )
        await run.balanced()


@pytest.mark.usefixtures("patient")
async def test_round_after_a_dropped_one_ends_without_delay(
    make: Any, run: Hand, clock: Clock
) -> None:
    """Though it has the same version, and no task that is to be given up."""
    policy = Rounds(k=3, min_answers=2, timeout_s=600.0, too_few="drop")
    async with running(make(policy), context()):
        first, *_ = await are_open(run, 3)
        await have_answered(run, first)
        clock.ahead_s = 601.0
        await run.announce("bob")  # an event, which it looks at
        await wait_until(lambda: asked_to_close(run, 1))
        await run.dispatch()
        done = Commit(
            held=[], mean_staleness=0.0, entries=[entry for entry, _ in await run.queue()]
        )
        assert (await run.ledger.commit(run.updater.token, done)).what == "done"
        await run.client.call("HSET", run.keys.run, "devices", 2)  # whose answers are enough
        await run.announce("ann")
        await has_issued(run, 5)
        await have_answered(run, *await are_open(run, 2))
        await wait_until(lambda: asked_to_close(run, 1))


async def have_answered(hand: Hand, *tasks: Trigger) -> None:
    """The updater has taken the answers to these tasks, and holds no other."""
    uploads = [await hand.trained(task) for task in tasks]
    assert await hand.admit(*uploads) == [("admitted", "")] * len(tasks)
    ends = [
        End(task=one.task, attempt=one.attempt, device=one.device, outcome="buffered")
        for one in uploads
    ]
    held = Commit(
        held=[one.device for one in uploads],
        mean_staleness=0.0,
        ends=ends,
        entries=[entry for entry, _ in await hand.queue()],
        updates=[one.blob for one in uploads],
    )
    assert (await hand.ledger.commit(hand.updater.token, held)).what == "done"


async def test_closing_a_round_is_requested_once(make: Any, run: Hand, client: Client) -> None:
    await one_is_held(run)
    async with running(make(Rounds(k=2, timeout_s=0.1)), context()):
        await wait_until(lambda: asked_to_close(run, 1))
        for _ in range(3):  # events, at which it looks again
            await run.announce("ann")
            await run.ledger.leave(b"ann")
        await wait_until(lambda: awaits_news(run.client, "scheduler-0"))
        assert await asked_to_close(run, 1)


async def one_is_held(hand: Hand) -> None:
    """A device has answered: the round can end with that."""
    head = Commit(held=[0], mean_staleness=0.0)
    assert (await hand.ledger.commit(hand.updater.token, head)).what == "done"


async def asked_to_close(hand: Hand, n: int) -> bool:
    rows = await hand.client.call("XRANGE", hand.keys.triggers, "-", "+")
    return sum(CloseRound.kind.encode() in row[1][1] for row in rows) == n


async def test_lost_round_end_is_requested_again(
    make: Any, run: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.coordinator.scheduler._ASK_AGAIN_S", 0.5)
    await one_is_held(run)
    async with running(make(Rounds(k=2, timeout_s=0.1)), context()):
        await wait_until(lambda: asked_to_close(run, 1))
        await client.call("DEL", run.keys.triggers)
        await wait_until(lambda: asked_to_close(run, 1))
        await run.dispatch()
        assert [type(message) for _, message in await run.queue()] == [RoundEnd]


# rounds through every service

BATCH = 2


async def test_round_uses_only_its_own_answers(
    client: Client, redis: RedisSettings, keys: Keys, tmp_path: Path
) -> None:
    """More devices are asked than fill a version: what the others train comes too late."""
    sets = (
        "strategy.name=afa-cd",
        f"strategy.buffer_size={BATCH}",
        "run.versions=8",
        "scheduler.policy.kind=rounds",
        "scheduler.policy.k=4",
    )
    async with pipeline(keys, lambda _role: redis, tmp_path, *sets) as services:
        for name in ("ann", "bob", "cat", "dan"):
            await services.start("trainer", name)
        view = await finished(client, keys)
        assert view.run.max_staleness == 0
    late = view.reasons("refused").get("too stale", 0)
    late += view.reasons("given_up").get("round over", 0)
    assert late > 0
    assert view.reasons("refused").keys() <= {"too stale"}
    with Replayer(tmp_path / "journal") as replayer:
        records = [moment.message for moment in replayer]
    used = [r for r in records if isinstance(r, Taken) and r.outcome in ("applied", "buffered")]
    assert len(used) == 8 * BATCH
    assert {record.staleness for record in used} == {0}
