"""Runs beside each other: their numbers, their configurations' differences, and their curves."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstream.core.errors import ConfigError, DataError
from fedstream.core.messages import Goal
from fedstream.history import pictures, report, tables
from fedstream.history.display import short
from fedstream.history.measurements import Measurement
from fedstream.history.record import RunRecord
from fedstream.journal import FOLDER
from fedstream.runtime.text import did_you_mean
from fedstream.terminal import measure, number
from fedstream.trainer.goals import best_of, goal_of, main_metric, reaches, unknown_goal

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

# Where a run happened, not what it did.
_PLACES = ("run.name", "redis.", "http.", "log.", "journal.dir", "journal.sync", "task.data_root")
_BESIDE = 5  # runs that fit beside each other in a terminal
_UNKNOWN = "?"  # a bare journal doesn't say


def compare(
    runs: Sequence[RunRecord | Path | str],
    *,
    metric: str | None = None,
    target: float | None = None,
    goal: Goal | None = None,
) -> Comparison:
    """Compare runs: records or folders.

    ``metric``: its name in the task; default: ``accuracy``, or else the tasks' main metric.
    ``target``: the metric's value to reach; default: the best that every run reached.
    ``goal``: whether a low or a high value is good; default: the goal that the tasks declare, or a
    well-known one. Without a goal, no value is the best. Raises FedstreamError.
    """
    if not runs:
        raise ConfigError("no runs to compare: name at least one")
    records = [run if isinstance(run, RunRecord) else RunRecord(run) for run in runs]
    return Comparison(records, metric, target, goal)


class Comparison:
    """Runs beside each other, read when this object is made. Notebooks show tables and curves."""

    def __init__(
        self,
        runs: Sequence[RunRecord],
        metric: str | None,
        target: float | None,
        goal: Goal | None,
    ) -> None:
        self.names = _names([run.path for run in runs])
        """the runs' names: those of their folders"""
        self._settings = [run.settings for run in runs]
        self._complete = [run.is_configured for run in runs]
        self._numbers = [run.summary for run in runs]
        points = [run.measurements for run in runs]
        self.metric = metric or _usual(points, self._numbers)
        """the metric that is compared"""
        self.points = [_of(self.metric, measured) for measured in points]
        if metric is not None and not any(self.points):
            known = sorted({name for run in points for one in run for name in one.metrics})
            measured = f"; measured: {', '.join(known) or 'none'}"
            raise DataError(
                f"no run has measured {metric!r}" + (did_you_mean(metric, known) or measured)
            )
        said = _goals_in(self._numbers, self.metric)
        self._disagree = len(said) > 1
        self.goal = goal or (said.pop() if len(said) == 1 else None)
        """whether the metric is to be low or high; None if nobody said so, or runs disagree"""
        if target is not None and self.goal is None:
            raise ConfigError(f"--target {target:g}: {self._unknown}")
        self.target = target if target is not None else self._reached_by_all()
        """the value that counts as reached; None if no run was measured, or without a goal"""

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The table without pandas."""
        found = zip(self.names, self._numbers, self.points, strict=True)
        return [self._row(name, numbers, points) for name, numbers, points in found]

    @property
    def table(self) -> pd.DataFrame:
        """A row for each run, by name.

        ``strategy``, ``state``, ``versions``, ``updates``, ``seconds`` (virtual ones, or arrivals,
        if ``simulated``), ``updates_per_s`` (missing if simulated), mean ``staleness``, the metric
        as ``final`` and ``best`` with its ``best_version``, and the cost of reaching the target:
        ``versions_to_target``, ``updates_to_target``, ``seconds_to_target`` (missing if it was
        not reached).
        """
        return tables.plain(self.rows, index="run")

    @cached_property
    def differences(self) -> dict[str, list[Any]]:
        """The configuration's keys in which runs differ, with each run's value; None: not set.

        Names, addresses and folders don't count. ``"?"``: a bare journal does not say.
        """
        flat = [dict(_flat(settings)) for settings in self._settings]
        found = {}
        for key in sorted({key for one in flat for key in one}):
            if key.startswith(_PLACES):
                continue
            values = [
                one.get(key, None if complete else _UNKNOWN)
                for one, complete in zip(flat, self._complete, strict=True)
            ]
            known = [value for value in values if value != _UNKNOWN]
            if any(value != known[0] for value in known):
                found[key] = values
        return found

    def picture(self) -> Figure:
        """The metric over versions, updates and seconds, each run in a colour of its own."""
        simulated = [bool(numbers["simulated"]) for numbers in self._numbers]
        clock = "seconds" if not any(simulated) else "virtual time" if all(simulated) else "time"
        return pictures.overlaid(
            self.names, self.points, self.metric, clock, self.target, self.goal
        )

    def __repr__(self) -> str:
        """The table and the differences, for a terminal; a few runs are shown as columns."""
        table = self.columns()
        if len(self.names) <= _BESIDE:
            table = [list(row) for row in zip(*table, strict=True)]
        parts = [pictures.as_text(table)]
        if self.goal is None:
            parts.append(f"no best: {self._unknown}")
        if changed := self.differing():
            parts += ["", pictures.as_text(changed)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        """Tables and picture, for a notebook."""
        return pictures.comparison_html(self.columns(), self.differing(), self._repr_png_())

    def _repr_png_(self) -> bytes:
        """The picture as PNG."""
        return pictures.png(self.picture())

    def write(self, out: Path, *, picture: str, table: str, numbers: str) -> list[Path]:
        """Write PNG, CSV and JSON into a folder; returns the files. Raises OSError."""
        out.mkdir(parents=True, exist_ok=True)
        (out / picture).write_bytes(self._repr_png_())
        with (out / table).open("w", newline="", encoding="utf-8") as file:
            rows = csv.DictWriter(file, fieldnames=list(self.rows[0]))
            rows.writeheader()
            rows.writerows(self.rows)
        (out / numbers).write_text(report.as_json(self.as_numbers()) + "\n", encoding="utf-8")
        return [out / name for name in (picture, table, numbers)]

    def as_numbers(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "metric": self.metric,
            "goal": self.goal,
            "target": self.target,
            "runs": self.rows,
            "differences": {
                key: dict(zip(self.names, values, strict=True))
                for key, values in self.differences.items()
            },
        }

    def columns(self) -> list[list[str]]:
        """The table for people, header first, without columns that no run has."""
        names = ["run", *(name for name in self.rows[0] if name != "run")]
        skipped = {"simulated"}
        if len({row["state"] for row in self.rows}) == 1:
            skipped.add("state")
        if self.target is None:
            skipped |= {name for name in names if name.endswith("_to_target")}
        names = [
            name
            for name in names
            if name not in skipped and any(row[name] is not None for row in self.rows)
        ]
        return [
            [self._heading(name) for name in names],
            *([_shown(name, row[name]) for name in names] for row in self.rows),
        ]

    def differing(self) -> list[list[str]]:
        """The differences for people, header first; empty if there are none."""
        if not self.differences:
            return []
        rows = [
            [key, *("-" if value is None else _plain(value) for value in values)]
            for key, values in self.differences.items()
        ]
        return [["key", *self.names], *rows]

    def _heading(self, name: str) -> str:
        if name.endswith("_to_target"):
            what = name.removesuffix("_to_target")
            return f"{what} to {number(self.target)}"
        named = {
            "final": f"final {self.metric}",
            "best": f"best {self.metric}",
            "best_version": "at version",
            "updates_per_s": "updates/s",
        }
        return named.get(name, name)

    def _row(
        self, name: str, numbers: Mapping[str, Any], points: Sequence[Measurement]
    ) -> dict[str, Any]:
        simulated = bool(numbers["simulated"])
        best = self._best(points)
        reached = next((one for one in points if self._is_reached(one)), None)
        return {
            "run": name,
            "strategy": numbers["strategy"],
            "state": numbers["state"],
            "simulated": simulated,
            "versions": numbers["versions"],
            "updates": numbers["updates"],
            "seconds": numbers.get("virtual_seconds") if simulated else numbers["seconds"],
            "updates_per_s": None if simulated else numbers["updates_per_s"],
            "staleness": numbers["mean_staleness"],
            "final": points[-1].metrics[self.metric] if points else None,
            "best": best.metrics[self.metric] if best else None,
            "best_version": best.version if best else None,
            "versions_to_target": reached.version if reached else None,
            "updates_to_target": reached.updates if reached else None,
            "seconds_to_target": reached.seconds if reached else None,
        }

    def _best(self, points: Sequence[Measurement]) -> Measurement | None:
        """The first measurement with the best finite value; None without a goal."""
        found = best_of(((one.metrics[self.metric], one) for one in points), self.goal)
        return found[1] if found else None

    def _is_reached(self, one: Measurement) -> bool:
        if self.target is None or self.goal is None:
            return False
        return reaches(one.metrics[self.metric], self.target, self.goal)

    def _reached_by_all(self) -> float | None:
        found = [self._best(points) for points in self.points if points]
        values = [one.metrics[self.metric] for one in found if one is not None]
        if not values:
            return None
        return max(values) if self.goal == "min" else min(values)

    @property
    def _unknown(self) -> str:
        if self._disagree:
            return (
                f"the runs' tasks disagree whether a low or a high {self.metric} is good: give "
                "--goal min or --goal max"
            )
        return f"{unknown_goal(self.metric)}, or give --goal min or --goal max"


def _names(paths: Sequence[Path]) -> list[str]:
    """A name for each run: its folder's, or its whole path if two would be alike."""
    named = [path.absolute() for path in paths]
    short_names = [path.parent.name if path.name == FOLDER else path.name for path in named]
    return [
        name if short_names.count(name) == 1 else str(path)
        for name, path in zip(short_names, paths, strict=True)
    ]


def _usual(points: Sequence[Sequence[Measurement]], summaries: Sequence[Mapping[str, Any]]) -> str:
    """The metric to compare by default."""
    mains = {numbers["main_metric"] for numbers in summaries} - {None}
    if len(mains) == 1:
        return str(mains.pop())
    declared = {name: end for numbers in summaries for name, end in numbers["goal"].items()}
    names = {name: None for run in points for one in run for name in one.metrics}
    return main_metric(names, declared) or next(iter(names), "accuracy")


def _goals_in(summaries: Sequence[Mapping[str, Any]], metric: str) -> set[Goal]:
    """The goals of a metric that runs declare, or that are well known."""
    found = (goal_of(metric, numbers["goal"]) for numbers in summaries)
    return {goal for goal in found if goal is not None}


def _of(metric: str, points: Sequence[Measurement]) -> list[Measurement]:
    return [one for one in points if metric in one.metrics]


def _flat(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys (``strategy.alpha``) with their values."""
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name in ("final", "best"):
        return measure(value)
    if isinstance(value, float):
        return f"{value:.2f}" if name == "staleness" else f"{value:.1f}"
    return short(str(value)) if name == "strategy" else str(value)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
