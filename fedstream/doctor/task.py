"""`fedstream doctor`'s checks of the task, its data, and what this machine trains it with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedstream.broker.errors import ConfigError, DataError, FedstreamError
from fedstream.broker.layout import Layout
from fedstream.doctor.findings import Finding, not_checked, ok, problem, size, warning

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.settings.config import Settings
    from fedstream.trainer.task import Task

_CGROUP = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Loaded:
    """The parts of the user's task that could be loaded."""

    task: Task | None = None
    devices: int | None = None
    layout: Layout | None = None  # with the strategy's control variate


def load(settings: Settings) -> tuple[Loaded, list[Finding]]:
    """Load the task, make its model, and try one device's data and the test data."""
    from fedstream.settings.services import task_of

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
    # A user's program may raise any exception; `blamed` makes it a DataError that says where.
    try:
        module = _untrained(found)
        loaded, text = _model(settings, found, module)
        findings.append(ok("task", text))
        findings.append(ok("data", _data(settings, found, module)))
        findings.append(ok("test data", _test_data(found, module)))
    except FedstreamError as error:
        findings.append(problem("task", str(error), "correct the task's code or its data"))
    return loaded, findings


def _model(settings: Settings, found: Task, module: nn.Module) -> tuple[Loaded, str]:
    from fedstream.settings.services import devices_of
    from fedstream.simulation.training import blamed
    from fedstream.trainer.vector import layout_of

    with blamed("model()"):
        layout = layout_of(module)
    controls = settings.strategy.build().controls
    loaded = Loaded(
        found, devices_of(settings, found), layout.with_controls() if controls else layout
    )
    text = (
        f"{settings.task.name!r} has {layout.parameters} parameters, {size(layout.nbytes)}, "
        f"{loaded.devices} devices"
    )
    return loaded, text


def _untrained(found: Task) -> nn.Module:
    import torch

    from fedstream.simulation.training import blamed
    from fedstream.trainer.task import untrained

    with blamed("model()"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return untrained(found)


def _data(settings: Settings, found: Task, module: nn.Module) -> str:
    """Pass a batch of one device's data through the model."""
    import torch

    from fedstream.simulation.training import blamed
    from fedstream.trainer.data import gather
    from fedstream.trainer.task import Task

    device = min(settings.trainer.owns, default=0)
    who = f"device {device}"
    with blamed(who), torch.random.fork_rng(devices=[]), torch.no_grad():
        data = found.device_data(device)
        samples = _length(data, who)
        text = f"{who} has {samples} samples"
        if type(found).train is not Task.train:  # it may not use loss() or batches
            return f"{text}; the task has its own training loop"
        batch = gather(data, torch.arange(min(2, samples)))
        loss = found.loss(module.eval(), batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise DataError(f"{who}: loss() must return one number as a tensor")
    return f"{text}; the untrained model's loss on {min(2, samples)} of them is {loss.item():.3g}"


def _test_data(found: Task, module: nn.Module) -> str:
    """Load the test data and compute the metrics of two samples."""
    import torch
    from torch.utils.data import Subset

    from fedstream.simulation.training import blamed
    from fedstream.trainer.task import NoLabels, measured

    with blamed("test data"), torch.random.fork_rng(devices=[]):
        data = found.test_data()
        if data is None:
            return "none: the run will not be measured"
        samples = _length(data, "test data")
        try:
            metrics = measured(found, module, Subset(data, range(min(2, samples))))
        except NoLabels:  # others may have some
            return f"{samples} samples; no label of the first two counts"
    return f"{samples} samples; measured: {', '.join(metrics)}"


def _length(data: Dataset[Any], what: str) -> int:
    samples = len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
    if not samples:
        raise DataError(f"{what}: the data set is empty")
    return samples


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

    from fedstream.trainer.placement import check

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
