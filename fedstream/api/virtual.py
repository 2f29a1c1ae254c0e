"""``fedstream.simulate``: a run in virtual time, inside the caller's process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from fedstream.api import run_folder
from fedstream.api.parameters import ConfigTable, StrategyLike, Tables, check_names, options
from fedstream.api.progress import on_interrupt, progress_display
from fedstream.api.references import TaskLike, label, local_name, task_and_table
from fedstream.api.run_folder import Interrupted, RunFailed, without_our_frames
from fedstream.history.display import short
from fedstream.history.record import RunRecord
from fedstream.settings.config import read
from fedstream.settings.plugin_sources import doubts
from fedstream.settings.services import check_used, loaded
from fedstream.simulation import VersionMade
from fedstream.simulation.run import check_folder, in_words, simulate_into
from fedstream.trainer.loading import made

_OTHERS = (
    "task",
    "strategy",
    "versions",
    "devices",
    "config",
    "set",
    "out",
    "data_root",
    "journal",
    "progress",
)


@without_our_frames
def simulate(
    task: TaskLike | ConfigTable | None = None,
    *,
    strategy: StrategyLike | None = None,
    versions: int | None = None,
    devices: int | ConfigTable | None = None,
    config: str | os.PathLike[str] | None = None,
    set: Mapping[str, object] | None = None,  # noqa: A002  (as --set on the command line)
    out: str | os.PathLike[str] | None = None,
    data_root: str | os.PathLike[str] | None = None,
    journal: bool | ConfigTable = True,
    progress: bool = True,
    **tables: Unpack[Tables],
) -> RunRecord:
    """Train in virtual time, in this process and without Redis; returns the run when it has ended.

    The same as `fedstream simulate`: the same rules and the same local training as in a live run,
    with arrivals and staleness drawn as the table ``simulation`` says. The same parameters give the
    same run.

        run = fedstream.simulate("digits", strategy="fedbuff", versions=40)

    The run's folder has the same files but no picture; a notebook draws it when the run is shown.

    The parameters are those of :func:`run`, as far as they apply. ``journal=False`` records no
    journal, which is faster; the run then has metrics, but no versions, updates or models.

    torch's number of threads is set as ``simulation={"threads": 1}`` says and restored afterwards;
    its random numbers are left alone. So simulate in one thread at a time.

    In the main thread, Ctrl-C or the notebook's stop button ends the simulation after the current
    local training and raises :class:`Interrupted`, with the run so far; a second one raises
    KeyboardInterrupt at once.

    Raises ConfigError, DataError or another FedstreamError if the simulation is impossible or the
    task raises; RunFailed, with the run so far, if it can't continue.
    """
    check_names("simulate", tables, _OTHERS)
    task, table = task_and_table(task)
    if task is not None:
        table["name"] = task if isinstance(task, str) else local_name(task)
    given = {
        "task": table,
        "strategy": strategy,
        "versions": versions,
        "devices": devices,
        "data_root": None if data_root is None else os.fspath(data_root),
        "journal": None if isinstance(journal, bool) else journal,
        **tables,
    }
    settings = read(None if config is None else Path(config), (), options(set, given))
    check_used(settings)
    settings = settings.with_absolute_paths()
    if task is None or isinstance(task, str):
        learning = loaded(settings.task)
    else:
        learning = made(task, settings.task.name, settings.task)
    signals = 0

    def interrupt() -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            raise KeyboardInterrupt

    with run_folder.for_run(settings.run.name, out) as folder:
        check_folder(folder)
        what = f"{short(settings.strategy.name)} on {label(task or settings.task.name)}, simulated"
        measured = ""
        with (
            on_interrupt(interrupt),
            progress_display(what, settings.run.versions, wanted=progress) as display,
        ):
            for doubt in doubts(settings):
                display.say(doubt)

            def show(version: VersionMade) -> None:
                nonlocal measured
                if version.metrics:
                    measured = in_words(version.metrics)
                display.update(version.version, measured)

            outcome, _, _ = simulate_into(
                folder,
                settings,
                learning,
                journal=journal is not False,
                picture=False,
                show=show,
                cancelled=lambda: signals > 0,
            )
            display.close(f"{outcome.state}: {outcome.why}")
        record = RunRecord(folder)
        if outcome.state == "interrupted":
            raise Interrupted(record)
        if outcome.state == "failed":
            raise RunFailed(outcome.why, record)
        return record
