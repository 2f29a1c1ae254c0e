"""The evaluator asks devices, trainers measure, and an evaluation always ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker.client import RedisSettings
from fedstream.broker.ledger.evaluator import EvaluatorLedger
from fedstream.core.errors import Unavailable
from fedstream.core.messages import DevicesEvaluated, Event, Measured, Presence, decode
from fedstream.trainer.device_evaluations import DeviceEvaluations
from fedstream.trainer.evaluator import Evaluator, EvaluatorSettings
from fedstream.trainer.goals import StopSettings
from fedstream.trainer.measuring import Evaluated
from fedstream.trainer.on_devices import OnDevicesSettings
from fedstream.trainer.task import Mean, Task
from fedstream.trainer.vector import layout_of
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Adds, Make, Point


class Measures(Adds):
    """Devices 0 and 1 have as many rows as their number says plus one; 2 has none; 3 raises."""

    def test_data(self) -> Dataset[Any] | None:  # type: ignore[override]
        return None

    def device_test_data(self, device: int) -> Dataset[Any] | None:
        return None if device == 2 else TensorDataset(torch.full((device + 1,), device))

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        rows = [int(data[n][0]) for n in range(len(data))]  # type: ignore[arg-type]
        if rows[0] == 3:
            raise ValueError("device 3 is broken")
        return {"accuracy": Mean(rows[0], len(rows)), "loss": float(next(model.parameters())[0])}


@pytest.fixture
def task() -> Task:
    return Measures()


@pytest.fixture
def evaluator(hand: Hand, redis: RedisSettings, task: Task) -> Any:
    hand.layout = layout_of(Point())

    def make(stop: StopSettings | None = None, **settings: Any) -> Evaluator:
        about: dict[str, Any] = {"count": 4, "every": 1} | settings
        return Evaluator(
            EvaluatorSettings(on_devices=OnDevicesSettings(**about)),
            keys=hand.keys,
            redis=redis,
            name="evaluator",
            load=lambda: task,
            stop=stop,
        )

    return make


async def admit(hand: Hand) -> None:
    """The coordinator hears trainers, and admits what devices measured, over and over."""
    while True:
        for entry in await hand.heard():
            said = decode(entry.data, Measured, Presence, Event)
            if isinstance(said, Measured):
                await hand.ledger.admit_measured("pool", entry, said, trusted=True)
            elif isinstance(said, Presence):
                await hand.hear("pool", entry)
        await asyncio.sleep(0.01)


@asynccontextmanager
async def coordinating(hand: Hand) -> AsyncIterator[None]:
    task = asyncio.create_task(admit(hand))
    yield
    task.cancel()
    await asyncio.wait({task})


async def results(hand: Hand) -> list[DevicesEvaluated]:
    return [one for _, one in await hand.queue() if isinstance(one, DevicesEvaluated)]


async def ends(hand: Hand, count: int = 1) -> list[DevicesEvaluated]:
    async def there() -> bool:
        return len(await results(hand)) >= count

    await wait_until(there)
    return await results(hand)


async def test_every_device_ends_with_an_outcome(hand: Hand, make: Make, evaluator: Any) -> None:
    """Sums over rows, spread over devices; the user's error is told."""
    await hand.create(devices=4)
    async with coordinating(hand), running(make(), context()), running(evaluator(), context()):
        [found] = await ends(hand)
    assert (found.version, found.devices) == (0, 4)
    assert found.outcomes == {"measured": 2, "no test data": 1, "raised ValueError": 1}
    assert found.sums == {"accuracy": (1.0, 3.0), "loss": (0.0, 3.0)}
    assert found.metrics["devices_accuracy"] == pytest.approx(1 / 3)
    assert found.metrics["device_mean_accuracy"] == pytest.approx(1 / 4)
    counts = (await hand.ledger.tally()).counts
    assert counts["evaluations"] == 4
    assert await hand.client.call("XLEN", hand.keys.tasks) == 0
    await hand.balanced()


async def test_device_is_measured_once_redis_is_back(
    hand: Hand, make: Make, evaluator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An outage is no error of the device."""
    real, reads = Evaluated.read, list[int]()

    async def failing(*args: Any) -> Any:
        reads.append(1)
        if len(reads) == 1:
            raise Unavailable("the connection is lost")
        return await real(*args)

    monkeypatch.setattr(Evaluated, "read", failing)
    await hand.create(devices=4)
    async with coordinating(hand), running(make(), context()), running(evaluator(), context()):
        [found] = await ends(hand)
    assert found.outcomes == {"measured": 2, "no test data": 1, "raised ValueError": 1}


async def test_newer_version_is_evaluated_without_devices_that_have_no_data(
    hand: Hand, make: Make, evaluator: Any
) -> None:
    await hand.create(devices=4)
    async with coordinating(hand), running(make(), context()), running(evaluator(), context()):
        await ends(hand)
        await hand.publish(1, 1.0)
        assert await hand.commit(1, await upload(hand)) == "done"
        _, second = await ends(hand, 2)
    assert (second.version, second.devices) == (1, 3)
    assert second.outcomes == {"measured": 2, "raised ValueError": 1}
    assert second.metrics["devices_loss"] == 1.0


async def upload(hand: Hand) -> Any:
    """An admitted update of a task that no trainer takes."""
    [trigger] = await hand.request(device=9)
    found = await hand.trained(trigger)
    await hand.slip_in(found)
    return found


async def test_evaluation_ends_in_time_though_nobody_answers(
    hand: Hand, make: Make, evaluator: Any
) -> None:
    """The trainer is there, but its answers are lost."""
    await hand.create(devices=4)
    await hand.announce("t")
    async with running(evaluator(timeout_s=0.2), context()):
        [found, *_] = await ends(hand)
    assert found.outcomes == {"no answer in time": 4}
    assert (found.sums, found.metrics) == ({}, {})
    assert await hand.client.call("XLEN", hand.keys.tasks) == 0


async def test_too_few_measured_devices_give_no_metrics(
    hand: Hand, make: Make, evaluator: Any
) -> None:
    await hand.create(devices=4)
    async with (
        coordinating(hand),
        running(make(), context()),
        running(evaluator(min_devices=3), context()),
    ):
        [found] = await ends(hand)
    assert (found.outcomes["measured"], found.metrics) == (2, {})
    assert found.summary.endswith("too few for metrics")


async def test_next_evaluator_goes_on_with_the_open_evaluation(
    hand: Hand, make: Make, evaluator: Any
) -> None:
    await hand.create(devices=4)
    await hand.announce("t1")
    async with running(evaluator(), context()):

        async def asked() -> bool:
            found = await hand.ledger.evaluation()
            return found is not None and len(found.asked) > 0

        await wait_until(asked)
    open_one = await hand.ledger.evaluation()
    assert open_one is not None
    async with coordinating(hand), running(make(), context()), running(evaluator(), context()):
        [found] = await ends(hand)
    assert found.evaluation == open_one.id
    assert sum(found.outcomes.values()) == 4
    assert (await hand.ledger.tally()).counts["evaluations"] == 4


async def test_evaluation_that_redis_forgot_is_opened_anew(
    hand: Hand, make: Make, evaluator: Any
) -> None:
    """Its tasks are gone too."""
    await hand.create(devices=4)
    await hand.announce("t1")
    async with running(evaluator(), context()):
        await wait_until(hand.ledger.evaluation)
        keys = hand.keys
        gone = (keys.evaluation, keys.evaluations, keys.measured, keys.tasks)
        await hand.client.call("DEL", *gone)
        async with coordinating(hand), running(make(), context()):
            [result] = await ends(hand)
    assert result.outcomes["measured"] == 2


async def test_metric_of_devices_ends_the_run(hand: Hand, make: Make, evaluator: Any) -> None:
    await hand.create(devices=4)
    stop = StopSettings(metric="devices_loss", target=0.5)
    async with coordinating(hand), running(make(), context()), running(evaluator(stop), context()):

        async def finished() -> bool:
            return (await hand.ledger.run()).state == "finished"

        await wait_until(finished)
    assert (await hand.ledger.run()).why == "devices_loss 0.0000 at version 0"


async def test_metric_ends_the_run_though_replies_of_redis_are_lost(
    hand: Hand, make: Make, evaluator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the script that ended the evaluation, and that of the run's end."""
    for name in ("end_evaluation", "finish"):
        lose_first_reply(monkeypatch, name)
    await hand.create(devices=4)
    stop = StopSettings(metric="devices_loss", target=0.5)
    async with coordinating(hand), running(make(), context()), running(evaluator(stop), context()):

        async def finished() -> bool:
            return (await hand.ledger.run()).state == "finished"

        await wait_until(finished)
        assert len(await results(hand)) == 1


def lose_first_reply(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """No reply comes to the first call of an operation; ``finish`` does not even reach Redis."""
    real, called = getattr(EvaluatorLedger, name), list[str]()

    async def losing(*args: Any, **about: Any) -> Any:
        called.append(name)
        if len(called) == 1:
            if name == "end_evaluation":
                await real(*args, **about)
            raise Unavailable("the connection is lost")
        return await real(*args, **about)

    monkeypatch.setattr(EvaluatorLedger, name, losing)


async def test_evaluator_waits_for_a_version_that_is_due(
    hand: Hand, make: Make, evaluator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It blocks on the stream of versions rather than polls."""
    await hand.create(devices=4)
    async with coordinating(hand), running(make(), context()), running(evaluator(), context()):
        await ends(hand)
        real, looks = DeviceEvaluations.step, list[float]()

        async def noting(*args: Any) -> None:
            looks.append(asyncio.get_running_loop().time())
            await real(*args)

        monkeypatch.setattr(DeviceEvaluations, "step", noting)
        await wait_until(lambda: len(looks) >= 3)  # the first may find version 0 in the stream
        assert looks[2] - looks[1] > 0.5
        await hand.publish(1, 1.0)
        assert await hand.commit(1, await upload(hand)) == "done"
        await ends(hand, 2)


async def test_nothing_is_opened_while_nobody_is_there(hand: Hand, evaluator: Any) -> None:
    """An evaluation without devices would tell nothing; the log says so once."""
    await hand.create(devices=4)
    with capture_logs() as logs:
        async with running(evaluator(), context()):

            def warned() -> bool:
                return any(one["event"] == "no device is there to evaluate" for one in logs)

            await wait_until(warned)
    assert await hand.ledger.evaluation() is None
