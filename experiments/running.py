"""Run an experiment's cells in parallel processes, and store their results.

Each finished run is written to disk: first its curve, then its row, which marks the curve as
complete. So a command resumes where it was interrupted, however it ended.
"""

from __future__ import annotations

import csv
import fnmatch
import gzip
import hashlib
import io
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from experiments import machine
from experiments.reproduction import Cell, Experiment, Points, Results, Row, settings_of
from fedstream.core.errors import ConfigError
from fedstream.history.display import duration
from fedstream.runtime.text import nearest
from fedstream.sweep.parallel import each, share

if TYPE_CHECKING:
    from fedstream.simulation import VersionMade
    from fedstream.trainer.task import Task, TaskSettings

ROWS, CURVES, ABOUT = "results.csv", "curves.csv.gz", "about.json"
_SPENT = {  # columns of the curves, and the attributes of a version in them
    "version": "version",
    "updates": "used",
    "gradients": "gradients",
    "epochs": "epochs",
    "communications": "communications",
    "time": "time",
}
_TYPES: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """A run to be done."""

    cell: str
    repeat: int
    scale: float
    sets: dict[str, object]
    metric: str
    higher: bool
    points: int
    checkpoint: Path | None = None
    """where the run is saved every five minutes, and from which it continues"""

    @property
    def configuration(self) -> str:
        """A digest of the keys that are set."""
        return hashlib.sha256(json.dumps(self.sets, sort_keys=True).encode()).hexdigest()[:10]


def job_of(experiment: Experiment, cell: Cell, repeat: int, scale: float) -> PlannedRun:
    """One of an experiment's runs."""
    return PlannedRun(
        cell.label,
        repeat,
        scale,
        experiment.sets(cell, repeat, scale),
        experiment.metric,
        experiment.higher,
        experiment.points,
    )


def jobs_of(
    experiment: Experiment,
    *,
    repeats: int | None,
    scale: float,
    cells: Sequence[str] = (),
    seed: int | None = None,
) -> list[PlannedRun]:
    """The runs of an experiment, with ``repeats`` per cell; None: as many as it declares.

    ``cells``: labels or patterns; empty: all cells. ``seed``: number, and so seed, of the first
    repeat; None: as the experiment declares. Every cell is run before any is repeated. Runs on the
    same data come one after the other, since a process keeps the data that it read last. Raises
    ConfigError for a pattern that matches no cell.
    """
    first = experiment.first if seed is None else seed
    jobs = [
        job_of(experiment, cell, first + repeat, scale)
        for repeat in range(repeats or experiment.repeats)
        for cell in chosen(experiment, cells)
    ]
    data = [
        json.dumps({k: v for k, v in job.sets.items() if k.startswith("task.")}) for job in jobs
    ]
    place = {of: n for n, of in reversed(list(enumerate(data)))}
    return [job for _, job in sorted(zip(data, jobs, strict=True), key=lambda x: place[x[0]])]


def chosen(experiment: Experiment, patterns: Sequence[str]) -> list[Cell]:
    """The cells that match any pattern, in order; without patterns, all. Raises ConfigError."""
    if not experiment.cells:
        raise ConfigError(f"{experiment.name} has no cells yet: {experiment.before}")
    labels = [cell.label for cell in experiment.cells]
    for pattern in patterns:
        if pattern not in labels and not fnmatch.filter(labels, pattern):
            raise _unknown(experiment, pattern)
    return [
        cell
        for cell in experiment.cells
        if not patterns
        or any(cell.label == one or fnmatch.fnmatchcase(cell.label, one) for one in patterns)
    ]


def _unknown(experiment: Experiment, label: str) -> ConfigError:
    labels = [cell.label for cell in experiment.cells]
    near = nearest(label, labels) or labels[0]
    return ConfigError(
        f"{experiment.name} has no cell {label!r}; did you mean {near!r}? "
        f"`python -m experiments --list {experiment.name}` lists them"
    )


def check(experiment: Experiment) -> None:
    """Raise ConfigError for a cell that can't run, and for a label that two cells have or none."""
    labels = [cell.label for cell in experiment.cells]
    if twice := [label for label, n in Counter(labels).items() if n > 1]:
        raise ConfigError(f"{experiment.name} has two cells {twice[0]!r}: rename one")
    named = [label for picture in experiment.pictures for label in picture.cells]
    for label in (*named, *(cell.beside for cell in experiment.cells if cell.beside is not None)):
        if label not in labels:
            raise _unknown(experiment, label)
    for cell in experiment.cells:
        try:
            settings_of(experiment.sets(cell, experiment.first, 1.0))
        except ConfigError as error:
            raise ConfigError(f"{experiment.name}, cell {cell.label!r}: {error}") from error


def run_job(job: PlannedRun) -> tuple[Row, Points]:
    """One run. Raises ConfigError and DataError."""
    from fedstream.simulation import simulate

    settings = settings_of(job.sets)
    outcome = simulate(settings, _task(settings.task), checkpoint=job.checkpoint)
    measured = outcome.measured
    if not measured or job.metric not in measured[0].metrics:
        raise ConfigError(f"cell {job.cell!r}: the task does not measure {job.metric}")
    sign = 1 if job.higher else -1
    best = max(
        (made for made in measured if math.isfinite(made.metrics[job.metric])),
        key=lambda made: sign * made.metrics[job.metric],
        default=measured[0],
    )
    last = outcome.versions[-1]
    row = Row(
        job.cell,
        job.repeat,
        job.scale,
        job.configuration,
        outcome.state,
        last.version,
        last.used,
        last.gradients,
        round(last.epochs, 3),
        last.communications,
        sum(outcome.refused.values()),
        best.metrics[job.metric],
        best.version,
        outcome.last(job.metric),
        round(outcome.seconds, 2),
        precision=outcome.precision,
    )
    return row, thinned(outcome.versions, job.points)


@lru_cache(maxsize=1)
def _task(settings: TaskSettings) -> Task:
    from fedstream.trainer.loading import load_task

    return load_task(settings.name, settings)


def thinned(versions: Sequence[VersionMade], most: int) -> Points:
    """At most ``most`` of the measured versions, evenly spaced.

    ``training_loss`` is the mean over the versions since the previous one that is kept.
    """
    measured = [n for n, made in enumerate(versions) if made.metrics]
    chosen = np.linspace(0, len(measured) - 1, min(most, len(measured))).round().astype(int)
    kept = [measured[n] for n in chosen]
    losses, since = [], 0
    for n in kept:
        found = [made.loss for made in versions[since : n + 1] if made.loss is not None]
        losses.append(sum(found) / len(found) if found else math.nan)
        since = n + 1
    curve: Points = {
        name: np.array([getattr(versions[n], attribute) for n in kept], float)
        for name, attribute in _SPENT.items()
    }
    curve["training_loss"] = np.array(losses)
    for name in versions[kept[0]].metrics:
        curve[name] = np.array([versions[n].metrics[name] for n in kept])
    return curve


# on disk


@dataclass(frozen=True, slots=True)
class Call:
    """A command that ran something, as recorded in about.json."""

    command: str
    date: str
    runs: int
    processes: int
    threads: int
    seconds: float
    """from its start to its end"""
    machine: dict[str, str | int]
    """where it ran, with the versions and the commit of what ran"""


class Store:
    """The folder with an experiment's results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def scale(self) -> float | None:
        """The scale of the stored results; None if there are none."""
        return next((row.scale for row in self._rows()), None)

    def begin(
        self,
        experiment: Experiment,
        scale: float,
        *,
        again: bool,
        some: Container[tuple[str, int]] | None = None,
    ) -> set[tuple[str, int]]:
        """Drop outdated runs from the files; return the others, by cell and repeat.

        A run is outdated if its cell no longer exists or is now configured otherwise. ``again``:
        drop all runs too, or those in ``some``. Raises ConfigError if there are results of another
        experiment, or of another scale, unless all are dropped.
        """
        other = self._about().get("experiment", experiment.name)
        if other != experiment.name:
            raise ConfigError(
                f"{self.folder} holds results of {other}: choose another folder with --out"
            )
        there = self.scale()
        if there is not None and there != scale and not (again and some is None):
            raise ConfigError(
                f"{self.folder} holds results at scale {there:g}, not {scale:g}: give --scale "
                f"{there:g}, another folder with --out, or --again to replace them"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        cells = {cell.label: cell for cell in experiment.cells}
        found = self.results()
        kept = [
            row
            for row in found.rows
            if not (again and (some is None or (row.cell, row.repeat) in some))
            and row.cell in cells
            and job_of(experiment, cells[row.cell], row.repeat, scale).configuration
            == row.configuration
        ]
        runs = {(row.cell, row.repeat) for row in kept}
        self._write(CURVES, [line for line in self._lines(CURVES) if _run_of(line) in runs])
        self._write(ROWS, [asdict(row) for row in kept])
        if not kept:
            (self.folder / ABOUT).unlink(missing_ok=True)
        return runs

    def add(self, row: Row, curve: Points) -> None:
        """Store a finished run."""
        run = {"cell": row.cell, "repeat": row.repeat}
        added = [
            run | dict(zip(curve, map(_text, values), strict=True))
            for values in zip(*curve.values(), strict=True)
        ]
        self._write(CURVES, [*self._lines(CURVES), *added])
        self._write(ROWS, [asdict(one) for one in (*self._rows(), row)])

    def results(self) -> Results:
        """All stored results."""
        rows = self._rows()
        columns: dict[tuple[str, int], dict[str, list[float]]] = {}
        whole = {(row.cell, row.repeat) for row in rows}
        for line in self._lines(CURVES):
            key = _run_of(line)
            if key in whole:
                del line["cell"], line["repeat"]
                curve = columns.setdefault(key, {name: [] for name in line})
                for name, value in line.items():
                    curve[name].append(float(value) if value else math.nan)
        curves = {
            key: {name: np.array(values) for name, values in curve.items()}
            for key, curve in columns.items()
        }
        rows = [row for row in rows if (row.cell, row.repeat) in curves]
        calls = self._calls()
        command = calls[-1]["command"] if calls else ""
        return Results(rows, curves, rows[0].scale if rows else 1.0, command)

    def tell(self, experiment: Experiment, scale: float, call: Call) -> None:
        """Write about.json: the commands, this one last, and the configurations."""
        rows, calls = self._rows(), self._calls()
        if calls and (calls[-1]["command"], calls[-1]["date"]) == (call.command, call.date):
            calls.pop()  # this command's entry, as of the previous run
        about = {
            "experiment": experiment.name,
            "source": experiment.source,
            "scale": scale,
            "metric": experiment.metric,
            "calls": [*calls, asdict(call)],
            "runs": len(rows),
            "seconds": round(sum(row.seconds for row in rows)),
            "base": dict(experiment.base),
            "cells": {cell.label: {"paper": cell.paper, **cell.sets} for cell in experiment.cells},
        }
        (self.folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")

    def _calls(self) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = self._about().get("calls", [])
        return calls

    def _about(self) -> dict[str, Any]:
        path = self.folder / ABOUT
        about: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return about

    def _rows(self) -> list[Row]:
        found = {}
        for line in self._lines(ROWS):
            # some results are older than the columns `commit` and `precision`
            row = Row(**{f.name: _TYPES[str(f.type)](line.get(f.name, "")) for f in fields(Row)})
            found[row.cell, row.repeat] = row
        return list(found.values())

    def _lines(self, name: str) -> Iterator[dict[str, str]]:
        path = self.folder / name
        if path.is_file():
            content = path.read_bytes()
            text = gzip.decompress(content) if path.suffix == ".gz" else content
            yield from csv.DictReader(io.StringIO(text.decode(), newline=""))

    def _write(self, name: str, lines: Sequence[Mapping[str, object]]) -> None:
        """Replace a file as a whole: nobody finds it half-written, however this process ends."""
        path = self.folder / name
        if not lines:
            path.unlink(missing_ok=True)
            return
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        content = text.getvalue().encode()
        new = path.with_name(f".{name}.new")
        new.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        new.replace(path)


def _run_of(line: Mapping[str, str]) -> tuple[str, int]:
    """The run that a line of the curves belongs to."""
    return line["cell"], int(line["repeat"])


def _text(value: float) -> str:
    """A number to six digits, whole numbers in full; empty if not measured."""
    if math.isnan(value):
        return ""
    return str(int(value)) if value.is_integer() else f"{value:.6g}"


def run(
    experiment: Experiment,
    folder: Path,
    *,
    repeats: int | None = None,
    scale: float = 1.0,
    cells: Sequence[str] = (),
    seed: int | None = None,
    processes: int | None = 1,
    again: bool = False,
    command: str = "",
    program: str = "",
    say: Callable[[str], object] = lambda _: None,
) -> Results:
    """Run what is missing, and return all results. ``program``: the commit that runs it.

    A run that was killed continues from its checkpoint in ``folder``.

    ``processes``: at most so many; None: one for each core.

    Raises ConfigError, DataError; runs that had finished are kept.
    """
    store, began = Store(folder), time.perf_counter()
    wanted = jobs_of(experiment, repeats=repeats, scale=scale, cells=cells, seed=seed)
    check(experiment)
    some = {(job.cell, job.repeat) for job in wanted} if cells or seed is not None else None
    there = store.begin(experiment, scale, again=again, some=some)
    checkpoints = {
        (job.cell, job.repeat): folder.absolute() / _checkpoint(job)
        for job in wanted
        if (job.cell, job.repeat) not in there
    }
    for checkpoint in checkpoints.values() if again else ():
        checkpoint.unlink(missing_ok=True)
    missing = [
        replace(job, checkpoint=checkpoints[job.cell, job.repeat])
        for job in wanted
        if (job.cell, job.repeat) in checkpoints
    ]
    processes, threads = share(len(missing), processes)
    say(f"{experiment.name}: {len(wanted)} runs, {len(wanted) - len(missing)} of them done already")
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    place = machine.described(program)
    waiting, done = Counter(job.cell for job in missing), list[Row]()
    for n, (row, curve) in enumerate(
        each(run_job, missing, processes=processes, threads=threads), start=1
    ):
        row = replace(row, commit=program)
        store.add(row, curve)
        seconds = time.perf_counter() - began
        call = Call(command, date, n, processes, threads, round(seconds, 1), place)
        store.tell(experiment, scale, call)
        checkpoints[row.cell, row.repeat].unlink(missing_ok=True)
        waiting[row.cell] -= 1
        done.append(row)
        left = f"; about {duration(left_s(waiting, done, processes))} to go" * (n < len(missing))
        say(
            f"[{n}/{len(missing)}] {row.cell}, repeat {row.repeat}: best {row.best:.4f}, last "
            f"{row.last:.4f}, {row.seconds:.1f} s{left}"
        )
    return store.results()


def _checkpoint(job: PlannedRun) -> str:
    """The name of a run's checkpoint."""
    return f"{quote(job.cell, safe='')}-{job.repeat}-{job.configuration}.checkpoint"


def left_s(waiting: Mapping[str, int], done: Sequence[Row], processes: int) -> float:
    """Estimate the seconds left, from the mean duration of each cell's finished runs.

    For a cell without finished runs, the mean over all cells is used.
    """
    took: dict[str, list[float]] = {}
    for row in done:
        took.setdefault(row.cell, []).append(row.seconds)
    usual = fmean(row.seconds for row in done)
    one = {cell: fmean(took[cell]) if cell in took else usual for cell, n in waiting.items() if n}
    all_s = sum(one[cell] * waiting[cell] for cell in one)
    return max([all_s / processes, *one.values()])
