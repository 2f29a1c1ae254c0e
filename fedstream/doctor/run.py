"""`fedstream doctor`'s comparison of the configuration with the run in Redis. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from fedstream.core.layout import Layout
from fedstream.core.records import Run
from fedstream.doctor.findings import Finding, ok, problem, warning


def agreement(
    run: Run,
    *,
    strategy: str,
    task: str,
    versions: int,
    layout: Layout | None,
    devices: int | None,
) -> Iterator[Finding]:
    """Compare the configuration with the run in Redis.

    ``layout`` and ``devices`` are None if the task did not load.
    """
    about = "run"
    found = []
    if run.strategy != strategy:
        found.append(
            problem(
                about,
                f"strategy.name = {strategy!r}, the run was made with {run.strategy!r}",
                "restore it, or choose another run.name and journal.dir",
            )
        )
    if layout is not None and layout.without_controls() != run.layout.without_controls():
        found.append(
            problem(
                about,
                f"the model of task {task!r} has {layout.parameters} parameters in "
                f"{len(layout.tensors)} tensors (layout {layout.signature}), the run's has "
                f"{run.layout.parameters} in {len(run.layout.tensors)} ({run.layout.signature})",
                "give every service the task of the run, or purge the run",
            )
        )
    if run.task != task:
        found.append(
            warning(
                about,
                f"task.name = {task!r}, the run was made with {run.task!r}",
                "restore it, unless both are the same task",
            )
        )
    if devices is not None and devices < run.devices:
        found.append(
            problem(
                about,
                f"{devices} devices (task.devices), but the run was made with {run.devices}",
                "restore it: tasks for the other devices would fail",
            )
        )
    if run.versions != versions:
        found.append(
            warning(
                about,
                f"run.versions = {versions}, but the run was made to end at version {run.versions}",
                "restore it: changing it has no effect now",
            )
        )
    yield from found
    if not found:
        state = "is running" if run.state == "running" else f"is finished: {run.why}"
        yield ok(about, f"{state}; made by strategy {run.strategy!r} with task {run.task!r}")
