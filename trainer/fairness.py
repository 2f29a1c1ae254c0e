"""How well a model serves each device: metrics on the devices' own test data, and their spread.

torch is imported by the task's metrics alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import ceil, isnan, sqrt
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedstream.trainer.goals import Goals, goal_of
from fedstream.trainer.placement import Processor, placed
from fedstream.trainer.task import NoLabels, Task, measured

if TYPE_CHECKING:
    from torch import nn

PerDevice: TypeAlias = Literal["never", "last", "always"]
"""When devices are measured: never, with a run's last version, with every measurement."""

_MOST = 10_000  # devices to measure
_TENTH = 0.1


def has_device_tests(task: Task) -> bool:
    """Whether a task says what to test its devices with."""
    return type(task).device_test_data is not Task.device_test_data


def device_metrics(
    task: Task,
    module: nn.Module,
    devices: int,
    place: Processor = "cpu",
    cancelled: Callable[[], bool] = lambda: False,
) -> dict[int, dict[str, float]]:
    """The metrics of a model on each device's test data, by device.

    Devices without test data, or without a label that counts, are absent.

    Of more than 10,000 devices, that many evenly spaced ones are measured. Stops early, with those
    measured so far, once ``cancelled``. Raises whatever the task raises.
    """
    found: dict[int, dict[str, float]] = {}
    step = max(1, ceil(devices / _MOST))
    for device in range(0, devices, step):
        if cancelled():
            break
        data = task.device_test_data(device)
        if data is not None:
            with suppress(NoLabels):
                found[device] = measured(task, module, placed(data, place))
    return found


def spread(found: Mapping[int, Mapping[str, float]], declared: Goals) -> dict[str, float]:
    """What devices' metrics amount to: for each, its mean, deviation and worst tenth over devices.

    Every device counts the same. ``device_worst_tenth_accuracy`` is the mean of the accuracies of
    the tenth of the devices (at least one) that are served worst, ``device_deviation_accuracy`` the
    standard deviation of all. A metric without a goal (``declared``, or well known) has no worst
    tenth.
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
