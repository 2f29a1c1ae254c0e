"""A task that cannot work is reported before anything starts, in the same way by every command."""

from __future__ import annotations

import asyncio
import random
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker.keys import Keys
from fedstream.core.errors import ConfigError, TaskError
from fedstream.settings import services
from fedstream.settings.config import Settings, read
from fedstream.settings.dry_step import try_task
from fedstream.simulation import simulate
from fedstream.trainer.solvers import Cancelled, Trained, Work
from fedstream.trainer.task import Task


def rows(seed: int, number: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(number, 4, generator=generator), torch.arange(number) % 3)


class Sound(Task):
    """A task that works; the others have one thing wrong."""

    devices = 5

    def model(self) -> nn.Module:
        return nn.Linear(4, 3)

    def device_data(self, device: int) -> Dataset[Any]:
        return rows(device)

    def test_data(self) -> Dataset[Any] | None:
        return rows(99)


class Counting(nn.Module):
    """Counts its calls, in a tensor of integers."""

    changing_integers: tuple[str, ...] = ()
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("mask", torch.ones(3, dtype=torch.int64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y: torch.Tensor = self.out(x)
        return y


class Counter(Sound):
    def model(self) -> nn.Module:
        return Counting()


class Thawing(Sound):
    """Trains a parameter that its model freezes."""

    def model(self) -> nn.Module:
        module = nn.Linear(4, 3)
        module.bias.requires_grad = False
        return module

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        model.requires_grad_(requires_grad=True)
        return super().train(model, data, work)


class NamedCounter(Sound):
    def model(self) -> nn.Module:
        module = Counting()
        module.changing_integers = ("calls",)
        return module


class NoParameters(Sound):
    def model(self) -> nn.Module:
        return nn.Flatten()


class OnlyBuffers(Sound):
    def model(self) -> nn.Module:
        return nn.BatchNorm1d(4, affine=False)


class MovedBuffers(OnlyBuffers):
    """Only buffers, which its own training moves."""

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        model.train()
        model(data[:][0])
        return Trained(1, 20, 0.5)


class AllFrozen(Sound):
    def model(self) -> nn.Module:
        return nn.Linear(4, 3).requires_grad_(False)


class Meta(Sound):
    def model(self) -> nn.Module:
        return nn.Linear(4, 3, device="meta")


class WrongShape(Sound):
    def model(self) -> nn.Module:
        return nn.Linear(5, 3)


class OneRow(Sound):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

    def device_data(self, device: int) -> Dataset[Any]:
        return rows(device, 1)


class Damaged(Dataset[Any]):
    """Rows that cannot be read."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        raise OSError("image file is truncated")


class AllDamaged(Sound):
    def device_data(self, device: int) -> Dataset[Any]:
        return Damaged()


class OneWorks(Sound):
    """The run goes on without all but its last device."""

    def device_data(self, device: int) -> Dataset[Any]:
        if device == 2:
            raise FileNotFoundError("device2.pt")
        return (Damaged(), rows(0, 0), None, Damaged(), rows(4))[device]  # type: ignore[return-value]


class Slow(Sound):
    """Its own training needs all rows, and passes over them."""

    def device_data(self, device: int) -> Dataset[Any]:
        return rows(device, 50_000)

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        assert len(data) == 50_000  # type: ignore[arg-type]  # it has a length
        while not work.cancelled():
            super().train(model, data, replace(work, epochs=None, steps=1))
        raise Cancelled


class DamagedTest(Sound):
    def test_data(self) -> Dataset[Any] | None:
        return Damaged()


class OwnMetrics(Sound):
    """Needs all of the test data."""

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        assert len(data) == 99  # type: ignore[arg-type]  # it has a length
        return {"half": 0.5}

    def test_data(self) -> Dataset[Any] | None:
        return rows(0, 99)


class OnDevices(Sound):
    """The last device's test data can't be read."""

    def device_test_data(self, device: int) -> Dataset[Any] | None:
        return rows(device) if device < 4 else Damaged()


class NoTestData(Sound):
    def test_data(self) -> Dataset[Any] | None:
        return None


class NotFinite(Sound):
    """A test row is NaN, as after a division by a deviation of 0."""

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return {"auc": float("nan"), "loss": float("inf")}


class OwnScore(Sound):
    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return {"score": 0.5}


class NumberAsMetrics(Sound):
    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return 0.5  # type: ignore[return-value]


class TensorAsMetric(Sound):
    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return {"accuracy": 0.5, "f1": torch.zeros(3)}  # type: ignore[dict-item]


class LossOfEach(Sound):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class NumberAsLoss(Sound):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch).item()  # type: ignore[return-value]


class OneTooMany(Sound):
    """Its partition is wrong by one."""

    def device_data(self, device: int) -> Dataset[Any]:
        return [rows(device) for device in range(4)][device]


class OwnEpochs(Sound):
    """Its own training, which only knows passes over the data."""

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        assert work.epochs is not None
        return self.descend(model, data, work)


class OwnRaises(Sound):
    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        async def fail() -> None:
            raise ValueError("no\nsuch layer")

        async def both() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())

        asyncio.run(both())
        raise AssertionError


def of(task: type[Task], *keys: str) -> Settings:
    return read(None, [f"task.name={__file__}:{task.__name__}", "run.versions=2", *keys])


WRONG = [
    (Thawing, r"training changed bias, which model\(\) freezes \(requires_grad = False\)"),
    (Counter, "training changes the integer tensor calls, .* changing_integers = \\('calls',\\)$"),
    (NoParameters, ": nothing to train: model\\(\\) has no parameters: return"),
    (OnlyBuffers, ": nothing to train: model\\(\\) has only buffers: return"),
    (AllFrozen, r"model\(\): all 2 parameters are frozen or local, such as weight: leave some"),
    (Meta, "model\\(\\): weight is on the device 'meta' .* make the model on the device 'cpu'$"),
    (WrongShape, r"device 0: RuntimeError: mat1 and mat2 .* \(20x4 and 5x3\) .*: correct the task"),
    (OneRow, "device 0: ValueError: Expected more than 1 value per channel when training"),
    (AllDamaged, "device 0: OSError: image file is truncated at .*: correct the task"),
    (DamagedTest, "test data: OSError: image file is truncated"),
    (NumberAsMetrics, r"metrics\(\) returned float: it must return a dict from names to numbers"),
    (TensorAsMetric, r"metrics\(\)\['f1'\] is not a number: "),
    (LossOfEach, r"device 0: loss\(\) returned a tensor of shape \(20,\): it must return a scalar"),
    (NumberAsLoss, r"device 0: loss\(\) returned float: it must return a scalar tensor"),
    (OwnRaises, "device 0: ValueError: no such layer at .*test_dry_step.py"),
]


@pytest.mark.parametrize(("task", "said"), WRONG, ids=lambda one: getattr(one, "__name__", ""))
def test_task_that_cannot_work_is_reported(task: type[Task], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        try_task(of(task), task(), 5, simulated=False)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "task",
    [NamedCounter, MovedBuffers, OneWorks, OwnMetrics, OwnEpochs, Slow],
    ids=lambda t: t.__name__,
)
def test_task_that_works_is_let_through(task: type[Task], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.settings.dry_step._TRY_S", 0.1)
    keys = ["scheduler.steps.kind=epochs"] if task is OwnEpochs else []
    assert try_task(of(task, *keys), task(), 5, simulated=False).test_data is not None


@pytest.mark.parametrize(
    ("task", "metric", "said"),
    [
        (Sound, "accurac", "'accurac': the task measures accuracy, loss; did you mean 'accuracy'?"),
        (Sound, "f1", "'f1': the task measures accuracy, loss"),
        (OwnScore, "scor", "'scor': the task measures score; did you mean 'score'?"),
        (NoTestData, "accuracy", "'accuracy': nothing is measured, as the task has no test data:"),
    ],
)
def test_a_run_does_not_wait_for_a_metric_that_is_not_measured(
    task: type[Task], metric: str, said: str
) -> None:
    keys = (f"run.stop.metric={metric}", "run.stop.patience=3")
    with pytest.raises(ConfigError, match="^run.stop.metric = " + re.escape(said)):
        try_task(of(task, *keys), task(), 5, simulated=False)


def test_a_metric_over_devices_is_one_that_the_devices_measure() -> None:
    keys = ("evaluator.per_device=always", "run.stop.patience=3")

    class AllReadable(OnDevices):
        def device_test_data(self, device: int) -> Dataset[Any] | None:
            return rows(device)

    stop = "run.stop.metric=device_mean_"
    try_task(of(OnDevices, *keys, f"{stop}accuracy"), AllReadable(), 5, simulated=False)
    with pytest.raises(ConfigError, match="did you mean 'device_mean_loss'"):
        try_task(of(OnDevices, *keys, f"{stop}los"), AllReadable(), 5, simulated=False)
    with pytest.raises(TaskError, match="test data of device 4: OSError"):
        try_task(of(OnDevices, *keys), OnDevices(), 5, simulated=False)


def test_a_metric_of_test_data_stands_for_that_of_the_devices() -> None:
    class Tested(NoTestData):
        def device_test_data(self, device: int) -> Dataset[Any] | None:
            return rows(device)

    keys = ("evaluator.on_devices.count=1", "run.stop.metric=loss", "run.stop.patience=3")
    with pytest.raises(ConfigError, match="did you mean 'devices_loss'"):
        try_task(of(Tested, *keys), Tested(), 5, simulated=False)


def test_an_evaluator_cannot_measure_devices_that_keep_layers() -> None:
    class Kept(OnDevices):
        local = ("bias",)

        def device_test_data(self, device: int) -> Dataset[Any] | None:
            return rows(device)

    settings = of(Kept, "evaluator.per_device=last")
    with pytest.raises(ConfigError, match=r"local tensors \(Task.local\): let the devices measure"):
        try_task(settings, Kept(), 5, simulated=False)
    try_task(settings, Kept(), 5, simulated=True)  # where devices and evaluator are one process


def test_a_stop_metric_needs_a_goal() -> None:
    settings = of(OwnScore, "run.stop.metric=score", "run.stop.patience=3")
    with pytest.raises(ConfigError, match=r"high score is good is unknown: set Task.goal = "):
        try_task(settings, OwnScore(), 5, simulated=False)


def test_metrics_that_are_not_finite_are_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    try_task(of(NotFinite), NotFinite(), 5, simulated=False)
    said = capsys.readouterr().err
    assert said.startswith("test data: no metric of the untrained model is finite (auc, loss): ")
    try_task(of(Sound), Sound(), 5, simulated=False)
    assert not capsys.readouterr().err


def test_the_last_device_is_tried_too(capsys: pytest.CaptureFixture[str]) -> None:
    try_task(of(OneTooMany), OneTooMany(), 5, simulated=False)
    said = capsys.readouterr().err
    assert said.startswith("device 0 works, but not the last: ")
    assert "device 4: IndexError: list index out of range at " in said


@pytest.mark.parametrize("key", ["trainer.device", "evaluator.device", "simulation.device"])
def test_missing_gpu_is_reported(key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key} = 'cuda': torch finds no CUDA device here"):
        simulate(of(Sound, f"{key}=cuda"), Sound())


def test_own_code_that_raises_is_shown_from_its_first_frame_on() -> None:
    with pytest.raises(TaskError) as raised:
        try_task(of(OwnRaises), OwnRaises(), 5, simulated=True)
    first, *frames, last = raised.value.trace.splitlines()
    assert first == "Traceback (most recent call last):"
    assert Path(__file__).name in frames[0]
    assert last == "ValueError: no such layer"
    with pytest.raises(TaskError) as raised:
        try_task(of(WrongShape), WrongShape(), 5, simulated=True)
    assert raised.value.trace == "", "no frame of it is the user's"


@pytest.mark.process
@pytest.mark.parametrize("command", ["run", "sweep"])
def test_commands_report_it_alike(command: str, tmp_path: Path, python: Path) -> None:
    out = tmp_path / "runs" / "out"
    options = {"sweep": ("--over", "solver.lr=0.1,0.2")}.get(command, ())
    asked = (command, "--task", f"{__file__}:AllDamaged", "--out", str(out), *options)
    done = subprocess.run(
        [python, "-m", "fedstream", *asked], capture_output=True, text=True, check=False
    )
    trace, frame, *_, said = done.stderr.splitlines()
    assert done.returncode == 2
    assert said.startswith(f"fedstream: task '{__file__}:AllDamaged': device 0: OSError: image")
    assert trace == "Traceback (most recent call last):"
    assert frame.endswith("in __getitem__"), "the user's first frame"
    if command != "sweep":  # which keeps its configurations
        assert not out.parent.exists()


def _load(build: Any, settings: Settings) -> Task:
    """Load the task as a service does at its start."""
    service, _ = build(settings, Keys("demo"), "one")
    task: Task = service._load()
    return task


@pytest.mark.parametrize(
    ("start", "task"),
    [
        (lambda settings: _load(services._trainer, settings), AllDamaged),
        (lambda settings: _load(services._evaluator, settings), DamagedTest),
        (services.create_run, Meta),
    ],
    ids=["trainer", "evaluator", "updater"],
)
def test_services_try_what_they_do(start: Callable[[Settings], Any], task: type[Task]) -> None:
    with pytest.raises(TaskError):
        start(of(task))
    start(of(Sound))


def test_it_can_be_switched_off() -> None:
    for task in (AllDamaged, DamagedTest):
        try_task(of(task, "run.dry_step=false"), task(), 5, simulated=False)


class Drawing(Sound):
    """Draws from every global generator, wherever it is asked."""

    seen: list[float]

    def model(self) -> nn.Module:
        random.random()
        np.random.random()
        return super().model()

    def test_data(self) -> Dataset[Any] | None:
        random.random()
        return super().test_data()

    def device_data(self, device: int) -> Dataset[Any]:
        np.random.random()
        return super().device_data(device)

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        self.seen += [random.random(), np.random.random(), float(torch.rand(()))]
        return super().train(model, data, work)


def test_random_numbers_are_those_of_a_run_without_it() -> None:
    drawn = []
    for keys in ((), ("run.dry_step=false",)):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        task = Drawing()
        task.seen = []
        found = simulate(of(Drawing, *keys), task)
        drawn.append((task.seen[-6:], found.model.digest()))
    assert drawn[0] == drawn[1]
