"""Local training: the papers' steps to the digit, exactly as many as asked, from one seed."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.core.errors import ConfigError, DataError, LayoutMismatch
from fedstream.core.layout import Model
from fedstream.trainer.batches import Minibatches
from fedstream.trainer.descent import solve
from fedstream.trainer.solvers import (
    Cancelled,
    DriftCorrected,
    LrSchedule,
    ParameterGroup,
    Proximal,
    Sgd,
    SolverSettings,
    Trained,
    Work,
)
from fedstream.trainer.task import Task, initial
from fedstream.trainer.vector import layout_of, load, read
from tests.trainer.stepping import work_of

DATA = Path(__file__).parents[1] / "data"
ANSWERS = json.loads((DATA / "known_answers_local.json").read_text())


def work(solver: SolverSettings | None = None, steps: int | None = 1, **more: Any) -> Work:
    return work_of(solver or Sgd(), steps=steps, **more)


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


def test_first_scaffold_task_is_sgd_and_keeps_the_mean_gradient() -> None:
    data = samples(7)
    plain, corrected = Point([1.0]), Point([1.0])
    solve(Quadratic(), plain, data, work(Sgd(lr=0.1), steps=4))
    trained = solve(Quadratic(), corrected, data, work(DriftCorrected(lr=0.1), steps=4))
    assert torch.equal(plain.x, corrected.x)
    assert trained.control == pytest.approx((1.0 - corrected.x.detach().numpy()) / 0.4)
    assert solve(Quadratic(), plain, data, work(Sgd())).control is None


def test_a_control_divides_by_the_rate_of_each_group() -> None:
    """One step of the full gradient: the control of SCAFFOLD's first task is the gradient."""
    task = Noisy()
    usual = DriftCorrected(lr=0.1, batch_size=0)
    grouped = DriftCorrected(
        lr=0.1, batch_size=0, groups=(ParameterGroup(parameters=("0.*",), lr=1.0),)
    )
    found = []
    for solver in (usual, grouped):
        module, model = task.model(), initial(task, seed=0)
        load(model, module)
        trained = task.train(module, task.device_data(0), work(solver))
        assert trained.control is not None
        found.append(trained.control)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "schedule",
    [
        {"kind": "OneCycleLR", "max_lr": 0.1, "total_steps": 9},
        {"kind": "CyclicLR", "base_lr": 0.1, "max_lr": 0.2},
    ],
)
def test_a_schedule_brings_no_momentum_to_scaffold(schedule: dict[str, Any]) -> None:
    task, solver = Noisy(), DriftCorrected(lr=0.1, lr_scheduler=LrSchedule(**schedule))
    with pytest.raises(ConfigError, match="momentum"):
        task.train(task.model(), task.device_data(0), work(solver))


def test_controls_are_of_the_trained_parameters_alone() -> None:
    task = Noisy()
    module = task.model()
    module[0].weight.requires_grad_(requires_grad=False)  # type: ignore[index]
    count = layout_of(module).parameters
    before = module[0].weight.detach().clone()  # type: ignore[index]
    control = np.arange(count, dtype=np.float32)
    control.flags.writeable = False  # as it comes from elsewhere
    trained = task.train(module, task.device_data(0), work(DriftCorrected(), control=control))
    assert trained.control is not None
    assert trained.control.shape == (count,)
    assert trained.control.dtype == np.float32
    assert count == sum(x.numel() for x in module.parameters() if x.requires_grad)
    assert trained.control[-3:].all()
    assert torch.equal(module[0].weight, before)  # type: ignore[index]
    with pytest.raises(LayoutMismatch, match=r"shape \(5,\) for a model of \d+ trained parameters"):
        task.train(module, task.device_data(0), work(DriftCorrected(), control=control[:5]))


class Torchs(Noisy):
    """Training by torch.optim and torch.nn.utils, on the rows that ours takes."""

    def __init__(self, solver: Sgd) -> None:
        self.solver = solver
        self.batches: list[Any] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.batches.append(batch)
        return super().loss(model, batch)

    def repeated(self, model: nn.Module, seed: int) -> None:
        solver = self.solver
        optimizer = torch.optim.SGD(
            model.parameters(), solver.lr, solver.momentum, weight_decay=solver.weight_decay
        )
        torch.manual_seed(seed)
        for batch in self.batches:
            optimizer.zero_grad()
            super().loss(model, batch).backward()  # type: ignore[no-untyped-call]
            if solver.clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), solver.clip_norm)
            optimizer.step()


@pytest.mark.parametrize(
    "solver",
    [
        Sgd(),
        Sgd(momentum=0.9),
        Sgd(weight_decay=0.1),
        Sgd(clip_norm=0.25),
        Sgd(clip_norm=100.0),
        Sgd(momentum=0.5, weight_decay=0.01, clip_norm=0.5, sampling="fresh"),
    ],
    ids=str,
)
def test_options_match_torchs(solver: Sgd) -> None:
    task = Torchs(solver.model_copy(update={"batch_size": 8, "lr": 0.1}))
    ours, theirs = task.model(), task.model()
    theirs.load_state_dict(ours.state_dict())
    task.train(ours, task.device_data(3), work(task.solver, steps=60))
    with torch.random.fork_rng(devices=[]):
        task.repeated(theirs, seed=5)
    for x, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


class Sum(nn.Module):
    """Two parameters whose gradients are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


def test_shared_gradients_are_clipped_once() -> None:
    class Shared(Quadratic):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            assert isinstance(model, Sum)
            return (model.a + model.b).sum()

    model = Sum()
    solve(Shared(), model, samples(1), work(Sgd(lr=1.0, clip_norm=2**-0.5)))
    assert (model.a.item(), model.b.item()) == pytest.approx((-0.5, -0.5), abs=1e-5)


class Rows(Quadratic):
    """Notes which samples each batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[int]] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.rows.append([int(b) for b in batch[1][:, 0]])
        return super().loss(model, batch)


def test_fresh_minibatches_have_no_repeated_samples() -> None:
    task = Rows()
    solver = Sgd(batch_size=3, sampling="fresh")
    result = solve(task, Point([0.0]), samples(7), work(solver, steps=2100))
    assert all(len(set(rows)) == 3 for rows in task.rows)
    assert result.steps == len(task.rows) == 2100
    drawn = np.bincount(np.concatenate(task.rows), minlength=7)
    assert np.abs(drawn - 900).max() < 5 * math.sqrt(2100 * 3 / 7 * 4 / 7)
    # unlike in passes, a sample may come twice within one
    assert any(set(a) & set(b) for a, b in zip(task.rows[::2], task.rows[1::2], strict=True))


@pytest.mark.parametrize("sampling", ["passes", "fresh"])
def test_rows_too_many_to_shuffle_are_drawn(
    sampling: Literal["passes", "fresh"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch, "randperm")  # it would take 8 GB
    solver = Sgd(batch_size=50, sampling=sampling)
    drawn = Minibatches(10**9, solver, 3)
    assert drawn.epoch == 20_000_000
    begun = [drawn.next() for _ in range(4)]
    assert all(0 <= int(rows.min()) < int(rows.max()) < 10**9 for rows in begun)
    assert len({int(row) for rows in begun for row in rows}) == 200
    place = drawn.place
    again = Minibatches(10**9, solver, 4)
    again.skip_to(*place)
    assert torch.equal(again.next(), drawn.next())


class Clock(Quadratic):
    """Each step takes two seconds, by a clock that nothing else moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 100.0
        monkeypatch.setattr("fedstream.trainer.descent.time.monotonic", lambda: self.now)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.now += 2.0
        return super().loss(model, batch)


@pytest.mark.parametrize(("seconds", "steps"), [(0.1, 1), (2.0, 1), (2.1, 2), (10.0, 5)])
def test_time_budget_ends_with_the_step_that_exhausts_it(
    seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Clock(monkeypatch)
    piece = work(DriftCorrected(lr=0.1), steps=None, seconds=seconds)
    model = Point([1.0])
    result = solve(task, model, samples(4), piece)
    assert result.steps == len(task.batches) == steps
    assert result.control == pytest.approx((1 - model.x.item()) / (steps * 0.1))


def test_resumed_time_budget_counts_earlier_time(monkeypatch: pytest.MonkeyPatch) -> None:
    task, asked = Clock(monkeypatch), count(1)
    piece = work(steps=None, seconds=9.0, cancelled=lambda: next(asked) == 4)
    with pytest.raises(Cancelled) as stopped:
        solve(task, Point([0.0]), samples(4), piece)
    task.now += 1000.0  # nobody trains
    assert stopped.value.workspace is not None
    assert stopped.value.workspace.seconds == 6.0
    result = solve(task, Point([0.0]), samples(4), replace(piece, resume=stopped.value.workspace))
    assert result.steps == 5


def test_exactly_h_steps_in_shuffled_passes_with_a_smaller_last_batch() -> None:
    task = Quadratic()
    result = solve(task, Point([0.0]), samples(8), work(Sgd(batch_size=3), steps=5))
    assert task.batches == [3, 3, 2, 3, 3]
    assert (result.steps, result.samples) == (5, 8)


def test_epochs_are_passes_with_each_sample_once() -> None:
    task = Quadratic()
    model = Point([0.0])
    lr = 1e-3  # small enough that the sum of the steps is the sum over the samples
    result = solve(task, model, samples(7), work(Sgd(batch_size=1, lr=lr), steps=None, epochs=2))
    assert (result.steps, task.batches) == (14, [1] * 14)
    assert model.x.item() == pytest.approx(2 * lr * sum(range(7)), rel=0.02)


@pytest.mark.parametrize("batch_size", [0, 7, 50])
def test_zero_or_large_batch_size_uses_the_full_gradient(batch_size: int) -> None:
    task = Quadratic()
    model = Point([0.0])
    result = solve(task, model, samples(7), work(Sgd(batch_size=batch_size, lr=0.5), steps=2))
    assert task.batches == [7, 7]
    assert model.x.item() == pytest.approx(0.75 * 3)  # half the way to the mean, twice
    losses = [sum((i - x) ** 2 / 2 for i in range(7)) / 7 for x in (0.0, 1.5)]
    assert result.loss == pytest.approx(sum(losses) / 2)


def test_training_is_deterministic_and_leaves_torchs_generator_alone() -> None:
    task, piece = Noisy(), work(Proximal(batch_size=8), steps=9)
    torch.manual_seed(1)
    first, result = task.trained(piece)
    torch.manual_seed(2)
    again, same = task.trained(piece)
    assert (first.digest(), result) == (again.digest(), same)
    assert first.digest() != task.trained(replace(piece, seed=6))[0].digest()


def test_training_changes_batchnorm_statistics_and_only_trainable_parameters() -> None:
    task = Noisy()
    module = task.model()
    before, after = Model(layout_of(module)), Model(layout_of(module))
    module[0].weight.requires_grad_(requires_grad=False)  # type: ignore[index]
    read(module, before)
    task.train(module.eval(), task.device_data(0), work(steps=3))  # it is put into training mode
    read(module, after)
    old, new = before.tensors(), after.tensors()
    same = {name for name in old if np.array_equal(old[name], new[name])}
    same -= {"0.bias"}  # BatchNorm takes it out again: rounding alone moves it, or nothing does
    assert same == {"0.weight"}
    assert new["1.num_batches_tracked"] == 3


class AsItems(Dataset[Any]):
    """The same samples as a TensorDataset, item by item."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        return self.data[row]


def test_gathering_by_index_equals_collating() -> None:
    data = Noisy().device_data(1)
    rows = torch.tensor([4, 0, 29])
    task = Noisy()
    fast, slow = task.gather(data, rows), task.gather(AsItems(data), rows)
    assert type(fast) is type(slow)
    assert all(torch.equal(a, b) for a, b in zip(fast, slow, strict=True))


def test_cancellation_takes_effect_at_the_next_batch() -> None:
    task, asked = Quadratic(), count(1)
    with pytest.raises(Cancelled):
        solve(task, Point([0.0]), samples(4), work(steps=9, cancelled=lambda: next(asked) > 2))
    assert len(task.batches) == 2


def test_non_finite_loss_is_left_to_the_updater() -> None:
    model = Point([1e30])
    result = solve(Quadratic(), model, samples(4), work(Sgd(lr=10.0), steps=5))
    assert result.steps == 5
    assert result.loss is not None
    assert not math.isfinite(result.loss)


class Endless(Dataset[Any]):
    def __getitem__(self, row: int) -> Any:
        return row


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (TensorDataset(torch.zeros(0, 4), torch.zeros(0)), "device 3 has no data"),
        (Endless(), r"device 3: device_data\(\) returned Endless, which has no length"),
        (TensorDataset(torch.zeros(5, 4)), r"device 3: the default loss .* items \(x, y\)"),
        (AsItems(TensorDataset(torch.zeros(5, 4))), r"device 3: the default loss"),
        ([(None, 1)], "device 3: cannot form a batch from items of the data set"),
    ],
)
def test_unsuitable_data_names_the_device(data: Dataset[Any], words: str) -> None:
    task = Noisy()
    with pytest.raises(DataError, match=words):
        task.train(task.model(), data, work())


def test_model_without_trainable_parameters_is_rejected() -> None:
    model = Point([0.0]).requires_grad_(requires_grad=False)
    with pytest.raises(ConfigError, match="nothing to train"):
        solve(Quadratic(), model, samples(1), work())


@pytest.mark.parametrize(
    ("steps", "epochs", "seconds"),
    [
        (None, None, None),
        (1, 1, None),
        (0, None, None),
        (None, None, math.nan),
    ],
)
def test_work_needs_exactly_one_length(
    steps: int | None, epochs: int | None, seconds: float | None
) -> None:
    with pytest.raises(ConfigError, match="exactly one of them"):
        work(steps=steps, epochs=epochs, seconds=seconds)


SOLVER: TypeAdapter[SolverSettings] = TypeAdapter(SolverSettings)


def test_solver_options_depend_on_the_kind() -> None:
    assert SOLVER.validate_python({"kind": "proximal", "rho": 0.3}) == Proximal(rho=0.3)
    assert SOLVER.validate_python({"kind": "scaffold", "weight_decay": 0.1}) == DriftCorrected(
        weight_decay=0.1
    )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"kind": "sgd", "rho": 0.3}, r"rho\n.*not permitted"),
        ({"kind": "proximal", "rho": -0.1}, r"rho\n.*greater than or equal to 0"),
        ({"momentum": 1.0}, r"momentum\n.*less than 1"),
        ({"clip_norm": 0.0}, r"clip_norm\n.*greater than 0"),
        ({"sampling": "bootstrap"}, r"sampling\n.*'passes' or 'fresh'"),
        (
            {"kind": "scaffold", "momentum": 0.9},
            "momentum = 0.9 does not work with kind = scaffold",
        ),
    ],
)
def test_invalid_solver_settings_are_rejected(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        SOLVER.validate_python({"kind": "sgd"} | settings)
