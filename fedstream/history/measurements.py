"""History of a run from its folder: its journal and metrics.csv."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import NamedTuple, TextIO

from fedstream.core.errors import FedstreamError
from fedstream.history.index import columns_of
from fedstream.history.table import NONE, Columns, texts
from fedstream.history.timeline import History, SeenUpdate, SeenVersion
from fedstream.runtime.process import open_regular

_TEST = "test_"


def recall(history: History, journal: Path, table: Path) -> None:
    """Add recorded versions and measurements to a history. Raises JournalError."""
    columns = columns_of(journal, keep=False).checked()
    fill(history, columns, measurements(table), texts(journal).tasks)


def fill(
    history: History, columns: Columns, measured: Iterable[Measurement], tasks: Sequence[str]
) -> None:
    """Add versions and measurements to a history. ``tasks``: the updates' task ids, in order."""
    updates: list[list[SeenUpdate]] = [[] for _ in columns.made]
    names = ("device", "staleness", "weight", "loss")
    rows = zip(tasks, *(columns.updates[name].tolist() for name in names), strict=True)
    for maker, (task, device, staleness, weight, loss) in zip(
        columns.makers.tolist(), rows, strict=True
    ):
        if maker != NONE:
            known = None if isnan(loss) else loss
            updates[maker].append(SeenUpdate(task, device, staleness, weight, known))
    for row, made in zip(columns.made[["version", "time"]].tolist(), updates, strict=True):
        history.recall(row[0], SeenVersion(row[1], tuple(made)))
    for one in measured:
        if one.version in history.versions:
            history.measure(one.version, one.metrics)


class Measurement(NamedTuple):
    """A measured version, with the time and the updates that it took."""

    version: int
    seconds: float  # since version 0
    updates: int  # up to it
    metrics: dict[str, float]  # by the task's own names


def measurements(table: Path) -> list[Measurement]:
    """The measurements in metrics.csv; empty without the file.

    A line that a crash tore is left out. Raises FedstreamError if the file is no such table.
    """
    if not table.exists():
        return []
    with _open(table) as file:
        rows = csv.reader(line for line in file if line.endswith("\n"))
        try:
            return list(_measured(rows))
        except (ValueError, IndexError, KeyError, csv.Error) as error:
            raise _foreign(table, rows.line_num, error) from error


def _measured(rows: Iterator[list[str]]) -> Iterator[Measurement]:
    """The rows with a test metric.

    Cells are read by position: csv.DictReader takes 30 ms for ten thousand rows.
    """
    places = {name: place for place, name in enumerate(next(rows, []))}
    tests = [(name.removeprefix(_TEST), at) for name, at in places.items() if _is_test(name)]
    updates = 0
    for row in filter(None, rows):
        updates += int(row[places["updates"]])
        if metrics := {name: float(row[at]) for name, at in tests if at < len(row) and row[at]}:
            number, seconds = int(row[places["version"]]), float(row[places["seconds"]])
            # older releases' tables have no total
            total = row[places["total_updates"]] if "total_updates" in places else ""
            yield Measurement(number, seconds, int(total or updates), metrics)


def device_metrics(table: Path) -> dict[int, dict[str, float]]:
    """Each device's own metrics, from devices.csv; empty without the file.

    Raises FedstreamError if the file is no such table.
    """
    if not table.exists():
        return {}
    with _open(table) as file:
        rows = csv.DictReader(file)
        try:
            return {
                int(row["device"]): {name: float(value) for name, value in _tested(row)}
                for row in rows
            }
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            raise _foreign(table, rows.line_num, error) from error


def _open(table: Path) -> TextIO:
    try:
        return os.fdopen(open_regular(table), newline="", encoding="utf-8")
    except OSError as error:
        raise FedstreamError(f"{table}: cannot be read: {error.strerror}") from error


def _foreign(table: Path, line: int, error: Exception) -> FedstreamError:
    return FedstreamError(f"{table}: line {line}: is not a row of {table.name}: {error!r}")


def _tested(row: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """The test metrics in a row, by the task's own names."""
    for name, value in row.items():
        if value and _is_test(str(name)):
            yield name.removeprefix(_TEST), value


def _is_test(column: str) -> bool:
    return column == "accuracy" or column.startswith(_TEST)
