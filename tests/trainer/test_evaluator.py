"""The evaluator measures when it is due, and ends the run at its target."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset

from fedstream.broker.client import RedisSettings
from fedstream.core.errors import ConfigError, LayoutMismatch
from fedstream.trainer.evaluator import Evaluator, EvaluatorSettings, PerDevice
from fedstream.trainer.goals import Goals, StopSettings
from fedstream.trainer.vector import layout_of
from tests.support import Hand, awaits_news, context, running, wait_until
from tests.trainer.adding import Adds, Point


async def test_evaluator_measures_on_schedule_and_ends_the_run_at_its_target(
    hand: Hand, redis: RedisSettings, task: Adds
) -> None:
    hand.layout = layout_of(Point())
    await hand.create()
    evaluator = Evaluator(
        EvaluatorSettings(every=2),
        keys=hand.keys,
        redis=redis,
        name="evaluator",
        load=lambda: task,
        stop=StopSettings(target=0.35),
    )

    async def measured() -> list[int | None]:
        return [event.version for event in await hand.events("evaluation")]

    async def seen(*versions: int) -> bool:
        return await measured() == list(versions)

    async with running(evaluator, context()):
        await wait_until(lambda: seen(0))
        for number in (1, 2):
            assert await hand.commit(number, await hand.admitted()) == "done"
        await wait_until(lambda: seen(0, 2))
        for number in (3, 4):
            assert await hand.commit(number, await hand.admitted()) == "done"
        await wait_until(lambda: seen(0, 2, 4))

        async def finished() -> bool:
            return (await hand.ledger.run()).state == "finished"

        await wait_until(finished)
    assert (await hand.ledger.run()).why == "accuracy 0.4000 at version 4"
    best, head = await hand.ledger.best(), await hand.ledger.head()
    assert best is not None
    assert head is not None
    assert best.metric == "accuracy"
    assert best.value == pytest.approx(0.4)
    assert (best.version, best.digest, best.blob) == (4, head.digest, head.blob)
    assert [event.metrics for event in await hand.events("evaluation")] == [
        {"accuracy": 0.0},
        {"accuracy": pytest.approx(0.2)},
        {"accuracy": pytest.approx(0.4)},
    ]


@pytest.mark.parametrize(
    ("found", "goal", "best"),
    [
        ([{"loss": 3.0}, {"loss": 1.0}, {"loss": 2.0}], {}, ("loss", 1.0, 1)),
        ([{"bits": 3.0}, {"bits": 1.0}, {"bits": 2.0}], {"bits": "max"}, ("bits", 3.0, 0)),
        ([{"bits": 3.0}, {"bits": 1.0}, {"bits": 2.0}], {}, None),
        ([{"f1": math.nan}, {"f1": math.inf}, {"f1": 0.1}], {}, ("f1", 0.1, 2)),
        ([{"f1": 0.3, "loss": 9.0}, {"f1": 0.2, "loss": 1.0}, {}], {}, ("f1", 0.3, 0)),
    ],
)
async def test_best_version_follows_the_goal_of_the_main_metric(
    hand: Hand,
    redis: RedisSettings,
    found: list[dict[str, float]],
    goal: Goals,
    best: tuple[str, float, int] | None,
) -> None:
    class Measured(Adds):
        def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
            return found[round(next(model.parameters())[0].item())]

    task = Measured()
    task.goal = goal
    hand.layout = layout_of(Point())
    await hand.create()
    evaluator = Evaluator(
        EvaluatorSettings(every=1),
        keys=hand.keys,
        redis=redis,
        name="evaluator",
        load=lambda: task,
        stop=None,
    )
    async with running(evaluator, context()):
        for number in range(3):
            if number:
                await hand.commit(number, await hand.admitted())

            async def measured(version: int = number) -> bool:
                return version in [event.version for event in await hand.events("evaluation")]

            await wait_until(measured)
    kept = await hand.ledger.best()
    assert (kept and (kept.metric, kept.value, kept.version)) == best


async def test_patience_outlives_the_evaluator(
    hand: Hand, redis: RedisSettings, task: Adds
) -> None:
    """The first one measures versions 0 and 1; its successor finds the second without progress."""
    hand.layout = layout_of(Point())
    await hand.create()

    def evaluator() -> Evaluator:
        return Evaluator(
            EvaluatorSettings(every=1),
            keys=hand.keys,
            redis=redis,
            name="evaluator",
            load=lambda: task,
            stop=StopSettings(patience=2, min_delta=1.0),
        )

    async def seen(count: int) -> bool:
        return len(await hand.events("evaluation")) == count

    async with running(evaluator(), context()):
        await wait_until(lambda: seen(1))
        assert await hand.commit(1, await hand.admitted()) == "done"
        await wait_until(lambda: seen(2))
    assert (await hand.ledger.run()).state == "running"

    async def finished() -> bool:
        return (await hand.ledger.run()).state == "finished"

    async with running(evaluator(), context()):
        assert await hand.commit(2, await hand.admitted()) == "done"
        await wait_until(finished)
    why = (await hand.ledger.run()).why
    assert why == "accuracy not better than 0.0000 in 2 measurements after version 0, at version 2"


async def test_evaluator_of_another_task_exits_with_an_error(
    hand: Hand, redis: RedisSettings, task: Adds
) -> None:
    """Instead of a traceback for each version. Devices count only if they are measured."""
    hand.layout = layout_of(Point())
    await hand.create()

    def evaluator(per_device: PerDevice, task: Adds) -> Evaluator:
        return Evaluator(
            EvaluatorSettings(per_device=per_device),
            keys=hand.keys,
            redis=redis,
            name="evaluator",
            load=lambda: task,
            stop=None,
            run_devices=7,
        )

    with pytest.raises(LayoutMismatch, match=r"evaluator's task has 5 parameters in 1 tensors"):
        await asyncio.wait_for(evaluator("never", Adds(5)).run(context()), 60)
    with pytest.raises(ConfigError, match=r"split over 7 devices, but run .* was made with 10"):
        await asyncio.wait_for(evaluator("last", task).run(context()), 60)
    async with running(evaluator("never", task), context()):
        await wait_until(lambda: hand.events("evaluation"))


async def test_it_measures_a_run_as_soon_as_there_is_one(
    hand: Hand, redis: RedisSettings, task: Adds
) -> None:
    hand.layout = layout_of(Point())
    evaluator = Evaluator(
        EvaluatorSettings(),
        keys=hand.keys,
        redis=redis,
        name="evaluator",
        load=lambda: task,
        stop=None,
    )
    async with running(evaluator, context()):
        await wait_until(lambda: awaits_news(hand.client, "evaluator"))
        await hand.create()
        await wait_until(lambda: hand.events("evaluation"))


@pytest.mark.parametrize(
    ("when", "measured"),
    [("never", [False, False]), ("last", [False, True]), ("always", [True, True])],
)
@pytest.mark.parametrize("stopped", [False, True], ids=["by its last version", "by hand"])
async def test_devices_are_measured_when_they_should_be(
    when: PerDevice,
    measured: list[bool],
    stopped: bool,
    hand: Hand,
    redis: RedisSettings,
    task: Adds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only their spread is told, so an event stays as small with many devices."""
    hand.layout = layout_of(Point())
    await hand.create()
    devices = (await hand.ledger.run()).devices
    monkeypatch.setattr(task, "test_data", lambda: range(100))
    monkeypatch.setattr(task, "device_test_data", range)
    monkeypatch.setattr(task, "metrics", lambda _, data: {"accuracy": len(data) / 100})
    evaluator = Evaluator(
        EvaluatorSettings(every=1, per_device=when),
        keys=hand.keys,
        redis=redis,
        name="evaluator",
        load=lambda: task,
        stop=None,
    )
    spread = {
        "device_mean_accuracy": pytest.approx((devices - 1) / 200),
        "device_worst_tenth_accuracy": 0.0,
        "device_deviation_accuracy": pytest.approx(((devices**2 - 1) / 12) ** 0.5 / 100),
    }

    async def told() -> list[tuple[int | None, dict[str, float] | None]]:
        return [(event.version, event.metrics) for event in await hand.events("evaluation")]

    def expected(*numbers: int, spreads: Sequence[bool]) -> list[tuple[int, object]]:
        return [
            (number, {"accuracy": 1.0} | (spread if there else {}))
            for number, there in zip(numbers, spreads, strict=True)
        ]

    async def is_told(*numbers: int, spreads: Sequence[bool]) -> bool:
        return await told() == expected(*numbers, spreads=spreads)

    async with running(evaluator, context()):
        await wait_until(lambda: is_told(0, spreads=measured[:1]))
        if stopped:  # after it was measured as any version, the last one gets what it lacks
            assert await hand.ledger.finish("enough")
            again = [0, 0] if when == "last" else [0]
            await wait_until(lambda: is_told(*again, spreads=measured[: len(again)]))
        else:
            assert await hand.commit(1, finish="enough") == "done"
            await wait_until(lambda: is_told(0, 1, spreads=measured))


async def test_failing_metrics_are_reported_and_the_run_continues(
    hand: Hand, redis: RedisSettings, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.layout = layout_of(Point())
    await hand.create()

    def broken(*_: object) -> dict[str, float]:
        raise KeyError("accuracy")

    monkeypatch.setattr(task, "metrics", broken)
    evaluator = Evaluator(
        EvaluatorSettings(every=1),
        keys=hand.keys,
        redis=redis,
        name="evaluator",
        load=lambda: task,
        stop=None,
    )

    async def told() -> list[int | None]:
        return [event.version for event in await hand.events("error")]

    async def first() -> bool:
        return await told() == [0]

    async def second() -> bool:
        return await told() == [0, 1]

    async with running(evaluator, context()):
        await wait_until(first)
        assert await hand.commit(1) == "done"
        await wait_until(second)
    [error, _] = await hand.events("error")
    assert (error.device, error.reason) == (None, "metrics: KeyError")
    assert "Traceback" in (error.text or "")
