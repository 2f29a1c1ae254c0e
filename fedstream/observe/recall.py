"""History of a run from its folder: its journal and metrics.csv."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from fedstream.broker.errors import FedstreamError
from fedstream.journal import opened
from fedstream.journal.inspection import recorded_versions
from fedstream.observe.history import History, SeenUpdate, SeenVersion

_TEST = "test_"


def recall(history: History, journal: Path, table: Path) -> None:
    """Add recorded versions and measurements to a history. Raises JournalError."""
    with opened(journal) as chain:
        for version in recorded_versions(chain):
            updates = (
                SeenUpdate(u.upload.task, u.upload.device, u.staleness, u.weight, u.upload.loss)
                for u in version.updates
            )
            history.recall(version.version, SeenVersion(version.time, tuple(updates)))
    for one in measurements(table):
        if one.version in history.versions:
            history.measure(one.version, one.metrics)


class Measurement(NamedTuple):
    """A measured version, and what it had taken."""

    version: int
    seconds: float  # since version 0
    updates: int  # up to it
    metrics: dict[str, float]  # by the task's own names


def measurements(table: Path) -> list[Measurement]:
    """What metrics.csv says of measured versions; empty without the file.

    A line that a crash tore is left out. Raises FedstreamError for anything but such a table.
    """
    if not table.is_file():
        return []
    found: list[Measurement] = []
    updates = 0
    with table.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(line for line in file if line.endswith("\n"))
        try:
            for row in rows:
                updates += int(row["updates"])
                if metrics := {name: float(value) for name, value in _tested(row)}:
                    number, seconds = int(row["version"]), float(row["seconds"])
                    # older releases' tables have no total
                    total = int(row.get("total_updates") or updates)
                    found.append(Measurement(number, seconds, total, metrics))
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            raise _foreign(table, rows.line_num, error) from error
    return found


def device_metrics(table: Path) -> dict[int, dict[str, float]]:
    """Each device's own metrics, from devices.csv; empty without the file.

    Raises FedstreamError for anything but such a table.
    """
    if not table.is_file():
        return {}
    with table.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        try:
            return {
                int(row["device"]): {name: float(value) for name, value in _tested(row)}
                for row in rows
            }
        except (ValueError, TypeError, KeyError, csv.Error) as error:
            raise _foreign(table, rows.line_num, error) from error


def _foreign(table: Path, line: int, error: Exception) -> FedstreamError:
    return FedstreamError(f"{table}: line {line}: is not a row of {table.name}: {error!r}")


def _tested(row: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """The test metrics in a row, by the task's own names."""
    for name, value in row.items():
        if value and (name == "accuracy" or str(name).startswith(_TEST)):
            yield name.removeprefix(_TEST), value
