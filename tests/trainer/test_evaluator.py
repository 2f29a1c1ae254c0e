"""The evaluator measures when it is due, and ends the run at its target."""

from __future__ import annotations

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.trainer.evaluator import Evaluator, EvaluatorSettings
from fedstream.trainer.vector import layout_of
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Adds, Point


async def test_evaluator_measures_on_schedule_and_ends_the_run_at_its_target(
    hand: Hand, redis: RedisSettings, task: Adds
) -> None:
    hand.layout = layout_of(Point())
    await hand.create()
    evaluator = Evaluator(
        EvaluatorSettings(every=2), keys=hand.keys, redis=redis, name="evaluator",
        load=lambda: task, target=0.35,
    )  # fmt: skip

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


async def test_failing_metrics_are_reported_and_the_run_continues(
    hand: Hand, redis: RedisSettings, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.layout = layout_of(Point())
    await hand.create()

    def broken(*_: object) -> dict[str, float]:
        raise KeyError("accuracy")

    monkeypatch.setattr(task, "metrics", broken)
    evaluator = Evaluator(
        EvaluatorSettings(every=1), keys=hand.keys, redis=redis, name="evaluator",
        load=lambda: task, target=None,
    )  # fmt: skip

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
