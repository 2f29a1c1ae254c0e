"""Metrics of single devices, and what they amount to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.core.errors import ConfigError
from fedstream.settings.config import read
from fedstream.settings.services import devices_of
from fedstream.trainer import on_devices
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.loading import load_task
from fedstream.trainer.on_devices import device_metrics, spread
from fedstream.trainer.task import Task


class Half(Task):
    """Devices with an even number have as many test items as their number says, plus one."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def model(self) -> nn.Module:
        return nn.Linear(1, 1)

    def device_data(self, device: int) -> Dataset[Any]:
        raise NotImplementedError

    def device_test_data(self, device: int) -> Dataset[Any] | None:
        self.asked.append(device)
        return None if device % 2 else TensorDataset(torch.zeros(device + 1))

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return {"items": float(len(data))}  # type: ignore[arg-type]


def test_worst_tenth_is_the_mean_of_the_worst_served_devices() -> None:
    found = {device: {"accuracy": device / 100, "loss": device / 10} for device in range(20)}
    assert spread(found, {}) == {
        "device_mean_accuracy": pytest.approx(0.095),
        "device_worst_tenth_accuracy": pytest.approx(0.005),  # of devices 0 and 1
        "device_deviation_accuracy": pytest.approx(math.sqrt((20**2 - 1) / 12) / 100),
        "device_mean_loss": pytest.approx(0.95),
        "device_worst_tenth_loss": pytest.approx(1.85),  # of devices 18 and 19
        "device_deviation_loss": pytest.approx(math.sqrt((20**2 - 1) / 12) / 10),
    }


def test_few_devices_have_a_worst_one_and_none_has_no_spread() -> None:
    assert spread({4: {"f1": 0.25}, 7: {"f1": 0.75}}, {})["device_worst_tenth_f1"] == 0.25
    assert spread({}, {}) == {}


def test_the_worst_tenth_is_on_the_side_that_the_goal_says_or_left_out() -> None:
    found = {n: {"rmse": float(n), "score": float(n)} for n in range(10)}
    assert spread(found, {})["device_worst_tenth_rmse"] == 9.0
    assert "device_worst_tenth_score" not in spread(found, {})
    assert spread(found, {})["device_mean_score"] == 4.5
    assert spread(found, {"score": "min"})["device_worst_tenth_score"] == 9.0


def test_a_device_whose_metric_is_undefined_is_served_worst() -> None:
    found = spread({n: {"loss": math.nan if n == 3 else 1.0} for n in range(10)}, {})
    assert math.isnan(found["device_worst_tenth_loss"])
    assert math.isnan(found["device_mean_loss"])


def test_devices_without_test_data_are_left_out() -> None:
    found = device_metrics(Half(), nn.Linear(1, 1), 5)
    assert found == {0: {"items": 1.0}, 2: {"items": 3.0}, 4: {"items": 5.0}}


def test_of_many_devices_evenly_spaced_ones_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_devices, "_MOST", 4)
    task = Half()
    device_metrics(task, nn.Linear(1, 1), 10)
    assert task.asked == [0, 3, 6, 9]


def test_measuring_stops_when_the_run_does() -> None:
    task = Half()
    assert device_metrics(task, nn.Linear(1, 1), 5, cancelled=lambda: len(task.asked) > 2) == {
        0: {"items": 1.0},
        2: {"items": 3.0},
    }


def test_a_built_in_device_is_tested_on_the_classes_that_it_has() -> None:
    task = load_task("digits", read(None).task)
    assert isinstance(task, InMemory)
    tested = task.test_data().tensors[1]
    for device in range(10):
        data = task.device_test_data(device)
        assert data is not None
        classes = torch.unique(task.device_data(device).tensors[1])
        assert torch.equal(torch.unique(data.tensors[1]), classes)
        assert len(data) == int(torch.isin(tested, classes).sum())  # all of them


def test_a_task_without_test_data_of_devices_is_refused_before_the_run() -> None:
    class Bare(Half):
        device_test_data = Task.device_test_data

    settings = read(None, ["evaluator.per_device=last"])
    with pytest.raises(ConfigError, match=r"evaluator\.per_device = 'last'.*device_test_data\("):
        devices_of(settings, Bare())
    assert devices_of(settings, Half()) == 10
