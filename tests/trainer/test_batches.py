"""How rows become batches: the last one of a pass, a task's own collate, and evaluation."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

from fedstream.core.errors import ConfigError, DataError
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.batches import Minibatches, pass_sizes
from fedstream.trainer.solvers import Sgd
from fedstream.trainer.task import Task, measured


@pytest.mark.parametrize(
    ("samples", "batch", "drop_last", "sizes"),
    [
        (32, 8, False, [8] * 4),
        (35, 8, False, [8, 8, 8, 8, 3]),
        (33, 8, False, [8, 8, 8, 9]),
        (33, 8, True, [8] * 4),
        (35, 8, True, [8] * 4),
        (5, 8, True, [5]),
        (1, 8, False, [1]),
        (3, 1, False, [1, 1, 1]),
        (3, 0, False, [3]),
    ],
)
def test_sizes_of_a_pass(samples: int, batch: int, drop_last: bool, sizes: list[int]) -> None:
    solver = Sgd(batch_size=batch, drop_last=drop_last)
    assert pass_sizes(samples, solver) == sizes
    drawn = Minibatches(samples, solver, seed=0)
    for _ in range(2):
        rows = [drawn.next() for _ in range(drawn.epoch)]
        assert [len(one) for one in rows] == sizes
        assert len({*torch.cat(rows).tolist()}) == sum(sizes)  # no row twice in a pass


class Normed(Task):
    """Batches of 32 leave one of a device's 33 rows over; batch norm refuses a single row."""

    devices = 4

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def device_data(self, device: int) -> TensorDataset:
        x = torch.randn(33, 5, generator=torch.Generator().manual_seed(device))
        return TensorDataset(x, (x[:, 0] > 0).long())

    def test_data(self) -> TensorDataset:
        return self.device_data(99)


def test_batch_norm_trains_on_a_device_with_a_row_left_over() -> None:
    settings = read(None, ["run.versions=8", "solver.batch_size=32"])
    assert simulate(settings, Normed()).refused == {}


class Sentences(Dataset[Any]):
    """Words of sentences of different lengths, and a class each."""

    def __init__(self, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 9, (30,), generator=draws).tolist()
        self._rows = [torch.randint(1, 20, (length,), generator=draws) for length in lengths]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self._rows[row], int(self._rows[row][0] > 9)


class Unpadded(Task):
    devices = 4

    def model(self) -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(20, 8, padding_idx=0), nn.Linear(8, 2))

    def device_data(self, device: int) -> Dataset[Any]:
        return Sentences(device)

    def test_data(self) -> Dataset[Any]:
        return Sentences(99)


class Padded(Unpadded):
    def collate(self, items: list[Any]) -> Any:
        sentences, classes = zip(*items, strict=True)
        return [pad_sequence(list(sentences), batch_first=True), torch.tensor(classes)]


def test_a_task_collates_its_items_in_training_and_evaluation() -> None:
    settings = read(None, ["run.versions=8"])
    assert simulate(settings, Padded()).measured[-1].metrics.keys() == {"accuracy", "loss"}
    with pytest.raises((DataError, ConfigError), match=r"define the task's own collate\(items\)"):
        simulate(settings, Unpadded())


class Reversing(Normed):
    def collate(self, items: list[Any]) -> Any:
        x, y = zip(*items, strict=True)
        return [torch.stack(x) * 0, torch.tensor(y)]


def test_an_own_collate_is_used_for_tensors_too() -> None:
    """They are indexed otherwise, which passes by the items."""
    task, model = Reversing(), nn.Linear(5, 2, bias=False)
    loss = measured(task, model, task.device_data(0))["loss"]
    assert loss == pytest.approx(math.log(2))


class Widest(Normed):
    """Notes the largest batch that the model sees in evaluation."""

    def __init__(self) -> None:
        self.widest = 0

    def model(self) -> nn.Module:
        model = nn.Linear(5, 2)
        model.register_forward_hook(self._seen)
        return model

    def _seen(self, model: nn.Module, given: tuple[torch.Tensor], _out: torch.Tensor) -> None:
        if not model.training:
            self.widest = max(self.widest, len(given[0]))


def test_evaluation_takes_batches_of_the_configured_size(tmp_path: Path) -> None:
    from fedstream.settings.services import task_of

    program = tmp_path / "widest.py"
    program.write_text("from tests.trainer.test_batches import Widest\ntask = Widest()\n")
    settings = read(None, [f"task.name={program}:task", "run.versions=2"])
    for size, widest in ((None, 33), (7, 7)):
        sets = [] if size is None else [f"evaluator.batch_size={size}"]
        settings = read(None, [f"task.name={program}:task", "run.versions=2", *sets])
        task = task_of(settings)
        assert isinstance(task, Widest)
        simulate(settings, task)
        assert task.widest == widest
        task.widest = 0
