"""`fedstream list`: the runs in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.history import report
from fedstream.history.display import short
from fedstream.history.record import RunRecord
from fedstream.journal import FOLDER
from fedstream.settings.recording import CONFIG, SUMMARY
from fedstream.terminal import cell, clock, console, line, measure

_COLOURS = {"running": "cyan", "finished": "green", "interrupted": "yellow", "failed": "red"}
_RIGHT = ("versions", "updates", "accuracy", "best", "updates/s")


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder by name; the folder itself if it is a run. Raises ConfigError."""
    if _is_run(folder):
        return [folder]
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and _is_run(path))
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror}: name a folder that contains runs"
        ) from error


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG, SUMMARY, FOLDER))


def listed(folder: Path) -> list[dict[str, Any]]:
    """Each run in a few numbers, the newest last; an unreadable run has an ``error`` instead."""
    rows = [_row(path) for path in runs_in(folder)]
    return sorted(rows, key=lambda row: (row["date"], row["folder"]))


def _row(path: Path) -> dict[str, Any]:
    row: dict[str, Any] = {"folder": str(path), "date": _changed(path)}
    try:
        numbers = RunRecord(path).summary
    except (FedstreamError, OSError) as error:
        return row | {"error": str(error)}
    if begun := numbers.get("created") or numbers.get("started"):
        row["date"] = begun
    names = (
        "state",
        "why",
        "strategy",
        "task",
        "versions",
        "versions_wanted",
        "updates",
        "accuracy",
        "best_accuracy",
        "simulated",
    )
    speed = None if numbers["simulated"] else numbers["updates_per_s"]
    metric = numbers["main_metric"]
    best = numbers["best"].get(metric, {})
    row |= {
        "metric": metric,
        "last": numbers["metrics"].get(metric),
        "best": best.get("value"),
        "best_version": best.get("version"),
    }
    return row | {name: numbers[name] for name in names} | {"updates_per_s": speed}


def _changed(path: Path) -> str:
    """The time of the run's oldest file, for runs that don't say when they began."""
    try:
        oldest = min(file.stat().st_mtime for file in path.iterdir())
    except (OSError, ValueError):
        return ""
    return report.stamp(oldest)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the runs as a table, and below it the errors of runs that can't be read."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in (
        "run",
        "state",
        "strategy",
        "task",
        "versions",
        "updates",
        "accuracy",
        "best",
        "updates/s",
        "date",
    ):
        table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    console().print(table)
    for row in rows:
        if "error" in row:
            line(f"{Path(row['folder']).name}: {row['error']}")


def _cells(row: dict[str, Any]) -> list[Text]:
    name, date = cell(Path(row["folder"]).name), cell(_local(row["date"]))
    if "error" in row:
        return [name, cell("unreadable", style="red"), *[cell("")] * 7, date]
    wanted = "" if row["versions"] == row["versions_wanted"] else f"/{row['versions_wanted']}"
    speed = "simulated" if row["simulated"] else f"{row['updates_per_s'] or 0:.1f}"
    return [
        name,
        cell(row["state"], style=_COLOURS.get(row["state"], "")),
        cell(short(str(row["strategy"]))),
        cell(short(row["task"])),
        cell(f"{row['versions']}{wanted}"),
        cell(row["updates"]),
        *_measured(row),
        cell(speed),
        date,
    ]


def _measured(row: dict[str, Any]) -> list[Text]:
    """The main metric's last value, with its name unless it is accuracy, and its best value."""
    name = "" if row["metric"] in (None, "accuracy") else f"{row['metric']} "
    last = "-" if row["last"] is None else measure(row["last"])
    best = "-" if row["best"] is None else f"{measure(row['best'])} at {row['best_version']}"
    return [cell(name + last), cell(best)]


def _local(stamp: str) -> str:
    """A summary's time in local time, to the minute; any other text unchanged."""
    try:
        moment = datetime.fromisoformat(stamp)
    except ValueError:
        return stamp
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return clock(moment.timestamp(), "%Y-%m-%d %H:%M")
