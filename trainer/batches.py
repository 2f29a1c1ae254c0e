"""The minibatches of local training: their sizes, their order, and how they are loaded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from fedstream.core.errors import BadMessage, DataError
from fedstream.trainer.data import random_states, restore, restore_random_states
from fedstream.trainer.solvers import Cancelled, is_drawn, minibatches_in, pass_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from fedstream.trainer.solvers import SolverSettings

    Order = Callable[[torch.Generator], torch.Tensor]


_CPU = torch.device("cpu")


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
        return bytes(self._before.numpy()), self._taken

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
            rows = self._order(self._generator)
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
    rows: int
    """the number of rows taken from a stream; 0 for other data"""

    def next(self) -> Any:
        """The next batch, collated."""

    @property
    def place(self) -> tuple[bytes, int]:
        """The state and the count with which :meth:`skip_to` resumes here."""

    def skip_to(self, state: bytes, taken: int, cancelled: Callable[[], bool]) -> None:
        """Resume at a ``place``. Raises Cancelled once ``cancelled()`` is true."""


def batches_of(
    task: Collating, data: Dataset[Any], samples: int, solver: SolverSettings, seed: int
) -> Batches:
    """The batches of one task. ``samples``: 0 for a stream (``IterableDataset``)."""
    if not samples:
        return LoadedBatches(_stream(task, data, solver, seed), 0, draws=not solver.workers)
    order = None
    if task.sampler(data, torch.Generator()) is not None:
        order = partial(_rows_of, task, data, samples)
    rows = Minibatches(samples, solver, seed, order)
    if solver.workers:
        return LoadedBatches(_loaded_rows(task, data, rows, solver, seed), rows.epoch)
    return RowBatches(task, data, rows)


def _rows_of(
    task: Collating, data: Dataset[Any], samples: int, generator: torch.Generator
) -> torch.Tensor:
    """The rows of one pass, as the task's sampler gives them. Raises DataError."""
    given: Any = task.sampler(data, generator)
    rows = torch.as_tensor(given if hasattr(given, "shape") else [*given])
    if rows.dim() != 1 or not len(rows) or not 0 <= rows.min() <= rows.max() < samples:
        raise DataError(
            f"sampler() must give row numbers from 0 to {samples - 1}, one by one and at least one"
        )
    return rows.to(torch.int64)


class RowBatches:
    """Batches that the task's ``gather`` makes, without torch's DataLoader."""

    def __init__(self, task: Collating, data: Dataset[Any], rows: Minibatches) -> None:
        self._task, self._data, self._rows = task, data, rows
        self.epoch, self.rows = rows.epoch, 0

    def next(self) -> Any:
        """The next batch, collated."""
        return self._task.gather(self._data, self._rows.next())

    @property
    def place(self) -> tuple[bytes, int]:
        """The place in :class:`Minibatches`."""
        return self._rows.place

    def skip_to(self, state: bytes, taken: int, cancelled: Callable[[], bool]) -> None:
        """Resume at a ``place``."""
        self._rows.skip_to(state, taken)


class LoadedBatches:
    """Batches that torch's DataLoader yields.

    A resumed task loads the earlier batches again, since the random numbers of a worker or a
    stream depend on them. ``draws``: the batches may draw from this process's generators. They
    then have states of their own, as a worker has, so that they can be loaded again alone.
    """

    def __init__(
        self, batches: Iterator[tuple[int, Any]], epoch: int, *, draws: bool = False
    ) -> None:
        self._batches, self.epoch, self.rows = batches, epoch, 0
        self._taken = 0
        self._states = random_states(_CPU) if draws else None

    def next(self) -> Any:
        """The next batch, collated."""
        self._taken += 1
        if self._states is None:
            rows, batch = next(self._batches)
        else:
            outer = random_states(_CPU)
            restore_random_states(self._states, _CPU)
            try:
                rows, batch = next(self._batches)
            finally:
                self._states = random_states(_CPU)
                restore_random_states(outer, _CPU)
        self.rows += rows
        return batch

    @property
    def place(self) -> tuple[bytes, int]:
        """b"", and the number of batches taken since the task began."""
        return b"", self._taken

    def skip_to(self, state: bytes, taken: int, cancelled: Callable[[], bool]) -> None:
        """Resume at a ``place``. Raises Cancelled once ``cancelled()`` is true."""
        for _ in range(taken):
            if cancelled():
                raise Cancelled
            self.next()


def _loaded_rows(
    task: Collating, data: Dataset[Any], rows: Minibatches, solver: SolverSettings, seed: int
) -> Iterator[tuple[int, Any]]:
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
) -> Iterator[tuple[int, Any]]:
    """Yield the batches of a stream with their sizes, again and again.

    Raises DataError if the stream is empty.
    """
    loader: DataLoader[Any] = DataLoader(
        data,
        solver.batch_size,
        num_workers=solver.workers,
        collate_fn=partial(_counted, task),
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
    """A data set whose items are batches, each with 0; its index are the batch's rows."""

    def __init__(self, task: Collating, data: Dataset[Any]) -> None:
        self._task, self._data = task, data

    def __getitem__(self, rows: torch.Tensor) -> Any:
        return 0, self._task.gather(self._data, rows)


def _counted(task: Collating, items: list[Any]) -> tuple[int, Any]:
    return len(items), task.collate(items)


def _unchanged(batch: Any) -> Any:
    return batch
