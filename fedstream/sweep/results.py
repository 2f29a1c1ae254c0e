"""A sweep's results: the file with every finished run, and the ranking."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, TypeAlias

from fedstream.core.errors import ConfigError
from fedstream.core.messages import Goal
from fedstream.runtime.process import read_regular
from fedstream.sweep.space import SweptKeys
from fedstream.sweep.trials import Configuration, Finished, UnknownGoal, UnknownMetric
from fedstream.trainer.goals import best_of, goal_of, main_metric

RUNS, TABLE, PICTURE, BEST = "runs.jsonl", "results.csv", "sweep.png", "best.toml"
CONFIGURATIONS = "configurations"

Which: TypeAlias = Literal["last", "best"]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The criterion for ranking configurations."""

    metric: str | None = None
    """None: the runs' main metric"""
    goal: Goal | None = None
    """goal of the metric; None: declared by the task or well known"""
    which: Which = "last"
    """whether a run counts with its last measurement or its best, which fits the test data"""

    def metric_in(self, run: Finished) -> str:
        """The metric by which a run is compared."""
        return self.metric or main_metric(run.metrics, run.goal, run.stop_metric) or "accuracy"

    def goal_in(self, run: Finished) -> Goal:
        """The metric's goal. Raises UnknownGoal."""
        metric = self.metric_in(run)
        goal = self.goal or goal_of(metric, run.goal)
        if goal is None:
            raise UnknownGoal.of(metric)
        return goal

    def best_in(self, run: Finished) -> tuple[float, int] | None:
        """A finished run's best value and its version, the first of equals; None if not finite.

        Raises UnknownGoal.
        """
        values = run.curve[self.metric_in(run)]
        points = zip(values, run.curve["version"], strict=True)
        known = ((value, int(at or 0)) for value, at in points if value is not None)
        return best_of(known, self.goal_in(run))

    def of(self, run: Finished) -> float | None:
        """A run's value; None if it failed or has no finite value. Raises UnknownMetric."""
        if run.state == "raised":
            return None
        metric = self.metric_in(run)
        if metric not in run.curve:
            raise UnknownMetric.among(metric, run.metrics)
        values = run.curve[metric]
        if run.state != "finished" or values[-1] is None:
            return None
        if self.which == "last":
            return values[-1]
        found = self.best_in(run)
        return found[0] if found else None


@dataclass(frozen=True, slots=True)
class Ranked:
    """A configuration's results over its repeats."""

    configuration: str
    keys: SweptKeys
    runs: tuple[Finished, ...]
    metric: str
    values: tuple[float, ...]
    """the metric of every run with a value"""
    bests: tuple[tuple[float, int], ...]
    """the best value of each of these runs, and its version"""

    @property
    def mean(self) -> float | None:
        """The metric's mean; None without a value."""
        return fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        """The metric's standard deviation (n - 1); None below two values."""
        return stdev(self.values) if len(self.values) > 1 else None

    @property
    def best(self) -> tuple[float, float] | None:
        """The means of the best values and of their versions; None without a value."""
        if not self.bests:
            return None
        return fmean(value for value, _ in self.bests), fmean(at for _, at in self.bests)

    @property
    def failed(self) -> int:
        """Runs without a value."""
        return len(self.runs) - len(self.values)

    @property
    def raised(self) -> list[Finished]:
        """Runs whose task raised."""
        return [run for run in self.runs if run.state == "raised"]

    @property
    def reason(self) -> str:
        """The reason of the first failed run; '' for none."""
        failed = [run for run in self.runs if run.state != "finished"]
        if failed:
            return failed[0].why
        return "the metric is not finite" if self.failed else ""

    def means(self) -> list[float | None]:
        """The means of updates, staleness and seconds; None if the task always raised."""
        runs = [run for run in self.runs if run.state != "raised"]
        columns = ("updates", "mean_staleness", "seconds")
        return [fmean(getattr(run, name) for run in runs) if runs else None for name in columns]


def lines(
    configurations: Sequence[Configuration],
    runs: Iterable[Finished],
    ranking: Ranking,
    repeats: int,
) -> list[Ranked]:
    """Rank the configurations with finished runs, the best first. Raises ConfigError.

    Configurations with failed runs come last, as their means leave failed runs out.
    """
    of: dict[str, list[Finished]] = {}
    for run in runs:
        if run.repeat < repeats:
            of.setdefault(run.configuration, []).append(run)
    found = []
    for one in configurations:
        if done := sorted(of.get(one.name, ()), key=lambda run: run.repeat):
            valued = [(run, value) for run in done if (value := ranking.of(run)) is not None]
            bests = (ranking.best_in(run) for run, _ in valued)
            found.append(
                Ranked(
                    one.name,
                    one.keys,
                    tuple(done),
                    ranking.metric_in(valued[0][0] if valued else done[0]),
                    tuple(value for _, value in valued),
                    tuple(best for best in bests if best is not None),
                )
            )

    def place(line: Ranked) -> tuple[bool, int, float]:
        mean = line.mean
        if mean is None:
            return True, line.failed, inf
        run = next(run for run in line.runs if run.state == "finished")
        return False, line.failed, mean if ranking.goal_in(run) == "min" else -mean

    return sorted(found, key=place)


class SweepFolder:
    """The folder of a sweep, with a line for each finished run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, configurations: Iterable[Configuration]) -> None:
        """Create the folder, with every configuration as a file.

        Drops an incomplete last line, which a killed program left.
        """
        (self.folder / CONFIGURATIONS).mkdir(parents=True, exist_ok=True)
        path = self.folder / RUNS
        if path.exists() and not (whole := read_regular(path)).endswith(b"\n"):
            path.write_bytes(whole[: whole.rfind(b"\n") + 1])
        for one in configurations:
            self.file(one).write_text(one.text, encoding="utf-8")

    def file(self, configuration: Configuration) -> Path:
        """The file of a configuration."""
        return self.folder / CONFIGURATIONS / f"{configuration.name}.toml"

    def runs(self) -> list[Finished]:
        """All finished runs; of a repeated run, the last.

        Raises ConfigError for a foreign line.
        """
        path = self.folder / RUNS
        if not path.exists():
            return []
        found: dict[tuple[str, int], Finished] = {}
        for number, line in enumerate(read_regular(path).decode().splitlines(True), start=1):
            try:
                run = Finished(**json.loads(line))
            except (ValueError, TypeError) as error:
                raise ConfigError(
                    f"{path}:{number}: not a run of a sweep: remove the line or choose another "
                    "folder"
                ) from error
            found[run.configuration, run.repeat] = run
        return list(found.values())

    def add(self, run: Finished) -> None:
        """Store a finished run."""
        text = json.dumps(asdict(run), allow_nan=False) + "\n"
        with (self.folder / RUNS).open("a", encoding="utf-8") as file:
            file.write(text)

    def write(self, name: str, content: str) -> None:
        """Replace a file as a whole."""
        new = self.folder / f".{name}.new"
        new.write_text(content, encoding="utf-8")
        new.replace(self.folder / name)


def as_csv(found: Sequence[Ranked], metric: str) -> str:
    """The table: a row for each configuration, the best first."""
    text = io.StringIO(newline="")
    keys = list(dict.fromkeys(key for line in found for key in line.keys))
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            "place",
            *keys,
            metric,
            "deviation",
            "best",
            "best_version",
            "runs",
            "failed",
            "updates",
            "staleness",
            "seconds",
            "reason",
            "configuration",
        ]
    )
    for place, line in enumerate(found, start=1):
        writer.writerow(
            [
                place,
                *(line.keys.get(key, "") for key in keys),
                _text(line.mean),
                _text(line.deviation),
                *map(_text, line.best or (None, None)),
                len(line.runs),
                line.failed,
                *map(_text, line.means()),
                line.reason,
                line.configuration,
            ]
        )
    return text.getvalue()


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
