"""The minibatches of local training: their sizes, their order, and how they are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fedstream.core.errors import BadMessage, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fedstream.trainer.solvers import SolverSettings

    Order = Callable[[torch.Generator], Iterable[int]]


_MOST_SHUFFLED = 1 << 24  # rows: their order takes 128 MiB and a second
_MANY = 100  # minibatches in a pass: so few rows are hardly ever drawn twice


def is_drawn(samples: int, solver: SolverSettings) -> bool:
    """Whether rows are drawn with replacement, because there are too many to shuffle."""
    return samples > _MOST_SHUFFLED and _size(samples, solver) * _MANY <= samples


def _size(samples: int, solver: SolverSettings) -> int:
    return min(solver.batch_size or samples, samples)


def pass_sizes(samples: int, solver: SolverSettings) -> list[int]:
    """The sizes of the minibatches of one pass over ``samples`` rows, in their order.

    With ``fresh`` sampling, or if rows are drawn, a pass has one minibatch. Otherwise the rows left
    over form a smaller last minibatch, or are left out by ``drop_last``. A single row left over
    belongs to the minibatch before: batch norm has no statistics of one row.
    """
    size = _size(samples, solver)
    if solver.sampling == "fresh" or is_drawn(samples, solver):
        return [size]
    whole, left = divmod(samples, size)
    sizes = [size] * whole
    if left and not solver.drop_last:
        if left == 1:
            sizes[-1] += 1
        else:
            sizes.append(left)
    return sizes


def minibatches_in(samples: int, solver: SolverSettings) -> int:
    """The number of minibatches in one epoch over ``samples`` rows; 0 for a stream."""
    if not samples:
        return 0
    whole, left = divmod(samples, _size(samples, solver))
    if solver.sampling == "fresh" or is_drawn(samples, solver):
        return whole + (left > 0)
    return whole + (left > 1 and not solver.drop_last)


class Minibatches(Sampler[torch.Tensor]):
    """An endless sequence of minibatches, as row numbers.

    They are slices of shuffled passes (:func:`pass_sizes`). With ``fresh`` sampling, each pass
    ends after its first minibatch. So does a pass over more rows than can be shuffled at once:
    its rows are drawn with replacement. ``order``: gives the rows of a pass in place of a shuffle.
    """

    def __init__(
        self, samples: int, solver: SolverSettings, seed: int, order: Order | None = None
    ) -> None:
        self._samples, self._solver, self._order = samples, solver, order
        self._drawn = is_drawn(samples, solver)
        self._sizes = pass_sizes(samples, solver)
        self._used = sum(self._sizes)
        self._generator = torch.Generator().manual_seed(seed)
        self._shuffle()

    @property
    def epoch(self) -> int:
        """The number of minibatches in one epoch (:func:`minibatches_in`)."""
        return minibatches_in(self._samples, self._solver)

    @property
    def place(self) -> tuple[bytes, int]:
        """The generator's state before the current pass, and the count of minibatches taken."""
        return state_of(self._before), self._taken

    def skip_to(self, state: bytes, taken: int) -> None:
        """Resume at a ``place``."""
        restore(self._generator, state)
        self._shuffle()
        if taken > len(self._pass):
            raise BadMessage(f"the workspace stopped in minibatch {taken} of {len(self._pass)}")
        self._taken = taken

    def next(self) -> torch.Tensor:
        """The row numbers of the next minibatch."""
        if self._taken == len(self._pass):
            self._shuffle()
        self._taken += 1
        return self._pass[self._taken - 1]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield self.next()

    def _shuffle(self) -> None:
        self._before = self._generator.get_state()
        if self._order is not None:
            rows = torch.tensor([*self._order(self._generator)], dtype=torch.int64)
            if len(rows) != self._samples:
                self._samples = len(rows)
                self._sizes = pass_sizes(self._samples, self._solver)
                self._used = sum(self._sizes)
        elif self._drawn:
            rows = torch.randint(self._samples, (self._used,), generator=self._generator)
        else:
            rows = torch.randperm(self._samples, generator=self._generator)
        self._pass = torch.split(rows[: self._used], self._sizes)
        self._taken = 0


class Collating(Protocol):
    """The methods of :class:`fedstream.Task` that make batches."""

    def collate(self, items: list[Any]) -> Any:
        """A batch of these items."""

    def gather(self, data: Dataset[Any], rows: torch.Tensor) -> Any:
        """The batch of these rows."""

    def sampler(self, data: Dataset[Any], generator: torch.Generator) -> Iterable[int] | None:
        """The rows of one pass; None: all of them, shuffled."""


class Batches(Protocol):
    """An endless sequence of one task's batches."""

    epoch: int
    """the number of batches in an epoch; 0 for a stream"""

    def next(self) -> Any:
        """The next batch, collated."""

    @property
    def place(self) -> tuple[bytes, int]:
        """The state and the count with which :meth:`skip_to` resumes here."""

    def skip_to(self, state: bytes, taken: int) -> None:
        """Resume at a ``place``."""


def batches_of(
    task: Collating, data: Dataset[Any], samples: int, solver: SolverSettings, seed: int
) -> Batches:
    """The batches of one task. ``samples``: 0 for a stream (``IterableDataset``)."""
    if not samples:
        return LoadedBatches(_stream(task, data, solver, seed), 0)
    order = None
    if task.sampler(data, torch.Generator()) is not None:
        order = lambda generator: task.sampler(data, generator) or ()  # noqa: E731
    rows = Minibatches(samples, solver, seed, order)
    if solver.workers:
        return LoadedBatches(_loaded_rows(task, data, rows, solver, seed), rows.epoch)
    return RowBatches(task, data, rows)


class RowBatches:
    """Batches that the task's ``gather`` makes, without torch's DataLoader."""

    def __init__(self, task: Collating, data: Dataset[Any], rows: Minibatches) -> None:
        self._task, self._data, self._rows = task, data, rows
        self.epoch = rows.epoch

    def next(self) -> Any:
        """The next batch, collated."""
        return self._task.gather(self._data, self._rows.next())

    @property
    def place(self) -> tuple[bytes, int]:
        """The place in :class:`Minibatches`."""
        return self._rows.place

    def skip_to(self, state: bytes, taken: int) -> None:
        """Resume at a ``place``."""
        self._rows.skip_to(state, taken)


class LoadedBatches:
    """Batches that torch's DataLoader yields.

    A resumed task loads the earlier batches again, since the random numbers of a worker or a
    stream depend on them.
    """

    def __init__(self, batches: Iterator[Any], epoch: int) -> None:
        self._batches, self.epoch = batches, epoch
        self._taken = 0

    def next(self) -> Any:
        """The next batch, collated."""
        self._taken += 1
        return next(self._batches)

    @property
    def place(self) -> tuple[bytes, int]:
        """b"", and the number of batches taken since the task began."""
        return b"", self._taken

    def skip_to(self, state: bytes, taken: int) -> None:
        """Resume at a ``place``."""
        for _ in range(taken):
            self.next()


def _loaded_rows(
    task: Collating, data: Dataset[Any], rows: Minibatches, solver: SolverSettings, seed: int
) -> Iterator[Any]:
    return iter(
        DataLoader(
            _Gathered(task, data),
            batch_size=None,
            sampler=rows,
            num_workers=solver.workers,
            collate_fn=_unchanged,
            generator=torch.Generator().manual_seed(seed),
        )
    )


def _stream(
    task: Collating, data: Dataset[Any], solver: SolverSettings, seed: int
) -> Iterator[Any]:
    """Yield the batches of a stream, again and again. Raises DataError if the stream is empty."""
    loader: DataLoader[Any] = DataLoader(
        data,
        solver.batch_size or 1,
        num_workers=solver.workers,
        collate_fn=task.collate,
        drop_last=solver.drop_last,
        generator=torch.Generator().manual_seed(seed),
    )
    while True:
        is_empty = True
        for batch in loader:
            is_empty = False
            yield batch
        if is_empty:
            raise DataError("the stream of device_data() gives no batch")


class _Gathered(Dataset[Any]):
    """A data set whose items are batches; the row numbers of a batch are its index."""

    def __init__(self, task: Collating, data: Dataset[Any]) -> None:
        self._task, self._data = task, data

    def __getitem__(self, rows: torch.Tensor) -> Any:
        return self._task.gather(self._data, rows)


def _unchanged(batch: Any) -> Any:
    return batch


def state_of(state: torch.Tensor) -> bytes:
    """A torch generator's state as bytes."""
    data: bytes = state.numpy().tobytes()
    return data


def restore(generator: torch.Generator, state: bytes) -> None:
    """Put a torch generator into a state. Raises BadMessage if this torch cannot read it."""
    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, ValueError) as error:
        raise BadMessage(
            f"the random generator's state does not fit this version of torch: {error}"
        ) from error
