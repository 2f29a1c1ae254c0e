"""Which end of a metric is good: as the task declares it, or as everybody knows it by its name.

A name that neither of them knows has no goal: where a choice depends on it, the user is asked.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING, TypeAlias, TypeVar, get_args

from fedstream.broker.errors import ConfigError
from fedstream.broker.messages import Goal

T = TypeVar("T")

if TYPE_CHECKING:
    from fedstream.trainer.task import Task

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
# Where and how a metric is measured, which doesn't change what is good.
_CONTEXT = "dev eval macro mean micro test top1 top3 top5 train val valid validation weighted"
_KNOWN: dict[str, Goal] = {
    **dict.fromkeys(_LOW.split(), "min"), **dict.fromkeys(_HIGH.split(), "max")
}  # fmt: skip
OVER_DEVICES = "device_"  # what trainer/fairness.py derives from the devices' metrics
_MEANS = re.compile(r"device_(mean|worst_tenth)_")
_DEVIATION = "device_deviation_"
RECENT = 20  # measurements in which relapses are counted
MOST_RELAPSES = 1  # among these; more of them are worth a warning


def goal_of(metric: str, declared: Goals) -> Goal | None:
    """Whether a metric is to be low or high; None if nobody said so.

    ``val_loss`` and ``loss_test`` are as good as ``loss``; what fedstream derives from devices'
    metrics is as good as these, and their deviation is good if it is low.
    """
    if metric.startswith(_DEVIATION):
        return "min"
    name = _MEANS.sub("", metric)
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
    """What to do about a metric without a goal."""
    return (
        f"whether a low or a high {metric} is good is unknown: set Task.goal = "
        f'{{"{metric}": "min"}} or "max"'
    )


def main_metric(names: Iterable[str]) -> str | None:
    """The metric to show or compare unless another is asked for; None if there is none.

    It is accuracy, or else the first by name that is not the loss.
    """
    own = (name for name in names if not name.startswith(OVER_DEVICES))
    return min(own, key=lambda name: (name != "accuracy", name == "loss", name), default=None)


def declared_goals(task: Task) -> dict[str, Goal]:
    """A task's own goals. Raises ConfigError if they are not ``min`` or ``max`` by name."""
    goal: object = task.goal
    if isinstance(goal, Mapping) and all(
        isinstance(name, str) and end in get_args(Goal) for name, end in goal.items()
    ):
        return dict(goal)
    raise ConfigError(
        f"Task.goal = {goal!r}: must be a dict from names of metrics to 'min' or 'max', such as "
        '{"rmse": "min"}'
    )


def best_of(values: Iterable[tuple[float, T]], goal: Goal | None) -> tuple[float, T] | None:
    """The first best value, with what belongs to it; None without a goal or a finite value."""
    finite = (one for one in values if isfinite(one[0]))
    if goal is None:
        return None
    return (min if goal == "min" else max)(finite, key=lambda one: one[0], default=None)


def is_better(value: float, than: float, goal: Goal) -> bool:
    """Whether a value is strictly better than another; NaN is not, and is not a basis either."""
    return value < than if goal == "min" else value > than


def reaches(value: float, target: float, goal: Goal) -> bool:
    """Whether a value is as good as a target; NaN is not."""
    return value == target or is_better(value, target, goal)


def ends_run(metrics: Mapping[str, float], target: float | None) -> bool:
    """Whether the accuracy is what a run was to end at; ``target`` None: it has none."""
    return target is not None and reaches(metrics.get("accuracy", nan), target, "max")


class Relapses:
    """Counts how often a metric recently lost what it had gained.

    Lost: nearer to the worst value so far than to the best, where these are far apart: by half of
    the larger one. A value that is no finite number is lost too.
    """

    def __init__(self, goal: Goal) -> None:
        self._goal = goal
        self._best = self._worst = nan
        self._is_lost = False
        self._recent: deque[bool] = deque(maxlen=RECENT)

    def add(self, value: float) -> None:
        """Take the next measurement."""
        if isfinite(value):
            if isnan(self._best) or is_better(value, self._best, self._goal):
                self._best = value
            if isnan(self._worst) or is_better(self._worst, value, self._goal):
                self._worst = value
        gain, loss = abs(self._best - self._worst), abs(self._best - value)
        is_far = gain >= max(abs(self._best), abs(self._worst)) / 2
        is_lost = not isnan(self._best) and (not isfinite(value) or (is_far and loss > gain / 2))
        self._recent.append(is_lost and not self._is_lost)
        self._is_lost = is_lost

    @property
    def count(self) -> int:
        """How often it was lost anew in the newest 20 measurements."""
        return sum(self._recent)


class Swings(dict[str, Relapses]):
    """The relapses of each metric that has a goal; of those over devices, none are counted."""

    def __init__(self, declared: Goals) -> None:
        super().__init__()
        self._declared = declared

    def add(self, metrics: Mapping[str, float]) -> None:
        """Take the next measurement of all metrics."""
        for name, value in metrics.items():
            goal = goal_of(name, self._declared)
            if goal is not None and not name.startswith(OVER_DEVICES):
                self.setdefault(name, Relapses(goal)).add(value)
