"""`fedstream doctor`'s checks of the task, its data, and the training hardware."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.layout import Layout
from fedstream.doctor.findings import Finding, not_checked, ok, problem, size, warning
from fedstream.settings.dry_step import test_data_of, try_measuring, try_model, try_training
from fedstream.trainer.data import length_of

if TYPE_CHECKING:
    from fedstream.settings.config import Settings
    from fedstream.trainer.task import Task

_UNTRIED = "run.dry_step is off, or the task decides itself how long it trains"
_CGROUP = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Loaded:
    """The loadable parts of the user's task."""

    task: Task | None = None
    devices: int | None = None
    layout: Layout | None = None  # with the strategy's control variates


def load(settings: Settings) -> tuple[Loaded, list[Finding]]:
    """Load the task, make its model, and try one device's data and the test data."""
    from fedstream.settings.services import task_of
    from fedstream.trainer.vector import layout_of

    # A check must not download data.
    kept = settings.model_copy(
        update={"task": settings.task.model_copy(update={"download": False})}
    )
    try:
        found = task_of(kept)
    except FedstreamError as error:
        about_root = data_root(settings, loaded=settings.task.download)
        if settings.task.download:
            fetched = "task.download = true: the first service that loads it downloads it"
            return Loaded(), [*about_root, not_checked("task", f"{error} ({fetched})")]
        return Loaded(), [*about_root, problem("task", str(error))]
    except ImportError as error:
        return Loaded(), [
            problem("task", f"torch: {error}", "reinstall fedstream with its dependencies")
        ]
    findings = list(data_root(settings, loaded=True))
    loaded = Loaded(found)
    try:
        layout = layout_of(try_model(kept, found))
        loaded, text = _model(settings, found, layout)
        findings.append(ok("task", text))
        findings.append(ok("data", _data(kept, found, loaded.devices or 0)))
        findings.append(ok("test data", _test_data(kept, found, loaded.devices or 0)))
    except FedstreamError as error:
        findings.append(problem("task", str(error), "correct the task's code or its data"))
    return loaded, findings


def _model(settings: Settings, found: Task, layout: Layout) -> tuple[Loaded, str]:
    from fedstream.settings.services import devices_of

    controls = settings.strategy.build().controls
    loaded = Loaded(
        found, devices_of(settings, found), layout.with_controls() if controls else layout
    )
    text = (
        f"{settings.task.name!r} has {layout.parameters} parameters, {size(layout.nbytes)}, "
        f"{loaded.devices} devices"
    )
    return loaded, text


def _data(settings: Settings, found: Task, devices: int) -> str:
    """Train one step on one device's data."""
    tried = try_training(settings, found, settings.trainer.owns or range(devices), "cpu")
    if tried is None:
        return f"not tried: {_UNTRIED}"
    device, trained = tried
    loss = "" if trained.loss is None else f", with a loss of {trained.loss:.3g}"
    return f"device {device} has {trained.samples} samples and has trained one step{loss}"


def _test_data(settings: Settings, found: Task, devices: int) -> str:
    """Load the test data and measure an untrained model on a few rows of it."""
    data = test_data_of(settings, found)
    metrics = try_measuring(settings, found, data, devices, "cpu")
    if data is None:
        own = settings.evaluator.on_devices is not None or settings.evaluator.per_device != "never"
        return "the devices' own" if own else "none: the run will not be measured"
    measured = f"measured: {', '.join(metrics)}" if metrics else f"not tried: {_UNTRIED}"
    return f"{length_of(data, 'test_data()', 'a data set with a length')} samples; {measured}"


def data_root(settings: Settings, *, loaded: bool) -> Iterator[Finding]:
    """Check the folder of data sets, if one is configured."""
    key = "task.data_root" if settings.task.data_root else "FEDSTREAM_DATA"
    folder = settings.task.data_root or os.environ.get("FEDSTREAM_DATA")
    if not folder:
        return
    if not Path(folder).is_dir():
        text, change = f"{key} = {folder!r} is not a folder", "mount it, or set another"
    elif not os.access(folder, os.R_OK | os.X_OK):
        text, change = f"{key} = {folder!r} is not readable by this user", "grant read access"
    else:
        yield ok("data root", f"{folder} is readable")
        return
    # A task that loaded anyway doesn't need the folder.
    yield warning("data root", text, change) if loaded else problem("data root", text, change)


# torch


def computing(settings: Settings, role: str | None) -> Iterator[Finding]:
    """Compare configured threads with available cores, and check for CUDA if configured."""
    import torch

    from fedstream.trainer.data import check

    about, cores = "torch", _cores()
    for part, table in (("trainer", settings.trainer), ("evaluator", settings.evaluator)):
        if role not in (None, part):
            continue
        text = f"{torch.__version__}, {part}.threads = {table.threads} on {cores:g} cores"
        try:
            check(f"{part}.device", table.device)
        except ConfigError as error:
            yield problem(about, str(error))
        if table.threads > cores:
            yield warning(about, text, f"lower {part}.threads: the threads wait for one another")
        else:
            yield ok(about, f"{text}, {part}.device = {table.device!r}")


def _cores() -> float:
    """Cores that this process may use, by affinity and control group."""
    cores = float(
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if _CGROUP.is_file():
        quota, period = _CGROUP.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) / int(period))
    return cores
