"""Local training: the papers' steps to the digit, exactly as many as asked, from one seed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from broker.errors import ConfigError, DataError
from broker.layout import Model
from trainer.solvers import Cancelled, Proximal, Sgd, SolverSettings, Trained, Work, gather, solve
from trainer.task import Task
from trainer.vector import initial, layout_of, load, read

ANSWERS = json.loads((Path(__file__).parents[1] / "data/known_answers_local.json").read_text())


def work(solver: SolverSettings | None = None, steps: int | None = 1, **more: Any) -> Work:
    given: dict[str, Any] = {
        "device": 3,
        "task": "t",
        "version": 0,
        "seed": 5,
        "steps": steps,
        "epochs": None,
        "solver": solver or Sgd(),
        "cancelled": lambda: False,
    }
    return Work(**(given | more))


class Point(nn.Module):
    """A model that is one vector x."""

    def __init__(self, x: list[float]) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor(x))


class Quadratic(Task):
    """f(x) = sum h (x - b)^2 / 2, with the gradient h (x - b); each sample is one (h, b)."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def model(self) -> nn.Module:
        return Point([0.0])

    def device_data(self, device: int) -> TensorDataset:
        raise AssertionError("these tests bring their own data")

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        h: Tensor = batch[0]
        b: Tensor = batch[1]
        self.batches.append(len(h))
        assert isinstance(model, Point)
        return (h * (model.x - b) ** 2 / 2).sum(1).mean()


def samples(rows: int) -> TensorDataset:
    return TensorDataset(torch.ones(rows, 1), torch.arange(float(rows)).unsqueeze(1))


class Noisy(Task):
    """Classification with everything that could disturb repetition: dropout and BatchNorm."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3)
        )

    def device_data(self, device: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(device)
        return TensorDataset(
            torch.randn(30, 4, generator=generator),
            torch.randint(3, (30,), generator=generator),
        )

    def trained(self, piece: Work) -> tuple[Model, Trained]:
        model, module = initial(self, seed=0), self.model()
        load(model, module)
        state = torch.get_rng_state()
        result = self.train(module, self.device_data(piece.device), piece)
        assert torch.equal(torch.get_rng_state(), state)
        read(module, model)
        return model, result


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer["solver"].split()[0])
def test_known_answers(answer: dict[str, Any]) -> None:
    """Among others: the proximal term pulls towards x_tau, not towards the current x (zero)."""
    rho, lr = answer["rho"], answer["local_lr"]
    solver = Proximal(rho=rho, lr=lr) if rho else Sgd(lr=lr)
    data = TensorDataset(torch.tensor([answer["h"]]), torch.tensor([answer["b"]]))
    model = Point(answer["x_received"])
    solve(Quadratic(), model, data, work(solver, steps=answer["local_steps"]))
    expected = np.array(answer["x_new"])
    error = np.abs(model.x.detach().numpy() - expected).max()
    assert error <= 1e-5 * np.abs(expected).max()


def test_exactly_h_steps_in_shuffled_passes_that_keep_the_smaller_last_batch() -> None:
    task = Quadratic()
    result = solve(task, Point([0.0]), samples(7), work(Sgd(batch_size=3), steps=5))
    assert task.batches == [3, 3, 1, 3, 3]
    assert (result.steps, result.samples) == (5, 7)


def test_epochs_are_whole_passes_and_each_sample_comes_once_in_a_pass() -> None:
    task = Quadratic()
    model = Point([0.0])
    lr = 1e-3  # small enough that the sum of the steps is the sum over the samples
    result = solve(task, model, samples(7), work(Sgd(batch_size=1, lr=lr), steps=None, epochs=2))
    assert (result.steps, task.batches) == (14, [1] * 14)
    assert model.x.item() == pytest.approx(2 * lr * sum(range(7)), rel=0.02)


@pytest.mark.parametrize("batch_size", [0, 7, 50])
def test_batch_size_zero_or_large_is_the_full_gradient(batch_size: int) -> None:
    task = Quadratic()
    model = Point([0.0])
    result = solve(task, model, samples(7), work(Sgd(batch_size=batch_size, lr=0.5), steps=2))
    assert task.batches == [7, 7]
    assert model.x.item() == pytest.approx(0.75 * 3)  # half the way to the mean, twice
    losses = [sum((i - x) ** 2 / 2 for i in range(7)) / 7 for x in (0.0, 1.5)]
    assert result.loss == pytest.approx(sum(losses) / 2)


def test_the_same_work_gives_the_same_bits_and_leaves_torchs_generator_alone() -> None:
    task, piece = Noisy(), work(Proximal(batch_size=8), steps=9)
    torch.manual_seed(1)
    first, result = task.trained(piece)
    torch.manual_seed(2)
    again, same = task.trained(piece)
    assert (first.digest(), result) == (again.digest(), same)
    assert first.digest() != task.trained(replace(piece, seed=6))[0].digest()


def test_training_moves_batchnorm_statistics_but_only_trainable_parameters() -> None:
    task = Noisy()
    module = task.model()
    module[0].weight.requires_grad_(requires_grad=False)  # type: ignore[index]
    before, after = Model(layout_of(module)), Model(layout_of(module))
    read(module, before)
    task.train(module.eval(), task.device_data(0), work(steps=3))  # it is put into training mode
    read(module, after)
    old, new = before.tensors(), after.tensors()
    assert [name for name in old if np.array_equal(old[name], new[name])] == ["0.weight"]
    assert new["1.num_batches_tracked"] == 3


class AsItems(Dataset[Any]):
    """The same samples as a TensorDataset, item by item."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        return self.data[row]


def test_gathering_by_index_gives_what_collating_gives() -> None:
    data = Noisy().device_data(1)
    rows = torch.tensor([4, 0, 29])
    fast, slow = gather(data, rows), gather(AsItems(data), rows)
    assert type(fast) is type(slow)
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))


def test_cancelled_at_the_next_batch() -> None:
    task, asked = Quadratic(), count(1)
    with pytest.raises(Cancelled):
        solve(task, Point([0.0]), samples(4), work(steps=9, cancelled=lambda: next(asked) > 2))
    assert len(task.batches) == 2


def test_a_loss_that_is_not_finite_is_left_to_the_updater() -> None:
    model = Point([1e30])
    result = solve(Quadratic(), model, samples(4), work(Sgd(lr=10.0), steps=5))
    assert result.steps == 5
    assert not math.isfinite(result.loss)


class Endless(Dataset[Any]):
    def __getitem__(self, row: int) -> Any:
        return row


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0)), "device 3 has no data"),
        (Endless(), "device 3: its data has no length"),
        (TensorDataset(torch.zeros(5, 4)), r"device 3: the default loss .* items are \(x, y\)"),
        (AsItems(TensorDataset(torch.zeros(5, 4))), r"device 3: the default loss"),
        ([(None, 1)], "device 3: items of the data set do not make a batch"),
    ],
)
def test_data_that_does_not_fit_names_the_device(data: Dataset[Any], words: str) -> None:
    task = Noisy()
    with pytest.raises(DataError, match=words):
        task.train(task.model(), data, work())


@pytest.mark.parametrize(("steps", "epochs"), [(None, None), (1, 1), (0, None), (None, 0)])
def test_work_is_either_steps_or_epochs(steps: int | None, epochs: int | None) -> None:
    with pytest.raises(ConfigError, match="exactly one of them"):
        work(steps=steps, epochs=epochs)


def test_rho_belongs_to_the_proximal_solver_and_sgd_is_what_no_kind_means() -> None:
    solver: TypeAdapter[SolverSettings] = TypeAdapter(SolverSettings)
    assert solver.validate_python({"kind": "proximal", "rho": 0.3}) == Proximal(rho=0.3)
    assert solver.validate_python({"lr": 0.5}) == Sgd(lr=0.5)
    with pytest.raises(ValidationError, match=r"rho\n.*not permitted"):
        solver.validate_python({"kind": "sgd", "rho": 0.3})
    with pytest.raises(ValidationError, match="kind must be sgd or proximal"):
        solver.validate_python({"kind": "adam"})
