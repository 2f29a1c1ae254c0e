"""Metrics on the devices' own test data: how well a model serves each device. No I/O.

In a simulation, and with ``evaluator.per_device``, the evaluator measures all devices. With
``evaluator.on_devices``, devices measure themselves: in the field nobody has their test data. Each
answers with its metrics' sums and weights alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from math import ceil, fsum, isfinite, isnan, sqrt
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from fedstream.core.errors import DataError
from fedstream.core.messages import METRIC_CHARS, METRICS, DevicesEvaluated, Measured, Sum
from fedstream.runtime.config import Section
from fedstream.trainer.data import Processor, placed
from fedstream.trainer.goals import ON_DEVICES, Goals, goal_of
from fedstream.trainer.task import Mean, NoLabels, Task, measured, measured_means

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

_MOST = 10_000  # devices that measure a version, or that the evaluator measures
_TENTH = 0.1
_WEIGHTS = 10  # times the median
_LEFT_OUT = 10  # evaluations


class OnDevicesSettings(Section):
    """The table ``[evaluator.on_devices]``: how many devices measure a version, and how often."""

    fraction: Annotated[float, Field(gt=0, le=1)] | None = None  # of the devices that are present
    count: Annotated[int, Field(ge=1)] | None = None  # of devices, in place of a fraction
    every: Annotated[int, Field(ge=1)] | None = None  # versions; None: `evaluator.every`
    min_devices: Annotated[int, Field(ge=1)] = 1  # with fewer measured, a version has no metrics
    timeout_s: Annotated[float, Field(gt=0, le=86_400)] = 60.0  # of an evaluation
    share: Annotated[float, Field(gt=0, le=1)] = 0.5  # of the tasks in flight, and of the workers
    # Largest counted weight of a device of an untrusted site; None: 10 times the median weight.
    most_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    @model_validator(mode="after")
    def _has_one_number(self) -> Self:
        if (self.fraction is None) == (self.count is None):
            raise ValueError("needs either a fraction of the devices or their count, not both")
        if self.count is not None and self.count < self.min_devices:
            raise ValueError(f"count = {self.count} is below min_devices = {self.min_devices}")
        return self


def has_device_tests(task: Task) -> bool:
    """Whether a task defines test data for devices."""
    return type(task).device_test_data is not Task.device_test_data


def device_metrics(
    task: Task,
    module: nn.Module,
    devices: int,
    place: Processor = "cpu",
    cancelled: Callable[[], bool] = lambda: False,
    prepare: Callable[[int], object] = lambda _device: None,
) -> dict[int, dict[str, float]]:
    """The metrics of a model on each device's test data, by device.

    Devices without test data or without counted labels are absent. ``prepare``: called before a
    device is measured, to put its local values into the module.

    If there are more than 10,000 devices, that many are measured, evenly spaced. Once
    ``cancelled()`` is true, returns the devices measured so far. Raises the task's errors.
    """
    found: dict[int, dict[str, float]] = {}
    step = max(1, ceil(devices / _MOST))
    for device in range(0, devices, step):
        if cancelled():
            break
        data = task.device_test_data(device)
        if data is not None:
            prepare(device)
            with suppress(NoLabels):
                found[device] = measured(task, module, placed(data, place))
    return found


def spread(found: Mapping[int, Mapping[str, float]], declared: Goals) -> dict[str, float]:
    """Summarise devices' metrics: the mean, deviation and worst tenth of each over the devices.

    Every device has the same weight. ``device_worst_tenth_accuracy`` is the mean accuracy of the
    worst tenth of the devices (at least one), ``device_deviation_accuracy`` the standard deviation
    over all devices. A metric without a goal (in ``declared``, or well known) has no worst tenth.
    """
    names = {name: None for metrics in found.values() for name in metrics}
    out: dict[str, float] = {}
    for name in names:
        values = [metrics[name] for metrics in found.values() if name in metrics]
        mean = sum(values) / len(values)
        out[f"device_mean_{name}"] = mean
        if (goal := goal_of(name, declared)) is not None:
            sign = -1.0 if goal == "min" else 1.0
            values.sort(key=lambda value: (not isnan(value), sign * value))  # NaN is the worst
            worst = values[: ceil(_TENTH * len(values))]
            out[f"device_worst_tenth_{name}"] = sum(worst) / len(worst)
        deviation = sqrt(sum((value - mean) ** 2 for value in values) / len(values))
        out[f"device_deviation_{name}"] = deviation
    return out


class Choice:
    """Chooses the devices that measure a version.

    The choice depends only on the devices that are present, the seed, the version, and on which
    devices had no test data: those are left out of the next ten evaluations.
    """

    def __init__(self, settings: OnDevicesSettings, seed: int) -> None:
        """``seed``: the run's."""
        self._settings = settings
        self._seed = seed
        self._without: dict[int, int] = {}  # device -> evaluations that still leave it out

    def of(self, present: Sequence[int], version: int) -> tuple[int, ...]:
        """The devices, in order. Those left out are chosen only if no others are present."""
        without = self._without
        others = [device for device in present if device not in without] if without else present
        self._without = {one: left - 1 for one, left in without.items() if left > 1}
        among, settings = others or present, self._settings
        if settings.count is not None:
            number = min(settings.count, len(among))
        else:
            number = ceil((settings.fraction or 1.0) * len(among))
        number = min(number, _MOST)
        drawn = random.Random(f"{self._seed}/{version}").sample(among, number)
        return tuple(sorted(drawn))

    def without_data(self, devices: Iterable[int]) -> None:
        """Leave out devices that had no test data."""
        self._without |= dict.fromkeys(devices, _LEFT_OUT)


def sums_of(task: Task, module: nn.Module, data: Dataset[Any]) -> tuple[int, dict[str, Sum]]:
    """A device's samples, and each metric's sum and weight on its test data.

    A metric that is no :class:`Mean` is weighted by the samples. One that is not finite here (an
    AUC of a single class) is left out, unless none is finite. Raises the errors of
    :func:`measured`, NoLabels without samples, and DataError for metrics that can't be sent.
    """
    samples = len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
    if not samples:
        raise NoLabels("there is nothing to evaluate: the test data have no rows")
    every = measured_means(task, module, data)
    found = {name: one for name, one in every.items() if isfinite(one)} or every
    if len(found) > METRICS or not all(1 <= len(name) <= METRIC_CHARS for name in found):
        raise DataError(
            f"metrics() returned {len(found)} metrics: a device sends at most {METRICS}, with "
            f"names of 1 to {METRIC_CHARS} characters"
        )
    return samples, {
        name: (value.sum, value.count)
        if isinstance(value, Mean)
        else (value * samples, float(samples))
        for name, value in found.items()
    }


def totals(answers: Mapping[int, Measured], most_weight: float | None = None) -> dict[str, Sum]:
    """Add up the devices' sums and weights, exactly rounded, so in any order.

    An untrusted site's device may claim any weight. Such a metric counts with at most
    ``most_weight``, or if that is None, with 10 times the median of all devices' weights (the lower
    of the middle two), and in proportion with its sum.
    """
    names = {name: None for answer in answers.values() for name in answer.sums}
    found = {}
    for name in names:
        told = [(one.sums[name], one.trusted) for one in answers.values() if name in one.sums]
        most = most_weight or _WEIGHTS * median_low(weight for (_, weight), _ in told)
        counted = [
            (total, weight) if trusted or weight <= most else (total / weight * most, most)
            for (total, weight), trusted in told
        ]
        found[name] = fsum(total for total, _ in counted), fsum(weight for _, weight in counted)
    return found


def metrics_over(
    sums: Mapping[str, Sum], answers: Mapping[int, Measured], declared: Goals
) -> dict[str, float]:
    """The metrics of an evaluation: ``devices_accuracy`` and so on, and their spread.

    ``devices_accuracy`` is the mean over all test rows of the devices, ``device_mean_accuracy`` the
    mean over the devices (see :func:`spread`).
    """
    each = {
        device: {name: total / weight for name, (total, weight) in answer.sums.items()}
        for device, answer in answers.items()
    }
    over_rows = {f"{ON_DEVICES}{name}": total / weight for name, (total, weight) in sums.items()}
    return over_rows | spread(each, declared)


def _only(names: Sequence[str], answer: Measured) -> Measured:
    sums = {name: answer.sums[name] for name in names if name in answer.sums}
    return answer.model_copy(update={"sums": sums})


class Names:
    """The metrics of a run that count: the first 100 that devices report.

    So what devices name their metrics can't fill journals, tables and monitoring. Of new names,
    those that most devices report come first.
    """

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def of(self, answers: Iterable[Measured]) -> list[str]:
        """The names that count, in alphabetical order, among those in answers."""
        told = Counter(name for answer in answers for name in answer.sums)
        for name, _ in sorted(told.items(), key=lambda one: (-one[1], one[0])):
            if len(self._known) < METRICS:
                self._known.setdefault(name)
        return sorted(told.keys() & self._known.keys())


def result(
    measured: Mapping[int, Measured],
    outcomes: Mapping[str, int],
    settings: OnDevicesSettings,
    declared: Goals,
    names: Names,
    **about: Any,
) -> DevicesEvaluated:
    """The result of an evaluation, without metrics if too few devices were measured.

    ``measured``: their answers, by device. ``outcomes``: of all devices. ``names``: the run's.
    ``about``: the result's other fields.
    """
    sums: dict[str, Sum] = {}
    metrics: dict[str, float] = {}
    if len(measured) >= settings.min_devices:
        counted = names.of(measured.values())
        measured = {device: _only(counted, answer) for device, answer in measured.items()}
        sums = totals(measured, settings.most_weight)
        metrics = metrics_over(sums, measured, declared)
    return DevicesEvaluated(
        devices=sum(outcomes.values()),
        outcomes={outcome: n for outcome, n in sorted(outcomes.items()) if n},
        sums=sums,
        metrics=metrics,
        **about,
    )
