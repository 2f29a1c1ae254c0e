"""How rows become batches: the last one of a pass, a task's own collate, and evaluation."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from fedstream.core.errors import ConfigError, DataError
from fedstream.settings.config import read
from fedstream.simulation import simulate
from fedstream.trainer.batches import Minibatches
from fedstream.trainer.data import seeded
from fedstream.trainer.solvers import Cancelled, Sgd, Work, pass_sizes
from fedstream.trainer.task import Task, measured
from fedstream.trainer.workspace import Workspace
from tests.trainer.stepping import work_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


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

    def device_data(self, device: int) -> Dataset[Any]:
        x = torch.randn(33, 5, generator=torch.Generator().manual_seed(device))
        return TensorDataset(x, (x[:, 0] > 0).long())

    def test_data(self) -> Dataset[Any] | None:
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


class Augmented(Dataset[Any]):
    """Each read of a row draws from the three global generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        scale = random.random() + np.random.rand() + float(torch.rand(()))
        return torch.full((5,), row * scale), row % 2


class Augmenting(Normed):
    def device_data(self, device: int) -> Dataset[Any]:
        return Augmented()


def bits(task: Task, piece: Work) -> list[bytes]:
    """The parameters of a fresh model that a task has trained."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 2), nn.Dropout(0.2))
    task.train(model, task.device_data(piece.device), piece)
    return [x.detach().numpy().tobytes() for x in model.parameters()]


def stopped(task: Task, piece: Work, asks: int = 2) -> Workspace:
    """The workspace of a task that is interrupted when it asks for the third time.

    It asks before each step, and before each batch that is loaded again.
    """
    asked = count()
    with pytest.raises(Cancelled) as caught:
        bits(task, replace(piece, cancelled=lambda: next(asked) == asks))
    assert caught.value.workspace is not None
    return Workspace.decode(caught.value.workspace.encode())


class Stream(IterableDataset[Any]):
    """Items without end or length; here they end, so that the next pass begins."""

    def __init__(self, items: int) -> None:
        self._items = items

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for n in range(self._items):
            yield torch.rand(5) * random.random(), n % 2


class Streaming(Normed):
    items = 10

    def device_data(self, device: int) -> Dataset[Any]:
        return Stream(self.items)

    def test_data(self) -> None:
        return None

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 2))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.process)])
@pytest.mark.parametrize("task", [Augmenting(), Streaming()], ids=["rows", "stream"])
def test_one_seed_gives_the_same_bits_whatever_draws(task: Task, workers: int) -> None:
    """Other code may draw in between, and the task may be interrupted."""
    piece = work_of(Sgd(batch_size=4, workers=workers), steps=7)
    first = bits(task, piece)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    assert bits(task, piece) == first != bits(task, replace(piece, seed=6))
    first_saved, again = stopped(task, piece), 2 if isinstance(task, Streaming) or workers else 0
    saved = stopped(task, replace(piece, resume=first_saved), asks=2 + again)
    assert saved.step == 4
    assert bits(task, replace(piece, resume=saved)) == first
    after = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    assert after == before


def test_simulated_augmentation_is_repeatable() -> None:
    settings = read(None, ["run.versions=6", "solver.batch_size=8"])
    one, other = simulate(settings, Augmenting()), simulate(settings, Augmenting())
    assert one.model.digest() == other.model.digest()


def test_a_stream_is_trained_by_steps_and_counts_its_samples() -> None:
    task = Streaming()
    trained = task.train(task.model(), task.device_data(0), work_of(Sgd(batch_size=4), steps=5))
    assert (trained.steps, trained.samples) == (5, 18)  # the last batch of a pass has two
    with pytest.raises(ConfigError, match="has no length: epochs needs a map-style data set"):
        bits(task, work_of(Sgd(batch_size=4), steps=None, epochs=1))
    with pytest.raises(ConfigError, match="batch_size = 0 needs"):
        bits(task, work_of(Sgd(batch_size=0), steps=1))
    task.items = 0
    with pytest.raises(DataError, match=r"device 3: the stream of device_data\(\) gives no batch"):
        bits(task, work_of(Sgd(batch_size=4), steps=1))
    settings = read(None, ["run.versions=4", "solver.batch_size=4", "scheduler.steps.kind=fixed"])
    assert simulate(settings, Streaming()).refused == {}


class Weighted(Normed):
    """Draws only rows of the second class, in batches of what the sampler gives."""

    def sampler(self, data: Dataset[Any], generator: torch.Generator) -> Iterable[int]:
        assert isinstance(data, TensorDataset)
        weights = data.tensors[1].double()
        return WeightedRandomSampler(weights.tolist(), 20, generator=generator)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        assert batch[1].all()
        return super().loss(model, batch)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.process)])
def test_a_tasks_sampler_gives_the_rows_of_a_pass(workers: int) -> None:
    task, solver = Weighted(), Sgd(batch_size=8, workers=workers)
    trained = task.train(
        nn.Linear(5, 2), task.device_data(0), work_of(solver, epochs=2, steps=None)
    )
    assert (trained.steps, trained.samples) == (6, 33)
    piece = work_of(solver, steps=7)
    assert bits(task, replace(piece, resume=stopped(task, piece))) == bits(task, piece)


class Wrong(Normed):
    def __init__(self, rows: Any) -> None:
        self._given = rows

    def sampler(self, data: Dataset[Any], generator: torch.Generator) -> Any:
        return self._given


@pytest.mark.parametrize("rows", [[], [33], [-1], [[0, 1]], torch.zeros(0), np.array([[1]])])
def test_a_wrong_sampler_is_named(rows: Any) -> None:
    with pytest.raises(
        DataError, match=r"device 3: sampler\(\) must give row numbers from 0 to 32"
    ):
        bits(Wrong(rows), work_of(Sgd(), steps=1))


def test_a_sampler_may_give_a_tensor() -> None:
    assert bits(Wrong(torch.arange(33)), work_of(Sgd(batch_size=33), steps=1))
