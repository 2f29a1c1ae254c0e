"""One training step and one evaluation of a task before anything starts.

Both are cheap. Each uses a new model, and the random number generators keep their states. Training
takes one batch of one device. A run tolerates devices with bad data, so devices are tried for some
seconds until one works. The last device is tried too, as a partition that is wrong by one device
shows there; its error is a warning. The evaluation takes the first rows of the test data. A task's
own ``train`` or ``metrics`` gets few rows too, and all rows if it raises, as it may need more;
training is then cancelled after some seconds.

``run.dry_step = false`` switches both off. A task without ``exact_steps`` is not tried, as it
trains for any length. Instead, the data of devices are loaded until a device has data.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from fedstream.core.errors import ConfigError, DataError, FedstreamError, TaskError
from fedstream.core.layout import Layout, Model
from fedstream.runtime.plugins import about, words
from fedstream.runtime.task_settings import Epochs, Length, Seconds
from fedstream.runtime.text import did_you_mean
from fedstream.terminal import line
from fedstream.trainer.data import (
    Processor,
    check,
    placed,
    samples_of,
    seeded,
    size_of,
)
from fedstream.trainer.goals import ON_DEVICES, Stopping, is_on_devices, is_over_devices
from fedstream.trainer.on_devices import has_device_tests, spread
from fedstream.trainer.solvers import Cancelled, Solver, Solvers, Trained, Work
from fedstream.trainer.task import NoLabels, Task, measured, solver_for_device, untrained

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.settings.config import Settings
    from fedstream.strategies import Strategy as BuiltStrategy

T = TypeVar("T")

_DEVICES = 3  # devices to try at least, until one works
_ROWS = 32  # of test data
_SECONDS = 1e-3  # the budget of a training step
_TRY_S = 3.0  # time limit for further devices, and for training on all rows
_NAMED = 3  # devices whose errors are shown
_HINT = ": correct the task (run.dry_step = false starts without this test)"


@contextmanager
def blaming(settings: Settings, what: str, hint: str = "") -> Iterator[None]:
    """Turn an error of the user's task into a TaskError that names the step ``what``."""
    name = settings.task.name
    try:
        yield
    except Cancelled:
        raise
    except FedstreamError as error:
        raise about(error, TaskError(f"task {name!r}: {error}")) from error
    except Exception as error:
        raise about(error, TaskError(f"task {name!r}: {what} {words(error)}{hint}")) from error


@dataclass(frozen=True)
class Tried:
    """The results of trying a task."""

    module: nn.Module
    test_data: Dataset[Any] | None


def try_task(
    settings: Settings,
    task: Task,
    devices: int,
    *,
    simulated: bool,
    cancelled: Callable[[], bool] = lambda: False,
) -> Tried:
    """Check the GPUs, the model and the data; then train one step, and measure.

    ``simulated``: for a simulation. ``cancelled``: ends the step early. Raises ConfigError, and
    TaskError for errors of the task.
    """
    check("trainer.device", settings.trainer.device)
    check("evaluator.device", settings.evaluator.device)
    numbers: Sequence[int] = range(devices)
    training, measuring = settings.trainer.device, settings.evaluator.device
    if simulated:
        training = measuring = settings.simulation.device
    else:
        numbers = settings.trainer.owns or numbers
        check_local(settings, task)
    module, data = try_model(settings, task), test_data_of(settings, task)
    with suppress(Cancelled):
        if _is_tried(settings, task):
            try_training(settings, task, numbers, training, cancelled)
        else:
            _first_working(
                settings, numbers, lambda device: size_of(task.device_data(device), device)
            )
    try_measuring(settings, task, data, devices, measuring)
    return Tried(module, data)


def check_local(settings: Settings, task: Task) -> None:
    """Raise ConfigError if the evaluator is to measure devices, whose local tensors it lacks."""
    if task.local and settings.evaluator.per_device != "never":
        raise ConfigError(
            f"evaluator.per_device = {settings.evaluator.per_device!r}: the evaluator lacks the "
            "devices' local tensors (Task.local): let the devices measure, as in "
            "evaluator.on_devices.fraction = 1.0"
        )


def try_model(settings: Settings, task: Task) -> nn.Module:
    """The task's untrained model. Raises TaskError if it can't be made or sent."""
    with blaming(settings, "model() raised"), seeded(settings.run.seed):
        return untrained(task)


def test_data_of(settings: Settings, task: Task) -> Dataset[Any] | None:
    """The test data. Raises TaskError."""
    with blaming(settings, "test_data() raised"), seeded(settings.run.seed):
        data = task.test_data()
        if data is not None and type(task).metrics is Task.metrics:  # else any data
            samples_of(data)
    return data


def try_training(
    settings: Settings,
    task: Task,
    devices: Sequence[int],
    place: Processor,
    cancelled: Callable[[], bool] = lambda: False,
) -> tuple[int, Trained] | None:
    """Train one step; return the device and the result.

    Devices that failed before are shown on stderr. None: the task is not tried. Raises TaskError if
    all tried devices failed; Cancelled.
    """
    if not _is_tried(settings, task):
        return None
    return _first_working(
        settings, devices, lambda device: _trained(settings, task, device, place, cancelled), _HINT
    )


def try_measuring(
    settings: Settings, task: Task, data: Dataset[Any] | None, devices: int, place: Processor
) -> dict[str, float]:
    """The metrics of an untrained model on a few rows of the test data and of a device's own.

    Empty if there are none, or the task is not tried. Those that devices are to measure have their
    names there (``devices_loss``). Raises TaskError, also if no metric is a finite number on a
    device that is to measure; ConfigError if the metric of ``run.stop`` is not among them, or has
    no goal.
    """
    found: dict[str, float] = {}
    own: dict[str, float] = {}
    if not _is_tried(settings, task):
        return found
    with seeded(settings.run.seed):
        if data is not None:
            with blaming(settings, "test data:", _HINT):
                found = _measured(task, data, place)
            _warn_unless_finite("test data", found)
        on_devices = settings.evaluator.on_devices is not None
        is_measured = on_devices or settings.evaluator.per_device != "never"
        if is_measured and has_device_tests(task):
            for device in dict.fromkeys((*range(min(devices, _DEVICES)), devices - 1)):
                if own and device != devices - 1:
                    continue
                with blaming(settings, f"test data of device {device}:", _HINT), suppress(NoLabels):
                    if (rows := task.device_test_data(device)) is not None:
                        own = _measured(task, rows, place)
                        if on_devices and not any(map(isfinite, own.values())):
                            raise DataError(
                                f"test data of device {device}: no metric is a finite number: {own}"
                            )
                        _warn_unless_finite(f"test data of device {device}", own)
        if on_devices:
            found |= {f"{ON_DEVICES}{name}": value for name, value in own.items()}
    if stop := settings.run.stop:
        known = [*found, *spread({0: own}, task.goal)]
        may_follow = is_over_devices(stop.metric) or (on_devices and is_on_devices(stop.metric))
        if not may_follow or own:
            _check_stop(stop.metric, known)
        Stopping(stop, task.goal)  # raises for a metric without a goal
    return found


def _warn_unless_finite(where: str, metrics: dict[str, float]) -> None:
    if metrics and not any(map(isfinite, metrics.values())):
        line(
            f"{where}: no metric of the untrained model is finite ({', '.join(metrics)}): look for "
            "NaN in the data, in model(), and in what the task's metrics() divides by",
            err=True,
        )


def _check_stop(metric: str, known: Sequence[str]) -> None:
    """Raise ConfigError if the metric of ``run.stop`` is not among the measured ones."""
    if metric in known:
        return
    if not known:
        raise ConfigError(
            f"run.stop.metric = {metric!r}: nothing is measured, as the task has no test data: "
            "define test_data(), or leave out run.stop"
        )
    hint = did_you_mean(metric, known) or did_you_mean(f"{ON_DEVICES}{metric}", known)
    raise ConfigError(
        f"run.stop.metric = {metric!r}: the task measures {', '.join(sorted(known))}{hint}"
    )


def _is_tried(settings: Settings, task: Task) -> bool:
    return settings.run.dry_step and task.exact_steps


def _first_working(
    settings: Settings, devices: Sequence[int], work: Callable[[int], T], hint: str = ""
) -> tuple[int, T]:
    """The first device on which ``work`` does not raise, and the result.

    Raises the first device's TaskError if no device works within the time limit.
    """
    failed: dict[int, TaskError] = {}
    until = time.monotonic() + _TRY_S
    for device in devices:
        try:
            with blaming(settings, f"device {device}:", hint), seeded(settings.run.seed):
                found = work(device)
        except TaskError as error:
            failed[device] = error
        else:
            if failed:
                line(_without(failed, device), err=True)
            _try_last(settings, device, devices[-1], work)
            return device, found
        if len(failed) >= _DEVICES and time.monotonic() > until:
            break
    raise next(iter(failed.values()))


def _try_last(settings: Settings, worked: int, last: int, work: Callable[[int], T]) -> None:
    """Show an error of the last device."""
    if last == worked:
        return
    try:
        with blaming(settings, f"device {last}:"), seeded(settings.run.seed):
            work(last)
    except TaskError as error:
        line(f"device {worked} works, but not the last: {error}", err=True)


def _without(failed: dict[int, TaskError], works: int) -> str:
    """A line about failed devices."""
    named = "; ".join(str(error).removesuffix(_HINT) for error in [*failed.values()][:_NAMED])
    more = len(failed) - _NAMED
    others = f"; {more} more devices" if more > 0 else ""
    return f"device {works} works, but not each before it: {named}{others}"


def _trained(
    settings: Settings,
    task: Task,
    device: int,
    place: Processor,
    cancelled: Callable[[], bool],
) -> Trained:
    solver = solver_for_device(task, device, Solvers(settings.solver, settings.solvers), 0)
    data = placed(task.device_data(device), place)
    samples, length, few = size_of(data, device), Length(steps=1), data
    by_steps = (Task.train, Task.descend, Solver.train)
    if samples and (type(task).train, type(task).descend, type(solver).train) != by_steps:
        length, few = _shortest(settings), _first(data, solver.batch_size or samples)
    until = time.monotonic() + _TRY_S
    work = Work(
        device=device,
        task="dry step",
        version=0,
        seed=settings.run.seed,
        steps=length.steps,
        epochs=length.epochs,
        seconds=length.seconds,
        solver=solver,
        cancelled=lambda: cancelled() or time.monotonic() > until,
    )
    rule = settings.strategy.build()
    try:
        return _on_few(lambda rows: _step(task, rows, place, work, rule), few, data)
    except Cancelled:
        if cancelled():
            raise
        return Trained(1, samples, None)  # it has trained until the time was up


def _step(
    task: Task, rows: Dataset[Any], place: Processor, work: Work, rule: BuiltStrategy
) -> Trained:
    from fedstream.trainer.learner import as_sent
    from fedstream.trainer.vector import layout_of, read, read_part

    module = untrained(task).to(place)
    layout = layout_of(module)
    frozen = layout.unshared.frozen if layout.unshared else Layout(())
    fixed = read_part(module, frozen)
    layout = layout.with_controls() if rule.controls else layout
    before, after = Model(layout), Model(layout)
    read(module, before)
    trained = task.train(module, rows, work)
    read(module, after)
    _check_integers(before, after)
    _check_frozen(fixed, read_part(module, frozen))
    return as_sent(trained, after, before, None, rule.sends, work.solver.compression)


def _check_frozen(before: Model, after: Model) -> None:
    """Raise DataError if training changed a frozen parameter, which no update would contain."""
    for (tensor, old), (_, new) in zip(before.flat(), after.flat(), strict=True):
        if not np.array_equal(old.view(np.uint8), new.view(np.uint8)):  # NaN is equal to itself
            raise DataError(
                f"training changed {tensor.name}, which model() freezes (requires_grad = False), "
                "so that it is in no update: let model() leave it trainable, or do not train it"
            )


def _check_integers(before: Model, after: Model) -> None:
    """Raise DataError, naming the tensor, if training changed a constant integer tensor, for which
    the updater would refuse every update."""
    at = 0
    for tensor in before.layout.tensors:
        if tensor.kind == "integer":
            here = slice(at, at := at + tensor.count)
            if not np.array_equal(before.integers[here], after.integers[here]):
                raise DataError(
                    f"training changes the integer tensor {tensor.name}, so every update would be "
                    f"refused: if it may change, give the model changing_integers = "
                    f"({tensor.name!r},)"
                )


def _measured(task: Task, data: Dataset[Any], place: Processor) -> dict[str, float]:
    data = placed(data, place)
    module = untrained(task).to(place)
    return _on_few(lambda rows: measured(task, module, rows), _first(data, _ROWS), data)


def _on_few(work: Callable[[Dataset[Any]], T], few: Dataset[Any], data: Dataset[Any]) -> T:
    """Run ``work`` on few rows; if it raises, on all data, as it may need more rows or the data
    set's own attributes."""
    if few is not data:
        with suppress(Exception):
            return work(few)
    return work(data)


def _first(data: Dataset[Any], rows: int) -> Dataset[Any]:
    """The first rows, as data of the same type where possible."""
    from torch.utils.data import Subset, TensorDataset

    if rows >= len(data):  # type: ignore[arg-type]  # torch's Dataset declares no length
        return data
    if type(data) is TensorDataset:
        return TensorDataset(*(tensor[:rows] for tensor in data.tensors))
    return Subset(data, range(rows))


def _shortest(settings: Settings) -> Length:
    """The shortest length of the configured kind, as the task's ``train`` may support only that."""
    match (settings.trainer.anarchic or settings.scheduler).steps:
        case Epochs():
            return Length(epochs=1)
        case Seconds():
            return Length(seconds=_SECONDS)
        case _:
            return Length(steps=1)
