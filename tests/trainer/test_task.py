"""What a task's defaults count, and how models are measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, one_hot
from torch.utils.data import Dataset, TensorDataset

from fedstream.core.errors import DataError
from fedstream.trainer.loading import load_task
from fedstream.trainer.on_devices import device_metrics, spread
from fedstream.trainer.solvers import Sgd, Work
from fedstream.trainer.task import Task, TaskSettings, measured


class Perfect(nn.Module):
    """Scores of shape (batch, 4, T) for x of shape (batch, T): each symbol is its own class."""

    def __init__(self, scale: float = 20.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * one_hot(x, 4).float().movedim(-1, 1)


class Tagging(Task):
    """Row n has n % 4 labels; the other positions are padding, labelled -100."""

    def model(self) -> nn.Module:
        return Perfect()

    def device_data(self, device: int) -> Dataset[Any]:
        return tagged(30)

    def device_test_data(self, device: int) -> Dataset[Any]:
        return tagged(1 if device == 0 else 8)  # device 0 has one row, of padding


def tagged(rows: int, wrong: int = 0) -> TensorDataset:
    x = torch.randint(4, (rows, 10), generator=torch.Generator().manual_seed(rows))
    y = x.clone()
    y[:wrong] = (y[:wrong] + 1) % 4
    for row in range(rows):
        y[row, row % 4 :] = -100
    return TensorDataset(x, y)


def test_positions_without_a_label_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tagging, "evaluation_batch", 3)
    task, model, data = Tagging(), Perfect(1.0), tagged(10, wrong=3)
    found = measured(task, model, data)
    x, y = data.tensors
    assert found == {
        "accuracy": 10 / 13,  # rows 0 to 9 have 0, 1, 2, 3, 0, 1, 2, 3, 0, 1 labels
        "loss": pytest.approx(cross_entropy(model(x), y).item(), rel=1e-6),
    }


def test_data_without_any_label_cannot_be_measured() -> None:
    with pytest.raises(DataError, match=r"nothing to evaluate: every label is -100"):
        measured(Tagging(), Perfect(), tagged(1))


def test_a_device_without_labels_is_not_served_worst() -> None:
    found = device_metrics(Tagging(), Perfect(), 3)
    assert sorted(found) == [1, 2]
    assert spread(found, {})["device_worst_tenth_accuracy"] == 1.0


def test_a_minibatch_without_labels_changes_neither_model_nor_reported_loss() -> None:
    task = Tagging()

    def trained(data: Dataset[Any]) -> tuple[float | None, float]:
        model = Perfect(1.0)
        work = Work(0, "task", 0, 0, 4, None, Sgd(lr=1.0, batch_size=1), lambda: False)
        return task.train(model, data, work).loss, model.scale.item()

    assert trained(tagged(1)) == (0.0, 1.0)
    loss, scale = trained(tagged(4))  # one row of four has no label
    assert loss is not None
    assert loss > 0
    assert scale > 1


class Dropping(Task):
    """metrics() of its own that leaves the model's mode, and gradients, to fedstream."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9), nn.BatchNorm1d(2))

    def device_data(self, device: int) -> Dataset[Any]:
        return TensorDataset(torch.zeros(1, 2), torch.zeros(1))

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        assert isinstance(data, TensorDataset)
        if not len(data):
            raise ValueError("empty")
        scores = model(data.tensors[0])
        return {
            "training": sum(part.training for part in model.modules()),
            "gradients": scores.requires_grad,
        }


def test_metrics_see_the_model_in_evaluation_mode_and_leave_it_as_it_was() -> None:
    task, rows = Dropping(), TensorDataset(torch.zeros(3, 2))
    model = task.model().train()
    model[2].eval()  # type: ignore[index]  # frozen by its user
    assert measured(task, model, rows) == {"training": 0.0, "gradients": 0.0}
    assert [part.training for part in model.modules()] == [True, True, True, False]
    with pytest.raises(ValueError, match="empty"):
        measured(task, model, TensorDataset(torch.zeros(0, 2)))
    assert [part.training for part in model.modules()] == [True, True, True, False]
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("outputs", "y"),
    [(1, torch.rand(6)), (1, torch.rand(6, 1, 1)), (3, torch.rand(6)), (None, torch.rand(6))],
)
def test_a_regression_is_told_to_bring_its_own_loss(outputs: int | None, y: torch.Tensor) -> None:
    """Cross entropy would take the numbers for probabilities, or raise torch's own error."""
    module = nn.Flatten(0) if outputs is None else nn.Linear(1, outputs)
    task, batch = load_task("digits", TaskSettings()), [torch.rand(6, 1), y]
    with pytest.raises(DataError, match=r"loss is that of classification.*override loss\(\)"):
        task.loss(module, batch)
    with pytest.raises(DataError, match=r"metrics is that of.*override metrics\(\)"):
        task.metrics(module, TensorDataset(*batch))


def test_the_default_loss_takes_probabilities_of_classes() -> None:
    task, soft = load_task("digits", TaskSettings()), torch.tensor([[0.25, 0.75]])
    module = nn.Linear(1, 2).requires_grad_(requires_grad=False)
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    assert float(task.loss(module, [torch.rand(1, 1), soft])) == pytest.approx(0.693147, rel=1e-5)
