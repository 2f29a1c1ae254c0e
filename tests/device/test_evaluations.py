"""A device measures models on its own test data, between its tasks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset, Subset

from fedstream import Mean
from fedstream.core.layout import Model
from fedstream.device.process import run_device
from fedstream.protocol.messages import Advice
from fedstream.trainer.learner import Learner
from fedstream.trainer.task import NoLabels
from tests.device.conftest import Options
from tests.device.fake import FakeGateway
from tests.device.test_worker import nothing
from tests.support import wait_until
from tests.trainer.stepping import Steps

SUMS = {"accuracy": (6.0, 8.0)}


class Measured(Steps):
    """Has ten rows of test data a device; its metrics are a test's."""

    def __init__(self, metrics: Callable[[], dict[str, float]] | None = None) -> None:
        super().__init__()
        self._metrics = metrics

    def device_test_data(self, device: int) -> Dataset[Any] | None:
        return Subset(self.device_data(device), range(10))

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return self._metrics() if self._metrics else super().metrics(model, data)


def none_counts() -> dict[str, float]:
    """The metrics of data without labels."""
    raise NoLabels("every label is -100")


async def test_device_measures_a_model_and_then_trains(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    task = Measured()
    offer = gateway.evaluates(model, version=4)
    gateway.offer(model)
    await run_device(options(load=lambda: task), said.append, nothing)
    found = gateway.measured[offer.task.id]
    samples, sums = Learner(Measured, 1, "cpu").measure(model, None, 7) or (0, {})
    assert (found.samples, found.sums) == (samples, sums)
    assert samples == 10
    assert said[1].startswith("version 4: accuracy 0.")
    assert [one.evaluates for one in gateway.check_ins][:2] == [True, True]
    assert len(gateway.sent) == 1, "the update of the task after it"


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        (lambda: {"loss": float("nan")}, "metrics not finite"),
        (lambda: {"loss": 1e300}, "metrics not finite"),
        (none_counts, "no test data"),
    ],
)
async def test_device_without_usable_metrics_says_why(
    gateway: FakeGateway,
    options: Options,
    model: Model,
    metrics: Callable[[], dict[str, float]],
    reason: str,
) -> None:
    gateway.evaluates(model)
    gateway.offer(model)
    task = Measured(metrics)
    await run_device(options(load=lambda: task), nothing, nothing)
    assert gateway.given_up == [("eval-1", reason)]


async def test_device_without_test_data_says_so(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    gateway.evaluates(model)
    gateway.offer(model)
    await run_device(options(), said.append, nothing)
    assert gateway.given_up == [("eval-1", "no test data")]
    assert said[1] == "task eval-1: given up: no test data"


async def test_error_in_metrics_is_shown_and_the_device_trains_on(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    """However often: it is no reason to keep the device's updates from the run."""

    def fails() -> dict[str, float]:
        raise ValueError("no such column")

    for n in range(6):
        gateway.evaluates(model, task=f"eval-{n}")
    gateway.offer(model)
    task = Measured(fails)
    await run_device(options(load=lambda: task), said.append, nothing)
    assert gateway.given_up == [(f"eval-{n}", "raised ValueError") for n in range(6)]
    assert len(gateway.sent) == 1
    text = "\n".join(said)
    assert text.count("Traceback") == 1
    assert 'raise ValueError("no such column")' in text
    assert text.count(": raised ValueError at") == 6


async def test_lost_reply_is_asked_for_again(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    task = Measured(lambda: {"accuracy": Mean(6, 8)})
    offer = gateway.evaluates(model)
    gateway.offer(model)
    gateway.fails("POST", offer.measurement.url)
    await run_device(options(load=lambda: task), said.append, nothing)
    assert gateway.measured["eval-1"].sums == SUMS
    assert gateway.asked.count(f"POST {offer.measurement.url}") == 2
    assert any(one.startswith("version 0: accuracy 0.75 on 10 samples") for one in said)


async def test_evaluation_that_is_over_is_no_error(
    gateway: FakeGateway, options: Options, model: Model, said: list[str]
) -> None:
    task = Measured(lambda: {"accuracy": Mean(6, 8)})
    offer = gateway.evaluates(model)
    gateway.fails("POST", offer.measurement.url, status=404, reason="unknown task")
    life = asyncio.create_task(
        run_device(options(load=lambda: task, once=False), said.append, nothing)
    )
    await wait_until(lambda: f"POST {offer.measurement.url}" in gateway.asked)
    gateway.offers.clear()
    gateway.over = True
    await life
    assert said[1] == "version 0: measured too late, as the evaluation is over"


@pytest.mark.parametrize("how", ["stopped by its owner", "stopped by the gateway"])
async def test_device_that_is_stopped_leaves_the_evaluation(
    gateway: FakeGateway, options: Options, model: Model, said: list[str], how: str
) -> None:
    began, gate = threading.Event(), threading.Event()

    def waits() -> dict[str, float]:
        began.set()
        assert gate.wait(10)
        return {"accuracy": Mean(6, 8)}

    task = Measured(waits)
    gateway.evaluates(model, heartbeat_s=0.005)
    if how == "stopped by the gateway":
        gateway.advice = Advice(go_on=False, why="given up")
    life = asyncio.create_task(
        run_device(options(load=lambda: task, once=False), said.append, nothing)
    )
    await wait_until(began.is_set)
    if how == "stopped by the gateway":
        await wait_until(lambda: gateway.beats)
        gateway.offers.clear()
        gateway.over = True
        gate.set()
        await life
        assert said[1] == "version 0: measured too late, as the evaluation is over"
        assert gateway.given_up == []
    else:
        life.cancel()
        with pytest.raises(asyncio.CancelledError):
            await life
        gate.set()
        assert gateway.given_up == [("eval-1", "dropped out")]
        assert not gateway.check_ins[-1].eligible
    assert gateway.measured == {}
