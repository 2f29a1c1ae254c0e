"""A simulation evaluates versions on the devices as a live run does, in no virtual time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

from fedstream.core.errors import ConfigError, TaskError
from fedstream.journal import EvaluationEnded
from fedstream.journal.replay import Replayer
from fedstream.settings.config import read
from fedstream.settings.recording import SUMMARY
from fedstream.simulation import SimulationResult, simulate
from fedstream.simulation.run import simulate_into
from fedstream.trainer.task import Task
from tests.fedstream.simulation.test_simulation import DEVICES, Small

ALL = "evaluator.on_devices.fraction=1.0"


class Split(Small):
    """The central test set's rows are split over the devices; device 5 has none."""

    def device_test_data(self, device: int) -> Dataset[Any] | None:
        if device == 5:
            return None
        return Subset(super().test_data(), range(12 * device, 12 * device + 12))


class Raises(Split):
    """Metrics that fail on one device's data, once the model has been trained."""

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        if isinstance(data, Subset) and data.indices[0] == 12 and self.trained:
            raise ZeroDivisionError("device 1 is broken")
        return super().metrics(model, data)

    trained = False

    def train(self, *args: Any) -> Any:
        self.trained = True
        return super().train(*args)


def simulated(task: Task, *sets: str, journal: Path | None = None) -> SimulationResult:
    settings = read(
        None, ["run.versions=20", "simulation.evaluate_every=5", "simulation.threads=1", *sets]
    )
    return simulate(settings, task, journal=journal, on_error=print)


def test_devices_that_split_the_test_set_measure_what_it_measures() -> None:
    outcome = simulated(Split(), ALL)
    assert [made.version for made in outcome.measured] == [0, 5, 10, 15, 20]
    for made in outcome.measured:
        assert made.metrics["devices_accuracy"] == made.metrics["accuracy"]
        assert made.metrics["devices_loss"] == pytest.approx(made.metrics["loss"])
        assert made.on_devices is not None
        assert made.on_devices.outcomes["measured"] == DEVICES - 1


def test_its_journal_has_the_evaluations(tmp_path: Path) -> None:
    """The models are the same bits with and without them."""
    outcome = simulated(Split(), ALL, journal=tmp_path / "with")
    other = simulated(Split(), journal=tmp_path / "without")
    assert outcome.model.digest() == other.model.digest()
    with Replayer(tmp_path / "with") as replayer:
        found = [one.message for one in replayer if isinstance(one.message, EvaluationEnded)]
    assert [one.measured for one in found] == [0, 5, 10, 15, 20]
    assert found[-1].metrics["devices_loss"] == outcome.last("devices_loss")


def test_patience_goes_by_the_devices(tmp_path: Path) -> None:
    outcome = simulated(
        Split(),
        ALL,
        "run.stop.metric=devices_loss",
        "run.stop.patience=1",
        "run.stop.min_delta=10.0",
    )
    assert outcome.why.startswith("devices_loss not better than")
    assert outcome.versions[-1].version == 5


def test_an_error_of_one_devices_metrics_is_told_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = simulated(Raises(), ALL, "run.dry_step=false")
    found = outcome.versions[-1].on_devices
    assert found is not None
    assert found.outcomes["raised ZeroDivisionError"] == 1
    assert outcome.state == "finished"
    said = capsys.readouterr().out
    assert said.count("the task raised on test data of device 1 at version 5") == 1


def test_too_few_devices_are_a_warning(tmp_path: Path) -> None:
    settings = read(
        None,
        ["run.versions=10", "simulation.threads=1", ALL, "evaluator.on_devices.min_devices=6"],
    )
    _, numbers, _ = simulate_into(
        tmp_path / "out",
        settings,
        Split(),
        journal=False,
        picture=False,
        show=lambda _: None,
        cancelled=lambda: False,
    )
    lack = "version 10 on the devices: 5 of 5 devices measured: too few for metrics"
    assert numbers["devices_lack"] == lack
    assert json.loads((tmp_path / "out" / SUMMARY).read_text())["devices_lack"] == lack


# runs that are refused before they start


def test_task_without_test_data_of_devices_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no test data of devices"):
        simulated(Small(), ALL)


def test_more_devices_than_the_run_has_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_devices = 7, but the run has 6 devices"):
        simulated(Split(), ALL, "evaluator.on_devices.min_devices=7")


def test_unknown_metric_of_devices_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'devices_loss'\?"):
        simulated(Split(), ALL, "run.stop.metric=devices_los", "run.stop.patience=1")


class Undefined(Split):
    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return {"loss": float("nan")}


def test_metrics_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(TaskError, match="test data of device 0: no metric is a finite number"):
        simulated(Undefined(), ALL)


class LastRaises(Split):
    def device_test_data(self, device: int) -> Dataset[Any] | None:
        return TensorDataset() if device == DEVICES - 1 else super().device_test_data(device)


def test_the_last_device_is_tried_too() -> None:
    with pytest.raises(TaskError, match=f"test data of device {DEVICES - 1}"):
        simulated(LastRaises(), ALL)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            ["evaluator.on_devices.min_devices=1"],
            "needs either a fraction of the devices or their count, not both",
        ),
        (
            ["evaluator.on_devices={count=3, fraction=0.5}"],
            "needs either a fraction of the devices or their count, not both",
        ),
        (["evaluator.on_devices={count=3, min_devices=5}"], "count = 3 is below min_devices = 5"),
        ([ALL, "evaluator.per_device=last"], "leave out evaluator.per_device"),
        (
            ["run.stop={metric='devices_loss', patience=2}"],
            "is measured by the devices: also set evaluator.on_devices",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(None, keys)
