"""The evaluator measures when it is due, and ends the run at its target."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.errors import ConfigError, LayoutMismatch
from fedstream.trainer.evaluator import Evaluator, EvaluatorSettings, PerDevice
from fedstream.trainer.vector import layout_of
from tests.support import Hand, awaits_news, context, running, wait_until
from tests.trainer.adding import Adds, Point


@pytest.fixture
def make_evaluator(hand: Hand, redis: RedisSettings, task: Adds) -> Callable[..., Evaluator]:
    """Makes an evaluator of the task, with these settings."""
    hand.layout = layout_of(Point())

    def make(
        task: Adds = task,
        *,
        target: float | None = None,
        run_devices: int | None = None,
        **settings: Any,
    ) -> Evaluator:
        return Evaluator(
            EvaluatorSettings(**settings),
            keys=hand.keys,
            redis=redis,
            name="evaluator",
            load=lambda: task,
            target=target,
            run_devices=run_devices,
        )

    return make


async def test_evaluator_measures_on_schedule_and_ends_the_run_at_its_target(
    hand: Hand, make_evaluator: Callable[..., Evaluator]
) -> None:
    await hand.create()
    evaluator = make_evaluator(target=0.35, every=2)

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
    assert [event.metrics for event in await hand.events("evaluation")] == [
        {"accuracy": 0.0},
        {"accuracy": pytest.approx(0.2)},
        {"accuracy": pytest.approx(0.4)},
    ]


async def test_evaluator_of_another_task_exits_with_an_error(
    hand: Hand, make_evaluator: Callable[..., Evaluator]
) -> None:
    """Instead of a traceback for each version. Devices count only if they are measured."""
    await hand.create()

    with pytest.raises(LayoutMismatch, match=r"evaluator's task has 5 parameters in 1 tensors"):
        await asyncio.wait_for(make_evaluator(Adds(5), run_devices=7).run(context()), 60)
    with pytest.raises(ConfigError, match=r"split over 7 devices, but run .* was made with 10"):
        await asyncio.wait_for(make_evaluator(run_devices=7, per_device="last").run(context()), 60)
    async with running(make_evaluator(run_devices=7), context()):
        await wait_until(lambda: hand.events("evaluation"))


async def test_it_measures_a_run_as_soon_as_there_is_one(
    hand: Hand, make_evaluator: Callable[..., Evaluator]
) -> None:
    evaluator = make_evaluator()
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
    make_evaluator: Callable[..., Evaluator],
    task: Adds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only their spread is told, so an event stays as small with many devices."""
    await hand.create()
    devices = (await hand.ledger.run()).devices
    monkeypatch.setattr(task, "test_data", lambda: range(100))
    monkeypatch.setattr(task, "device_test_data", range)
    monkeypatch.setattr(task, "metrics", lambda _, data: {"accuracy": len(data) / 100})
    evaluator = make_evaluator(every=1, per_device=when)
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
    hand: Hand,
    make_evaluator: Callable[..., Evaluator],
    task: Adds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await hand.create()

    def broken(*_: object) -> dict[str, float]:
        raise KeyError("accuracy")

    monkeypatch.setattr(task, "metrics", broken)
    evaluator = make_evaluator(every=1)

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
