"""Goals of metrics, min or max: declared by the task, or well known by the metric's name.

Other metrics have no goal; commands that need one ask the user.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import inf, isfinite
from typing import Annotated, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import Field, model_validator

from fedstream.core.errors import ConfigError
from fedstream.core.messages import Goal
from fedstream.runtime.config import Section
from fedstream.runtime.text import did_you_mean

T = TypeVar("T")


Goals: TypeAlias = Mapping[str, Goal]
"""What a task declares, by the names of its metrics."""

_LOW = """
    bpc brier brier_score cer character_error_rate cross_entropy ece eer error error_rate fid
    hinge_loss log_loss logloss loss mae mape mean_absolute_error mean_squared_error mse msle nll
    perplexity ppl rmse rmsle root_mean_squared_error smape wer word_error_rate
"""
_HIGH = """
    acc accuracy auc auprc auroc average_precision balanced_accuracy bleu dice f1 f1_score iou kappa
    map mcc mean_average_precision mean_iou miou ndcg pr_auc precision psnr r2 r2_score recall
    roc_auc rouge sensitivity specificity ssim
"""
# Words for where and how a metric is measured, which don't change its goal.
_CONTEXT = "dev eval macro mean micro test top1 top3 top5 train val valid validation weighted"
_KNOWN: dict[str, Goal] = {
    **dict.fromkeys(_LOW.split(), "min"),
    **dict.fromkeys(_HIGH.split(), "max"),
}
# Prefixes of metrics that trainer/evaluator.py derives from the devices' metrics.
_OVER_DEVICES = re.compile(r"device_(mean|worst_tenth|deviation)_")
_DEVIATION = "device_deviation_"
ON_DEVICES = "devices_"  # prefix of metrics over the test data of all devices together
# Prefixes of metrics that may be the main one, the preferred first: of the test data, over the rows
# of all devices, over the devices.
_MAIN = ("", ON_DEVICES, "device_mean_")
MOST_RELAPSES = 1  # in the newest measurements; more cause a warning
_RECENT = 20  # measurements in which relapses are counted
_CLEARLY = 5  # normally distributed noise exceeds this a few times in a thousand


def goal_of(metric: str, declared: Goals) -> Goal | None:
    """The goal of a metric; None if it is neither declared nor well known.

    ``val_loss`` and ``loss_test`` have the goal of ``loss``. Metrics over devices have the goal of
    the devices' metric, except that the goal of a deviation is min.
    """
    if metric.startswith(_DEVIATION):
        return "min"
    name = _OVER_DEVICES.sub("", metric).removeprefix(ON_DEVICES)
    if name in declared:
        return declared[name]
    words = re.split(r"[^a-z0-9]+", name.lower())
    while words:
        if found := _KNOWN.get("_".join(words)):
            return found
        if words[0] in _CONTEXT.split():
            words.pop(0)
        elif words[-1] in _CONTEXT.split():
            words.pop()
        else:
            break
    return None


def unknown_goal(metric: str) -> str:
    """The error text about a metric without a goal."""
    return (
        f"whether a low or a high {metric} is good is unknown: set Task.goal = "
        f'{{"{metric}": "min"}} or "max"'
    )


def required_goal(key: str, metric: str, declared: Goals) -> Goal:
    """The goal of the metric that a key of the configuration names.

    Raises ConfigError if it has none, and suggests the most similar metric that has one.
    """
    if (goal := goal_of(metric, declared)) is None:
        hint = did_you_mean(metric, [*declared, *_KNOWN])
        raise ConfigError(f"{key}: {unknown_goal(metric)}{hint}")
    return goal


def is_on_devices(metric: str) -> bool:
    """Whether devices measure the metric, with ``evaluator.on_devices``."""
    return metric.startswith(ON_DEVICES)


def is_over_devices(metric: str) -> bool:
    """Whether fedstream derived the metric from the devices' metrics."""
    return _OVER_DEVICES.match(metric) is not None


def main_metric(
    names: Iterable[str], declared: Goals, stop_metric: str | None = None
) -> str | None:
    """The metric by which versions are compared, and which is shown first; None if there is none.

    The one that may stop the run, if it is among ``names``; else one of the test data; else one
    over the rows of all devices (``devices_accuracy``); else a mean over the devices. Of these
    accuracy, or else the first by name that is not the loss, metrics with a goal first.
    """

    def place(name: str) -> tuple[bool, int, bool, bool, bool, str]:
        level = max(at for at, prefix in enumerate(_MAIN) if name.startswith(prefix))
        plain = name.removeprefix(_MAIN[level])
        goal = goal_of(name, declared)
        return name != stop_metric, level, plain != "accuracy", plain == "loss", goal is None, name

    able = (
        name
        for name in names
        if name == stop_metric or name.startswith(_MAIN[-1]) or not is_over_devices(name)
    )
    return min(able, key=place, default=None)


def ordered(
    names: Iterable[str], declared: Goals, stop_metric: str | None = None
) -> tuple[str, ...]:
    """Each metric once: the main one, the loss, others of the test data, those over devices."""
    found = dict.fromkeys(names)
    main = main_metric(found, declared, stop_metric)

    def place(name: str) -> tuple[bool, bool, bool, bool]:
        return name != main, name != "loss", is_over_devices(name), is_on_devices(name)

    return tuple(sorted(found, key=place))


def best_of(values: Iterable[tuple[float, T]], goal: Goal | None) -> tuple[float, T] | None:
    """The pair with the best value, the first of equals; None without goal or finite value."""
    finite = (one for one in values if isfinite(one[0]))
    if goal is None:
        return None
    return (min if goal == "min" else max)(finite, key=lambda one: one[0], default=None)


def is_better(value: float, than: float, goal: Goal) -> bool:
    """Whether a value is strictly better than another; False if either is NaN."""
    return value < than if goal == "min" else value > than


def reaches(value: float, target: float, goal: Goal) -> bool:
    """Whether a value is as good as a target; NaN is not."""
    return value == target or is_better(value, target, goal)


class StopSettings(Section):
    """When one metric ends a run before its last version."""

    metric: Annotated[str, Field(min_length=1, max_length=200)] = "accuracy"
    target: float | None = None  # it ends when a measurement is at least as good
    patience: Annotated[int, Field(ge=1)] | None = None  # measurements in a row without a new best
    min_delta: Annotated[float, Field(ge=0)] = 0.0  # by how much a new best must be better

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.target is None and self.patience is None:
            raise ValueError("needs a target, or patience")
        return self


class Stopping:
    """Decides with each measurement whether the run ends."""

    def __init__(self, settings: StopSettings | None, declared: Goals) -> None:
        """Without ``settings``, the run goes on. Raises ConfigError for a metric without a goal."""
        self._settings = settings
        self._goal = (
            required_goal("run.stop.metric", settings.metric, declared) if settings else None
        )
        self._best: tuple[float, int] | None = None  # value, version
        self._waited = 0  # measurements since
        # The last measurement's version, and best and waited before it: it may come again.
        self._last: tuple[int, tuple[float, int] | None, int] | None = None

    def why(self, metrics: Mapping[str, float], version: int) -> str:
        """Why the run ends with this measurement; '' if it goes on."""
        settings, goal = self._settings, self._goal
        if settings is None or goal is None or settings.metric not in metrics:
            return ""
        name, value = settings.metric, metrics[settings.metric]
        if settings.target is not None and reaches(value, settings.target, goal):
            return f"{name} {value:.4f} at version {version}"
        if settings.patience is None or self._is_best(value):
            return ""
        if self._waited + 1 < settings.patience:
            return ""
        if self._best is None:
            return f"no finite {name} in {settings.patience} measurements, at version {version}"
        best, at = self._best
        measurements = f"{settings.patience} measurements after version {at}"
        return f"{name} not better than {best:.4f} in {measurements}, at version {version}"

    def add(self, metrics: Mapping[str, float], version: int) -> str:
        """Add the next measurement, or the last one again; returns the same as :meth:`why`."""
        if self._settings is None or self._settings.metric not in metrics:
            return ""
        if self._last is not None and self._last[0] == version:
            _, self._best, self._waited = self._last
        self._last = version, self._best, self._waited
        found = self.why(metrics, version)
        value = metrics[self._settings.metric]
        if self._is_best(value):
            self._best, self._waited = (value, version), 0
        else:
            self._waited += 1
        return found

    def _is_best(self, value: float) -> bool:
        settings, goal = self._settings, self._goal
        if settings is None or goal is None or not isfinite(value):
            return False
        if self._best is None:
            return True
        margin = settings.min_delta if goal == "max" else -settings.min_delta
        return is_better(value, self._best[0] + margin, goal)


class Swing(NamedTuple):
    """The number of a metric's relapses in its newest measurements."""

    metric: str
    times: int
    measurements: int  # at most 20

    def __str__(self) -> str:
        often = "once" if self.times == 1 else f"{self.times} times"
        return f"{self.metric} fell back {often} in {self.measurements} measurements"


def relapses(values: Sequence[float], goal: Goal) -> int:
    """Count how often a metric lost its gains.

    A value is bad if it is not finite, or if it is worse than the median of the better half by more
    than half of the larger magnitude of the two and more than 5 times the range of the better half.
    A relapse is a bad value right after one that is not. So noise around a constant is no relapse,
    and one huge value counts only once.
    """
    costs = [(value if goal == "min" else -value) if isfinite(value) else inf for value in values]
    better = sorted(cost for cost in costs if cost < inf)
    better = better[: max(1, len(better) // 2)]
    if not better:
        return 0
    good, noise = better[len(better) // 2], better[-1] - better[0]
    lost = [
        cost == inf or cost - good > max(_CLEARLY * noise, max(abs(cost), abs(good)) / 2)
        for cost in costs
    ]
    return sum(now and not before for before, now in pairwise(lost))


class Swings(dict[str, Swing]):
    """The swings of all metrics with a goal, except metrics over devices."""

    def __init__(self, declared: Goals) -> None:
        super().__init__()
        self._declared = declared
        self._newest: dict[str, deque[float]] = {}

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add a measurement of all metrics."""
        for name, value in metrics.items():
            goal = goal_of(name, self._declared)
            if goal is not None and not is_over_devices(name):
                newest = self._newest.setdefault(name, deque(maxlen=_RECENT))
                newest.append(value)
                self[name] = Swing(name, relapses(tuple(newest), goal), len(newest))

    def clear(self) -> None:
        """Forget all measurements."""
        super().clear()
        self._newest.clear()

    @property
    def worst(self) -> Swing | None:
        """The swing with the most relapses; None before any metric with a goal is measured."""
        return max(self.values(), key=lambda swing: swing.times, default=None)
