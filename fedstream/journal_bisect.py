"""`fedstream journal bisect`: the update with which a metric went bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from sys import stderr
from typing import TYPE_CHECKING

from fedstream.broker.errors import DataError, FedstreamError, LayoutMismatch
from fedstream.broker.layout import Model
from fedstream.trainer.task import load_task, measured, untrained
from fedstream.updater.inspection import Move, history, newest, since
from fedstream.updater.journal import Segment, Standing, Taken
from fedstream.updater.mixing import norm
from fedstream.updater.rebuild import NotRecorded, is_used
from fedstream.updater.shares import direction

if TYPE_CHECKING:
    from fedstream.config import Settings

_MEASUREMENTS = 50  # about so many where nobody says how often

Measure = Callable[[int, Model], float]


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
    """Two versions, one after the other: the first is good, the second is not."""

    version: int  # the second
    before: float
    after: float
    causes: tuple[Cause, ...]  # none: the model was adopted from Redis


@dataclass
class Search:
    """What was measured, by version, and what was found."""

    every: int
    measured: dict[int, float] = field(default_factory=dict)
    crossing: Crossing | None = None
    ever_good: bool = False


def search(
    chain: Sequence[Segment],
    measure: Measure,
    is_good: Callable[[float], bool],
    every: int | None = None,
) -> Search:
    """Finds a version whose metric is bad while that of the one before it is good.

    Forward: the first version, every N-th (``every``; if not given, so that about 50 are measured)
    and the newest are measured, until one is bad after an earlier one was good. Then each version
    since that one is measured, until the first that is bad. So the crossing that is found is real,
    and the first in its interval; a fall that recovers between two measured versions before it goes
    unseen, unless ``every`` is 1. Raises JournalError.
    """
    last = newest(chain)
    found = Search(every or max(1, (last - chain[0].standing.version) // _MEASUREMENTS))
    good: int | None = None  # the last version that was
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
    measure: Measure,
    is_good: Callable[[float], bool],
    measured: dict[int, float],
) -> Crossing | None:
    """The first bad version behind a good one, measuring those that were not measured yet."""
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
        raise RuntimeError("an update without weights has made a model")
    upload = message.upload
    return Cause(
        device=upload.device, task=upload.task, tau=upload.tau, staleness=message.staleness,
        weight=message.weight, norm=norm(move.update.floats),
        distance=norm(direction(upload, move.update, move.before)), loss=upload.loss,
    )  # fmt: skip


def judge(settings: Settings, metric: str) -> Measure:
    """Measures models by a metric of the task, on its test data. Raises ConfigError, DataError."""
    metrics_of, name = measuring(settings), settings.task.name
    if metrics_of is None:
        raise DataError(f"task {name!r} has no test data to measure a model by")

    def measure(version: int, model: Model) -> float:
        metrics = metrics_of(version, model)
        if metric not in metrics:
            raise DataError(f"task {name!r} has no metric {metric!r}: it has {', '.join(metrics)}")
        return metrics[metric]

    return measure


def measuring(settings: Settings) -> Callable[[int, Model], dict[str, float]] | None:
    """The task's metrics of a version's model on its test data; None where it has none.

    Raises ConfigError, DataError.
    """
    import torch

    from fedstream.trainer import vector

    torch.set_num_threads(settings.evaluator.threads)
    name = settings.task.name
    with redirect_stdout(stderr), _told(f"task {name!r}"):  # stdout may be a program's
        task = load_task(name, settings.task)
        data, module = task.test_data(), untrained(task)
    if data is None:
        return None

    def measure(version: int, model: Model) -> dict[str, float]:
        with redirect_stdout(stderr), _told(f"task {name!r}: metrics() of version {version}"):
            try:
                vector.load(model, module)
            except LayoutMismatch as error:
                raise DataError(
                    f"task {name!r} is not what this journal was trained on: its model has other "
                    "tensors"
                ) from error
            return measured(task, module, data)

    return measure


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What a user's program raises is told in a line. Raises DataError."""
    try:
        yield
    except FedstreamError:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(f"{what} raised {words}") from error
