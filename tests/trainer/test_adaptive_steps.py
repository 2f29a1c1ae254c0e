"""The evaluator follows the journal and proposes the scale that held-out data prefer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from fedstream.broker.client import RedisSettings
from fedstream.core.errors import ConfigError
from fedstream.core.messages import StepProposed
from fedstream.journal.progress import Progress
from fedstream.journal.replay import Replayer
from fedstream.strategies import FedAsyncSettings, State
from fedstream.strategies.adapt import Adapt, Windows
from fedstream.strategies.staleness import Constant
from fedstream.trainer.adaptive_steps import Scorer
from fedstream.trainer.data import samples_of, thinned
from fedstream.trainer.evaluator import Evaluator, EvaluatorSettings
from fedstream.trainer.vector import layout_of
from tests.journals import Scribe
from tests.support import Hand, context, model_of, running, wait_until
from tests.trainer.adding import Adds, Point

ADAPT = Adapt(every=3, factors=(0.5, 2.0), least=0.05, most=0.9)
RULE = FedAsyncSettings(alpha=0.4, staleness=Constant(), adapt=ADAPT)
LAYOUT = layout_of(Point())


class Near(Adds):
    """The loss is the distance from one."""

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        weights = next(model.parameters())
        return {"loss": float((weights - 1.0).square().sum()), "items": float(samples_of(data))}


@pytest.fixture
def scribe(tmp_path: Path) -> Scribe:
    """Writes the journal of a run whose updates are random."""
    return Scribe(tmp_path / "journal", RULE, layout=LAYOUT, seed=5)


def scored(folder: Path) -> list[StepProposed]:
    """The proposals that the whole journal leads to."""
    scorer, windows = Scorer(ADAPT, Near(), Point(), "cpu"), Windows(ADAPT.every)
    found: list[StepProposed] = []
    with Replayer(folder) as replayer:
        for moment in replayer:
            if moment.step.made is None:
                continue
            windows.add(moment.version, moment.model)
            run = moment.step.after
            if windows.is_due and (one := scorer.proposal(RULE, run, windows)) is not None:
                found.append(one)
    return found


def evaluator(hand: Hand, redis: RedisSettings, journal: Path, name: str = "e-0") -> Evaluator:
    return Evaluator(
        EvaluatorSettings(),
        keys=hand.keys,
        redis=redis,
        name=name,
        load=Near,
        stop=None,
        adapt=(ADAPT, journal),
    )


async def proposed(hand: Hand) -> list[StepProposed]:
    return [one for _, one in await hand.queue() if isinstance(one, StepProposed)]


async def test_proposals_follow_from_the_journal(
    hand: Hand, redis: RedisSettings, scribe: Scribe
) -> None:
    """Over a change of the scale, segments that begin within windows, and records added later."""
    hand.layout = LAYOUT
    await hand.create(lineage="line-1")
    for n in range(20):
        scribe.update(late=n % 3)
        if n in (7, 13):
            scribe.scale_step(0.5 if n == 7 else 1.0)
        if n == 10:
            scribe.segment()

    async def all_are_there() -> bool:
        return await proposed(hand) == scored(scribe.folder)

    scribe.writer.sync()
    async with running(evaluator(hand, redis, scribe.folder), context()):
        # It begins with the newest segment, at version 11: its first whole windows end with 18.
        await wait_until(lambda: has(hand, 18))
        first = await proposed(hand)
        assert first == [one for one in scored(scribe.folder) if one.at >= 18]
        scribe.segment()
        for n in range(12):
            scribe.update(late=n % 2)
        last = scored(scribe.folder)[-1].at
        await wait_until(lambda: has(hand, last))
        assert await proposed(hand) == [one for one in scored(scribe.folder) if one.at >= 18]
    scribe.close()


async def has(hand: Hand, at: int) -> bool:
    return any(one.at == at for one in await proposed(hand))


async def test_another_runs_journal_is_not_followed(
    hand: Hand, redis: RedisSettings, scribe: Scribe
) -> None:
    hand.layout = LAYOUT
    await hand.create(lineage="another")
    for _ in range(9):
        scribe.update()
    scribe.close()
    with capture_logs() as logs:
        async with running(evaluator(hand, redis, scribe.folder), context()):
            await wait_until(
                lambda: any("journal of another run" in line.get("why", "") for line in logs)
            )
    assert await proposed(hand) == []


def test_scores_need_data_a_goal_and_the_metric() -> None:
    class Blind(Near):
        def test_data(self) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ConfigError, match="no held-out data"):
        Scorer(ADAPT, Blind(), Point(), "cpu")
    with pytest.raises(ConfigError, match=r"strategy\.adapt\.metric"):
        Scorer(Adapt(metric="items"), Near(), Point(), "cpu")
    windows = Windows(1)
    for version in (1, 2):
        windows.add(version, model_of(LAYOUT, 0.5))
    run = Progress(State(2, model_of(LAYOUT, 0.5)))
    with pytest.raises(ConfigError, match="the task's metrics are loss, items"):
        Scorer(Adapt(metric="accuracy"), Near(), Point(), "cpu").proposal(RULE, run, windows)


def test_validation_data_take_the_place_of_test_data() -> None:
    class Validates(Near):
        def validation_data(self) -> Dataset[Any]:
            return TensorDataset(torch.arange(10))

        def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
            assert samples_of(data) == 4
            return super().metrics(model, data)

    windows = Windows(1)
    for version in (1, 2):
        windows.add(version, model_of(LAYOUT, 0.25 * version))
    run = Progress(State(2, model_of(LAYOUT, 0.5)))
    found = Scorer(Adapt(rows=4), Validates(), Point(), "cpu").proposal(RULE, run, windows)
    assert found is not None
    assert found.scale == 2.0  # towards one


def test_rows_are_evenly_spaced() -> None:
    data = TensorDataset(torch.arange(10))
    assert thinned(data, 4).tensors[0].tolist() == [0, 2, 5, 7]  # type: ignore[attr-defined]
    assert thinned(data, 10) is data
    some = thinned(Subset(data, range(10)), 3)
    assert [int(some[row][0]) for row in range(3)] == [0, 3, 6]
