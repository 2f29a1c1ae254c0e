"""The trials of a sweep: configurations, and the simulation of one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.messages import Goal
from fedstream.runtime.config import Option, load
from fedstream.runtime.text import did_you_mean
from fedstream.settings.config import Settings
from fedstream.settings.services import check_used
from fedstream.sweep.space import SweptKeys
from fedstream.trainer.goals import goal_of, is_over_devices, main_metric, unknown_goal
from fedstream.trainer.task import declared_goals

if TYPE_CHECKING:
    from fedstream.simulation import VersionMade
    from fedstream.trainer.task import Task, TaskSettings

_POINTS = 100  # kept points of a curve
_TRY_S = 10.0  # time limit for trying configurations


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the sweep."""

    keys: SweptKeys
    text: str
    """the whole configuration as TOML"""

    @property
    def name(self) -> str:
        """A digest of the whole configuration, which identifies its runs."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:10]


class Trial(NamedTuple):
    """A run to do: the configuration with its seed increased by ``repeat``."""

    configuration: str
    file: Path
    keys: SweptKeys
    repeat: int
    metric: str | None
    """the metric that the sweep compares; None: the run's main metric"""
    goal: Goal | None = None
    """the metric's goal, if given by the command"""


class UnknownGoal(ConfigError):
    """The compared metric has no goal."""

    @classmethod
    def of(cls, metric: str) -> Self:
        """The error, for a metric."""
        return cls(f"--metric {metric}: {unknown_goal(metric)}, or give --goal min or --goal max")


class UnknownMetric(ConfigError):
    """The task does not measure the compared metric."""

    @classmethod
    def among(cls, metric: str, known: Sequence[str]) -> Self:
        """The error, for the metrics that the task has."""
        has = ", ".join(known) or "nothing"
        return cls(f"--metric {metric}: the task measures {has}{did_you_mean(metric, known)}")


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a trial."""

    configuration: str
    repeat: int
    seed: int
    state: str
    """finished; failed: its updates were refused in a row; raised: its task raised"""
    why: str
    versions: int
    updates: int
    gradients: int
    mean_staleness: float
    seconds: float
    """real time"""
    curve: dict[str, list[float | None]]
    """``version``, ``updates`` and each metric at some of the measured versions; None: not finite;
    empty if the task raised"""
    goal: dict[str, Goal] = field(default_factory=dict)
    """goals of metrics, declared by the task"""
    stop_metric: str | None = None
    """the metric that may end the run"""

    @property
    def metrics(self) -> list[str]:
        """The measured metrics."""
        return [name for name in self.curve if name not in ("version", "updates")]


def words(keys: Mapping[str, object]) -> str:
    """The keys of a configuration in one line."""
    return ", ".join(f"{key} = {value}" for key, value in keys.items())


def configurations(
    points: Iterable[SweptKeys], read: Callable[[Sequence[Option]], Settings]
) -> list[Configuration]:
    """The configurations at these points, without duplicates.

    ``read``: returns the configuration with some keys changed. Raises ConfigError, naming the first
    point with an invalid configuration.
    """
    from fedstream.simulation.run import as_toml

    found: dict[str, Configuration] = {}
    for keys in points:
        try:
            settings = read([Option("--over", key, value) for key, value in keys.items()])
            check_used(settings)
        except ConfigError as error:
            others = {key: one for key, one in keys.items() if f"{key} = " not in str(error)}
            raise ConfigError(f"with {words(others)}: {error}" if others else str(error)) from error
        one = Configuration(dict(keys), as_toml(settings.with_absolute_paths()))
        found.setdefault(one.name, one)
    return list(found.values())


def check_some_works(trials: Sequence[Trial]) -> None:
    """Raise the first error if the task works with no configuration.

    Stops after some seconds with the tried configurations.
    """
    from fedstream.settings.dry_step import try_task
    from fedstream.settings.services import devices_of

    first: FedstreamError | None = None
    until = time.monotonic() + _TRY_S
    for trial in {one.configuration: one for one in trials}.values():
        settings = load(Settings, path=trial.file, environ={})
        try:
            task = _task(settings.task)
            try_task(settings, task, devices_of(settings, task), simulated=True)
        except FedstreamError as error:
            first = first or error
            if time.monotonic() > until:
                break
        else:
            return
    if first is not None:
        raise first


def run_trial(trial: Trial) -> Finished:
    """Simulate one run; if its task raises, return this as the result.

    Raises UnknownMetric and UnknownGoal after the first measurement, and ConfigError for a task
    that can't be loaded.
    """
    from fedstream.simulation import simulate

    def heard(made: VersionMade, _model: object) -> None:
        if not made.metrics:
            return
        stop = settings.run.stop_metric
        metric = trial.metric or main_metric(made.metrics, declared, stop) or "accuracy"
        spread = is_over_devices(metric)  # perhaps measured only at the last version
        if not spread and metric not in made.metrics:
            raise UnknownMetric.among(metric, list(made.metrics))
        if trial.goal is None and goal_of(metric, declared) is None:
            raise UnknownGoal.of(metric)

    declared: Mapping[str, Goal] = {}
    settings = load(Settings, path=trial.file, environ={})
    if not any(key.partition(".")[0] == "task" for key in trial.keys):
        _task(settings.task)  # raises; the same for all trials
    seed = settings.run.seed + trial.repeat
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"seed": seed})})
    began = time.perf_counter()
    try:
        task = _task(settings.task)
        declared = declared_goals(task)
        outcome = simulate(settings, task, on_version=heard)
    except (UnknownMetric, UnknownGoal):
        raise
    except FedstreamError as error:
        return Finished(
            trial.configuration,
            trial.repeat,
            seed,
            "raised",
            str(error),
            0,
            0,
            0,
            0.0,
            round(time.perf_counter() - began, 2),
            {},
        )
    last = outcome.versions[-1]
    late = [update.staleness for made in outcome.versions for update in made.updates]
    return Finished(
        trial.configuration,
        trial.repeat,
        seed,
        outcome.state,
        outcome.why,
        last.version,
        last.used,
        last.gradients,
        sum(late) / len(late) if late else 0.0,
        round(outcome.seconds, 2),
        curve(outcome.measured),
        dict(declared),
        settings.run.stop_metric,
    )


@lru_cache(maxsize=1)
def _task(settings: TaskSettings) -> Task:
    from fedstream.settings.services import loaded

    return loaded(settings)


def curve(measured: Sequence[VersionMade]) -> dict[str, list[float | None]]:
    """The measured versions' metrics, at most 100 of them, evenly spaced, the last included."""
    places = np.linspace(0, len(measured) - 1, min(_POINTS, len(measured))).round().astype(int)
    kept = [measured[place] for place in places]
    names = dict.fromkeys(name for made in kept for name in made.metrics)
    points: dict[str, list[float | None]] = {
        "version": [made.version for made in kept],
        "updates": [made.used for made in kept],
    }
    for name in names:
        points[name] = [_finite(made.metrics.get(name)) for made in kept]
    return points


def _finite(value: Any) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
