"""History of a resumed run, from its journal and metrics.csv."""

from __future__ import annotations

import csv
from pathlib import Path

from fedstream.journal import segments
from fedstream.journal.inspection import recorded_versions
from fedstream.observe.history import History, SeenUpdate, SeenVersion

_TEST = "test_"


def recall(history: History, journal: Path, table: Path) -> None:
    """Add recorded versions and measurements to a history. Raises JournalError."""
    chain = segments(journal)
    try:
        for version in recorded_versions(chain):
            updates = (
                SeenUpdate(u.upload.task, u.upload.device, u.staleness, u.weight, u.upload.loss)
                for u in version.updates
            )
            history.recall(version.version, SeenVersion(version.time, tuple(updates)))
    finally:
        for segment in chain:
            segment.close()
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                _measured(history, row)


def _measured(history: History, row: dict[str, str]) -> None:
    named = {
        name.removeprefix(_TEST): value
        for name, value in row.items()
        if value and (name == "accuracy" or name.startswith(_TEST))
    }
    if named and int(row["version"]) in history.versions:
        metrics = {name: float(value) for name, value in named.items()}
        history.measure(int(row["version"]), metrics)
