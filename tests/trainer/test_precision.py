"""bfloat16 is measured against float32 once, before anything trains in it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from fedstream.core.layout import Model
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.learner import Learner
from fedstream.trainer.precision import Precision
from fedstream.trainer.task import initial
from fedstream.trainer.workspace import Start
from tests.trainer.stepping import work_of
from tests.trainer.test_parity import Kind, solver_of

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset, TensorDataset

    from fedstream.trainer.solvers import Trained, Work

DEVICES = 4


class Timed(Kind):
    """A task with dropout and batch norm, whose steps take as many seconds as a test wants."""

    devices = DEVICES

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
        super().__init__("convolution with batch norm")
        self.seconds, self.now, self.trained = seconds, 0.0, list[str]()
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr("fedstream.trainer.precision.time", clock)

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        self.trained.append(work.solver.precision)
        self.now += self.seconds[work.solver.precision] * (work.steps or 1)
        return super().train(model, data, work)

    def device_data(self, device: int) -> TensorDataset:
        return self.data


LAST = "channels_last=true"
BF16 = work_of(solver_of("sgd", "precision=bf16", LAST), steps=3)
FLOAT32 = replace(BF16, solver=solver_of("sgd", LAST))


def test_float32_replaces_a_slower_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    task, said = Timed(monkeypatch, float32=0.05, bf16=0.1), list[str]()
    model, precision = task.model(), Precision(task, said.append)
    before = [x.clone() for x in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    assert precision.settled(BF16, model, task.data) == FLOAT32
    line = "solver.precision = bf16 is slower here: a step takes 100 ms, in float32 50 ms"
    assert said == [f"{line}; training in float32"]
    assert task.trained == ["float32", "bf16"] * 5
    assert all(map(torch.equal, (*model.parameters(), *model.buffers()), before))
    assert torch.equal(state, torch.get_rng_state())
    assert precision.settled(BF16, model, task.data) == FLOAT32
    assert (len(task.trained), len(said)) == (10, 1)  # measured once, and told once


def test_a_faster_bfloat16_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    task, said = Timed(monkeypatch, float32=0.1, bf16=0.05), list[str]()
    precision, model = Precision(task, said.append), task.model()
    for _ in range(2):
        assert precision.settled(BF16, model, task.data) == BF16
    assert (len(task.trained), said) == (10, [])


def test_what_asks_for_float32_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Timed(monkeypatch)
    work = work_of(solver_of("sgd"), steps=3)
    assert Precision(task, print).settled(work, task.model(), task.data) is work
    task.exact_steps = False  # type: ignore[misc]  # of this object
    assert Precision(task, print).settled(BF16, task.model(), task.data) == BF16
    assert task.trained == []


def test_a_very_slow_bfloat16_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Timed(monkeypatch, float32=0.5, bf16=7.0)
    precision = Precision(task, lambda _: None)
    assert precision.settled(BF16, task.model(), task.data) == FLOAT32
    assert task.trained == ["float32", "bf16"]


def test_an_interrupted_measurement_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Timed(monkeypatch, float32=0.05, bf16=0.1)
    precision, model = Precision(task, pytest.fail), task.model()
    calls = iter([False, False, False, False, True, True])
    work = replace(BF16, cancelled=lambda: next(calls))
    assert precision.settled(work, model, task.data) is work
    said = list[str]()
    monkeypatch.setattr(precision, "_say", said.append)
    assert precision.settled(BF16, model, task.data) == FLOAT32
    assert len(said) == 1


@pytest.mark.parametrize(("slow", "used"), [("bf16", "float32"), ("float32", "bf16")])
def test_trainers_and_simulations_use_the_faster(
    slow: str, used: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task, said = Timed(monkeypatch, **({"float32": 0.1, "bf16": 0.1} | {slow: 0.2})), list[str]()
    learner, x_0 = Learner(lambda: task, 1, "cpu", said.append), initial(task, 0)
    start, into = Start(0, x_0.digest(), x_0), Model(x_0.layout)
    learner.train(start, BF16, into, "model")
    assert task.trained[10:] == [used]
    task.trained.clear()
    keys = ("run.versions=3", "run.dry_step=false", "solver.precision=bf16")
    simulate(read(None, [*keys, "solver.batch_size=6", "simulation.threads=1"]), task)
    assert task.trained[10:] == [used] * 3
    assert said == [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(said) == (used == "float32")
