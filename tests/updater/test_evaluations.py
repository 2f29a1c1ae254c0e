"""An ended evaluation on the devices has one record, whatever crashes and whatever is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.streams import Look
from fedstream.core.messages import DevicesEvaluated, task_id
from fedstream.journal import EvaluationEnded, Taken, segments
from fedstream.journal.rebuild import recovered
from fedstream.journal.records import EVALUATIONS
from fedstream.journal.replay import Replayer
from fedstream.updater.commit import Commits
from fedstream.updater.state import RunState
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import records


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


def ended(number: int, version: int = 0, **metrics: float) -> DevicesEvaluated:
    """The control entry of the evaluation with this number."""
    measured = 2 if metrics else 1
    return DevicesEvaluated(
        evaluation=task_id(number, bytes(10)),
        version=version,
        base="digest",
        devices=3,
        outcomes={"measured": measured, "no answer in time": 3 - measured},
        sums={"accuracy": (1.0, 2.0)} if metrics else {},
        metrics=metrics,
    )


async def queued(hand: Hand, *some: DevicesEvaluated) -> None:
    """The evaluator ends evaluations, and the updater has dealt with them."""
    for one in some:
        await hand.client.call("XADD", hand.keys.queue, "*", "m", one.encode())
    await wait_until(hand.queue_is_empty)


async def told(hand: Hand) -> list[tuple[int | None, dict[str, float] | None, str | None]]:
    events = await hand.events("devices_evaluated")
    return [(one.version, one.metrics, one.text) for one in events]


def evaluations(folder: Path) -> list[str]:
    """The evaluations in the journal."""
    return [one.evaluation for one in records(folder) if isinstance(one, EvaluationEnded)]


async def test_metrics_are_journalled_and_then_shown(make: Any, hand: Hand, folder: Path) -> None:
    """In the order of the queue, and beside the updates; the model stays as it is."""
    async with running(make(), context()):
        await hand.join()
        await hand.admitted(4.0)
        await queued(hand, ended(1, devices_accuracy=0.5), ended(2))
        await hand.admitted(4.0)
        await hand.reaches(2)
        await wait_until(hand.queue_is_empty)
    assert await told(hand) == [
        (0, {"devices_accuracy": 0.5}, "2 of 3 devices measured (1 no answer in time)"),
        (0, {}, "1 of 3 devices measured (2 no answer in time): too few for metrics"),
    ]
    kinds = [type(one) for one in records(folder)]
    assert kinds == [Taken, EvaluationEnded, EvaluationEnded, Taken]
    first = records(folder)[1]
    assert isinstance(first, EvaluationEnded)
    assert (first.measured, first.version, first.sums) == (0, 1, {"accuracy": (1.0, 2.0)})
    with Replayer(folder) as replayer:
        assert [moment.version for moment in replayer] == [1, 1, 1, 2]


async def test_an_evaluation_that_ends_twice_has_one_record(
    make: Any, hand: Hand, folder: Path
) -> None:
    """In a Redis that fell back it is open again; a later updater knows it from the journal."""
    async with running(make(), context()):
        await hand.join()
        await queued(hand, ended(2, devices_loss=1.0), ended(2, devices_loss=1.0), ended(1))
    async with running(make(), context()):
        await queued(hand, ended(2, devices_loss=1.0))
        await queued(hand, ended(3, devices_loss=0.5))
    assert evaluations(folder) == [task_id(2, bytes(10)), task_id(3, bytes(10))]


@pytest.mark.parametrize("moment", ["journalled", "committed"])
async def test_crash_neither_loses_nor_doubles_an_evaluation(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The updater dies between the record and the commit, or after it: observers are told."""
    real = Commits.settle

    async def dies(commits: Commits, state: RunState, look: Look | None = None) -> Any:
        if moment == "committed":
            await real(commits, state, look)
        raise RuntimeError("it dies")

    async with running(make(), context(), may_fail=True) as updater:
        await hand.join()
        monkeypatch.setattr(Commits, "settle", dies)
        message = ended(1, devices_loss=1.0).encode()
        await hand.client.call("XADD", hand.keys.queue, "*", "m", message)
        await wait_until(updater.done)
    monkeypatch.setattr(Commits, "settle", real)
    async with running(make(lease_s=0.4), context()):
        await wait_until(hand.queue_is_empty)
        await wait_until(lambda: hand.events("devices_evaluated"))
    assert evaluations(folder) == [task_id(1, bytes(10))]
    assert {one[0] for one in await told(hand)} == {0}


async def test_emptied_redis_keeps_the_outcomes_of_devices(
    make: Any, hand: Hand, client: Client
) -> None:
    """As they were when the updater last looked."""
    async with running(make(lease_s=0.4), context()):
        await hand.join()
        await client.call("HSET", hand.keys.counts, "evaluations", 3, "evaluated:measured", 3)
        await queued(hand, ended(1, devices_loss=1.0))
        await hand.admitted(4.0)
        await hand.reaches(1)
        await client.call("FLUSHALL")
        await hand.join()
        counts = (await hand.ledger.tally()).counts
        assert (counts["evaluations"], counts["evaluated:measured"]) == (3, 3)


async def test_only_a_journal_with_evaluations_needs_to_know_of_them(
    make: Any, hand: Hand, folder: Path
) -> None:
    async with running(make(), context()):
        await hand.join()
        await hand.admitted(4.0)
        await hand.reaches(1)
        await queued(hand, ended(1, devices_loss=1.0))
    chain = segments(folder)
    assert [segment.head.needs for segment in chain] == [(), (EVALUATIONS,)]
    assert recovered(chain[-1]).evaluation == task_id(1, bytes(10))
    for segment in chain:
        segment.close()
