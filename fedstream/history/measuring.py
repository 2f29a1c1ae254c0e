"""A recording's models measured on its task's test data."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.core.errors import DataError, FedstreamError, LayoutMismatch
from fedstream.core.layout import Model
from fedstream.history.measurements import measurements
from fedstream.history.report import METRICS
from fedstream.settings.services import loaded
from fedstream.trainer.task import measured, untrained

if TYPE_CHECKING:
    from fedstream.settings.config import Settings


def judge(settings: Settings, metric: str) -> Callable[[int, Model], float]:
    """Function that measures a model by one of the task's metrics on its test data.

    Raises ConfigError, DataError.
    """
    metrics_of, name = measuring(settings), settings.task.name
    if metrics_of is None:
        raise no_test_data(name)

    def measure(version: int, model: Model) -> float:
        metrics = metrics_of(version, model)
        if metric not in metrics:
            raise DataError(f"task {name!r} has no metric {metric!r}; it has {', '.join(metrics)}")
        return metrics[metric]

    return measure


def no_test_data(name: str) -> DataError:
    """The error for a task without ``test_data()``."""
    return DataError(f"task {name!r} has no test data to measure models with")


def measuring(settings: Settings) -> Callable[[int, Model], dict[str, float]] | None:
    """Function that computes the task's metrics of a model; None if the task has no test data.

    Raises ConfigError, DataError.
    """
    import torch

    from fedstream.trainer import vector

    torch.set_num_threads(settings.evaluator.threads)
    name = settings.task.name
    with redirect_stdout(sys.stderr), _told(f"task {name!r}"):  # stdout may be read by a program
        task = loaded(settings.task)
        data, module = task.test_data(), untrained(task)
    if data is None:
        return None

    def measure(version: int, model: Model) -> dict[str, float]:
        with redirect_stdout(sys.stderr), _told(f"task {name!r}: metrics() of version {version}"):
            try:
                vector.load(model, module)
            except LayoutMismatch as error:
                raise DataError(
                    f"task {name!r} is not the one this journal was trained on: its model has "
                    "other tensors"
                ) from error
            return measured(task, module, data)

    return measure


def recorded_values(journal: Path, metric: str) -> dict[int, float]:
    """A metric as the run itself measured it, by version, from the metrics.csv beside its journal.

    Empty without the file. Raises FedstreamError if the file is no such table.
    """
    measured = measurements(journal / METRICS) or measurements(journal.parent / METRICS)
    return {one.version: one.metrics[metric] for one in measured if metric in one.metrics}


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Turn any error of a user's program into a one-line DataError."""
    try:
        yield
    except FedstreamError:
        raise
    except Exception as error:
        words = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(f"{what} raised {words}") from error
