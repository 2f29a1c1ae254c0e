"""Control entries that scale the rule's step: obeyed once, journalled, and never forgotten."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstream.broker.client import Client
from fedstream.broker.streams import Look
from fedstream.core.messages import StepProposed
from fedstream.core.records import StepSize
from fedstream.journal import StepScaled, Taken, segments
from fedstream.journal.records import STEP_SCALES
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAsyncSettings
from fedstream.strategies.adapt import Adapt
from fedstream.strategies.staleness import Constant
from fedstream.updater.commit import Commits
from fedstream.updater.state import RunState
from tests.support import Hand, context, running, wait_until
from tests.updater.journalled import HALF, backed_up, go_back, records

ADAPTS = FedAsyncSettings(alpha=0.5, staleness=Constant(), adapt=Adapt(least=0.1, most=0.8))


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 20)


async def propose(hand: Hand, at: int, scale: float) -> None:
    """An evaluator proposes a scale, and the updater has dealt with it."""
    await hand.ledger.propose(StepProposed(at=at, scale=scale, metric="loss"))
    await wait_until(hand.queue_is_empty)


async def update(hand: Hand, value: float) -> None:
    version = await hand.version()
    await hand.admitted(value)
    await hand.reaches(version + 1)
    await wait_until(hand.queue_is_empty)


def weights(folder: Path) -> list[float]:
    return [one.weight for one in records(folder) if isinstance(one, Taken)]


def scales(folder: Path) -> list[tuple[int, float, float]]:
    found = [one for one in records(folder) if isinstance(one, StepScaled)]
    return [(one.at, one.scale, one.rate) for one in found]


async def test_later_updates_step_by_the_scaled_alpha(make: Any, hand: Hand, folder: Path) -> None:
    """From 0 to 4 by .5, then by .25, then by .1: below it alpha is out of bounds."""
    async with running(make(ADAPTS), context()):
        await hand.join()
        await update(hand, 4.0)
        await propose(hand, 1, 0.5)
        await update(hand, 4.0)
        await propose(hand, 2, 0.001)
        await update(hand, 4.0)
        head = await hand.ledger.head()
        told = [one.text for one in await hand.events("step_scaled")]
    assert weights(folder) == [0.5, 0.25, 0.1]
    assert scales(folder) == [(1, 0.5, 0.25), (2, 0.2, 0.1)]
    assert head is not None
    assert head.step == StepSize("alpha", 0.1, 0.2)
    assert told == ["alpha from 0.5 to 0.25", "alpha from 0.25 to 0.1"]
    with Replayer(folder) as replayer:
        values = [float(moment.model.floats[0]) for moment in replayer]
    assert values == [2.0, 2.0, 2.5, 2.5, np.float32(2.5) + np.float32(0.1) * np.float32(1.5)]


async def test_repeated_late_and_early_proposals_are_void(
    make: Any, hand: Hand, folder: Path
) -> None:
    """Two evaluators, or one whose reply was lost; also in an updater that takes over."""
    async with running(make(ADAPTS), context()):
        await hand.join()
        for value in (1.0, 2.0, 3.0):
            await update(hand, value)
        for at, scale in ((2, 0.5), (2, 0.5), (2, 0.25), (1, 1.5), (4, 0.25), (3, 0.5)):
            await propose(hand, at, scale)
    async with running(make(ADAPTS), context()):
        await propose(hand, 2, 0.25)
        await update(hand, 4.0)
        await propose(hand, 4, 1.0)
    assert scales(folder) == [(2, 0.5, 0.25), (4, 1.0, 0.5)]


async def test_a_rule_that_does_not_adapt_ignores_proposals(
    make: Any, hand: Hand, folder: Path
) -> None:
    async with running(make(HALF), context()):
        await hand.join()
        await update(hand, 1.0)
        await propose(hand, 1, 0.5)
        await update(hand, 1.0)
        head = await hand.ledger.head()
    assert scales(folder) == []
    assert weights(folder) == [0.5, 0.5]
    assert head is not None
    assert head.step is None
    assert [segment.head.needs for segment in segments(folder)] == [()]


@pytest.mark.parametrize("moment", ["journalled", "committed"])
async def test_crash_neither_loses_nor_doubles_a_change(
    make: Any, hand: Hand, folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The updater dies between the record and the commit, or after it."""
    real = Commits.settle

    async def dies(commits: Commits, state: RunState, look: Look | None = None) -> Any:
        if moment == "committed":
            await real(commits, state, look)
        raise RuntimeError("it dies")

    async with running(make(ADAPTS), context(), may_fail=True) as updater:
        await hand.join()
        await update(hand, 4.0)
        monkeypatch.setattr(Commits, "settle", dies)
        await hand.ledger.propose(StepProposed(at=1, scale=0.5, metric="loss"))
        await wait_until(updater.done)
    monkeypatch.setattr(Commits, "settle", real)
    async with running(make(ADAPTS, lease_s=0.4), context()):
        await wait_until(hand.queue_is_empty)
        await update(hand, 4.0)
    assert scales(folder) == [(1, 0.5, 0.25)]
    assert weights(folder) == [0.5, 0.25]


async def test_an_emptied_redis_learns_the_scale_again(
    make: Any, hand: Hand, client: Client, folder: Path
) -> None:
    async with running(make(ADAPTS, lease_s=0.4), context()):
        await hand.join()
        await update(hand, 4.0)
        await propose(hand, 1, 0.5)
        await client.call("FLUSHALL")
        await hand.join()
        head = await hand.ledger.head()
        await update(hand, 4.0)
    assert head is not None
    assert head.step == StepSize("alpha", 0.25, 0.5)
    assert weights(folder) == [0.5, 0.25]


async def test_versions_that_the_journal_lost_are_made_again_at_their_scales(
    make: Any, hand: Hand, client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was synced, so the queue still has the change in its place between the updates."""
    monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", 60_000)  # an idle updater syncs
    aside, lazily = folder.with_name("aside"), {"sync": "interval", "sync_s": 1000.0}
    async with running(make(ADAPTS, **lazily), context()):
        await hand.join()
        shutil.copytree(folder, aside)
        for value in (4.0, 8.0):
            version = await hand.version()
            await hand.admitted(value)
            await hand.reaches(version + 1)
            await hand.ledger.propose(
                StepProposed(at=version + 1, scale=0.5 + version, metric="loss")
            )
        await wait_until(lambda: is_at(hand, 1.5))
        before, backup = await hand.ledger.head(), await backed_up(client)
    shutil.rmtree(folder)
    shutil.move(aside, folder)
    await go_back(client, backup)
    async with running(make(ADAPTS, **lazily), context()):
        await hand.join()
        await wait_until(lambda: is_at(hand, 1.5))
        await update(hand, 1.0)
    assert weights(folder) == [0.5, 0.25, 0.75]
    assert scales(folder) == [(1, 0.5, 0.25), (2, 1.5, 0.75)]
    assert before is not None
    with Replayer(folder) as replayer:
        digests = [moment.message.digest for moment in replayer if moment.message.digest]
    assert digests[1] == before.digest


async def test_an_adopted_run_goes_on_at_the_scale_of_its_head(
    make: Any, hand: Hand, folder: Path
) -> None:
    aside = folder.with_name("aside")
    async with running(make(ADAPTS), context()):
        await hand.join()
        await update(hand, 4.0)
        shutil.copytree(folder, aside)
        await propose(hand, 1, 0.5)
        await update(hand, 4.0)
    shutil.rmtree(folder)
    shutil.move(aside, folder)
    async with running(make(ADAPTS, adopt=True, lease_s=0.4), context()):
        await wait_until(lambda: len([*folder.glob("*.journal")]) == 3)  # recovered and adopted
        await update(hand, 4.0)
    assert weights(folder) == [0.5, 0.25]


async def test_a_run_that_goes_on_with_another_alpha_keeps_within_the_bounds(
    make: Any, hand: Hand, folder: Path
) -> None:
    """.5 was scaled by 1.6 to the bound; .7 is not scaled beyond it."""
    async with running(make(ADAPTS), context()):
        await hand.join()
        await update(hand, 4.0)
        await propose(hand, 1, 1.6)
    larger = ADAPTS.model_copy(update={"alpha": 0.7})
    async with running(make(larger, lease_s=0.4), context()):
        await update(hand, 4.0)
        head = await hand.ledger.head()
        await propose(hand, 2, 9.0)
    assert weights(folder) == [0.5, pytest.approx(0.8)]
    assert head is not None
    assert head.step is not None
    assert head.step.rate == pytest.approx(0.8)
    assert len(scales(folder)) == 1, "another proposal of the largest scale changes nothing"


async def is_at(hand: Hand, scale: float) -> bool:
    head = await hand.ledger.head()
    return head is not None and head.step is not None and head.step.scale == scale


async def test_every_segment_of_a_rule_that_adapts_says_so(
    make: Any, hand: Hand, folder: Path
) -> None:
    """An earlier release would step too far in silence."""
    async with running(make(ADAPTS, segment_versions=1), context()):
        await hand.join()
        await update(hand, 4.0)
        await propose(hand, 1, 0.5)
        await update(hand, 4.0)
        await wait_until(lambda: len([*folder.glob("*.journal")]) == 3)
    chain = segments(folder)
    assert {segment.head.needs for segment in chain} == {(STEP_SCALES,)}
    assert [segment.standing.scale for segment in chain] == [1.0, 1.0, 0.5]
    for segment in chain:
        segment.close()
