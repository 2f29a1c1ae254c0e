"""`fedstream journal bisect`: finds the update with which a metric went bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from sys import stderr
from typing import TYPE_CHECKING

from fedstream.broker.errors import DataError, FedstreamError, LayoutMismatch
from fedstream.broker.layout import Model
from fedstream.journal import NotRecorded, Segment, Standing, Taken, newest_version, since
from fedstream.journal.inspection import Move, history
from fedstream.journal.rebuild import is_used
from fedstream.journal.shares import direction
from fedstream.settings.services import loaded
from fedstream.strategies.mixing import norm
from fedstream.trainer.task import measured, untrained

if TYPE_CHECKING:
    from fedstream.settings.config import Settings

_MEASUREMENTS = 50  # approximate number, unless `every` is given

MeasureOne = Callable[[int, Model], float]


@dataclass(frozen=True)
class Cause:
    """An update in the version with which the metric went bad."""

    device: int
    task: str
    tau: int
    staleness: int
    weight: float
    norm: float  # of x_new
    distance: float  # of x_new from x, which it was mixed into
    loss: float | None


@dataclass(frozen=True)
class Crossing:
    """Two successive versions, of which the first is good and the second is not."""

    version: int  # the second
    before: float
    after: float
    causes: tuple[Cause, ...]  # none: the model was adopted from Redis


@dataclass
class Search:
    """Measurements by version, and the crossing found."""

    every: int
    measured: dict[int, float] = field(default_factory=dict)
    crossing: Crossing | None = None
    ever_good: bool = False


def search(
    chain: Sequence[Segment],
    measure: MeasureOne,
    is_good: Callable[[float], bool],
    every: int | None = None,
) -> Search:
    """Find a version whose metric is bad while the version before it is good.

    The search goes forward. It measures the first version, every N-th (``every``; by default chosen
    for about 50 measurements) and the newest, until one is bad after an earlier one was good. Then
    it measures each version after that last good one, up to the first bad one. So the crossing
    found is real and the first in its interval; an earlier dip that recovers between two measured
    versions goes unseen unless ``every`` is 1. Raises JournalError.
    """
    last = newest_version(chain)
    found = Search(every or max(1, (last - chain[0].standing.version) // _MEASUREMENTS))
    good: int | None = None  # the last good version
    for move in history(chain):
        version = move.message.version
        due = isinstance(move.message, Standing) or version == last or version % found.every == 0
        if not (move.is_made and due):
            continue
        value = found.measured[version] = measure(version, _model(move))
        if is_good(value):
            good, found.ever_good = version, True
        elif good is not None:
            found.crossing = _first(since(chain, good), good, measure, is_good, found.measured)
            break
    return found


def _first(
    chain: Sequence[Segment],
    good: int,
    measure: MeasureOne,
    is_good: Callable[[float], bool],
    measured: dict[int, float],
) -> Crossing | None:
    """Find the first bad version after a good one, measuring any not yet measured."""
    before = measured[good]
    causes: list[Cause] = []
    for move in history(chain):
        version, model = move.message.version, _model(move)
        if is_used(move.message) and version >= good:
            causes.append(_cause(move.message, move))
        if not move.is_made:
            continue
        if version > good:
            if version not in measured:
                measured[version] = measure(version, model)
            after = measured[version]
            if not is_good(after):
                return Crossing(version, before, after, tuple(causes))
            before = after
        causes.clear()
    return None


def _model(move: Move) -> Model:
    if move.after is None:
        raise NotRecorded(
            f"{move.record.place.where}: version {move.message.version} cannot be rebuilt: "
            "updates were recorded without their weights (journal.weights = false)"
        )
    return move.after


def _cause(message: Taken, move: Move) -> Cause:
    if move.update is None or move.before is None:
        raise RuntimeError("a model was made from an update without weights")
    upload = message.upload
    return Cause(
        device=upload.device, task=upload.task, tau=upload.tau, staleness=message.staleness,
        weight=message.weight, norm=norm(move.update.floats),
        distance=norm(direction(upload, move.update, move.before)), loss=upload.loss,
    )  # fmt: skip


def judge(settings: Settings, metric: str) -> MeasureOne:
    """Function that measures a model by one of the task's metrics on its test data.

    Raises ConfigError, DataError.
    """
    metrics_of, name = measuring(settings), settings.task.name
    if metrics_of is None:
        raise DataError(f"task {name!r} has no test data to measure models with")

    def measure(version: int, model: Model) -> float:
        metrics = metrics_of(version, model)
        if metric not in metrics:
            raise DataError(f"task {name!r} has no metric {metric!r}; it has {', '.join(metrics)}")
        return metrics[metric]

    return measure


def measuring(settings: Settings) -> Callable[[int, Model], dict[str, float]] | None:
    """Function that computes the task's metrics of a model; None if the task has no test data.

    Raises ConfigError, DataError.
    """
    import torch

    from fedstream.trainer import vector

    torch.set_num_threads(settings.evaluator.threads)
    name = settings.task.name
    with redirect_stdout(stderr), _told(f"task {name!r}"):  # stdout may be read by a program
        task = loaded(settings.task)
        data, module = task.test_data(), untrained(task)
    if data is None:
        return None

    def measure(version: int, model: Model) -> dict[str, float]:
        with redirect_stdout(stderr), _told(f"task {name!r}: metrics() of version {version}"):
            try:
                vector.load(model, module)
            except LayoutMismatch as error:
                raise DataError(
                    f"task {name!r} is not the one this journal was trained on: its model has "
                    "other tensors"
                ) from error
            return measured(task, module, data)

    return measure


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn whatever a user's program raises into a one-line DataError."""
    try:
        yield
    except FedstreamError:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(f"{what} raised {words}") from error
