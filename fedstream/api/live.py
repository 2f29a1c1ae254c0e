"""``fedstream.run``: the real pipeline, from a script or a notebook."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Unpack

from fedstream.api import run_folder
from fedstream.api.messages import as_error
from fedstream.api.parameters import (
    ConfigTable,
    PythonRequest,
    StrategyLike,
    Tables,
    check_names,
    options,
)
from fedstream.api.progress import ProgressDisplay, on_interrupt, progress_display
from fedstream.api.references import TaskLike, label, name_for_others, task_and_table
from fedstream.api.run_folder import Interrupted, RunFailed, without_our_frames
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.history.display import short
from fedstream.history.record import RunRecord
from fedstream.local.supervisor import how_it_ended
from fedstream.runtime.process import PARENT_VARIABLE

_OTHERS = (
    "task",
    "strategy",
    "versions",
    "trainers",
    "devices",
    "config",
    "set",
    "out",
    "data_root",
    "redis",
    "port",
    "journal",
    "progress",
)
_TAIL = 4096  # characters kept of a failed process's output


@without_our_frames
def run(
    task: TaskLike | ConfigTable | None = None,
    *,
    strategy: StrategyLike | None = None,
    versions: int | None = None,
    trainers: int = 2,
    devices: int | ConfigTable | None = None,
    config: str | os.PathLike[str] | None = None,
    set: Mapping[str, object] | None = None,  # noqa: A002  (as --set on the command line)
    out: str | os.PathLike[str] | None = None,
    data_root: str | os.PathLike[str] | None = None,
    redis: str | ConfigTable | None = None,
    port: int | None = None,
    journal: ConfigTable | None = None,
    progress: bool = True,
    **tables: Unpack[Tables],
) -> RunRecord:
    """Train with all services as processes on this machine; returns the run when it has ended.

    The same as `fedstream run`, from a script or a notebook:

        run = fedstream.run("digits", strategy="fedbuff", versions=200)

    ``task``: a built-in task's name, ``file.py:attribute``, or a :class:`Task`, a subclass of it or
    a function that returns one, wherever it is defined; None: as configured. A class or function
    from a module is imported by the services. Any other object is sent to them as it is, by way of
    a file in the run's folder. As a dict, it is the configuration's table ``[task]``:
    ``task={"name": Mine, "args": {"hidden": 64}}`` calls ``Mine(hidden=64)``.

    ``strategy``, ``devices`` and ``redis`` take a value, or their table as a dict:
    ``devices=20`` is the number of devices, ``devices={"latency": {"mean_s": 0.5}}`` is the table
    ``[devices]``. Other tables have a parameter of their name: ``solver={"lr": 0.05}``. Wherever
    the configuration names a strategy, a solver or the like, its class or function may stand, or
    an object with its keys: ``strategy=Mine(beta=0.9)``. The class must be in a file or module
    other than the program that starts the run, because all processes import it. ``set``
    sets any key: ``set={"strategy.alpha": 0.2}``. Parameters override ``set``, which overrides the
    environment, which overrides the file ``config``.

    ``versions``: the run ends with this one. ``trainers``: number of trainer processes. ``out``:
    the run's folder; None: ``runs/NAME-TIME``. ``data_root``: folder of data sets. ``redis``: URL
    of a Redis; None: the run starts its own. ``port``: of the HTTP server; None: any free one.
    ``progress``: show a bar, in the notebook or on stderr.

    Blocks until the run has ended, also in a notebook or a coroutine; it needs no event loop and
    disturbs none. In the main thread, Ctrl-C or the notebook's stop button ends the run in order
    and raises :class:`Interrupted`, with the run so far; a second one kills the run and raises
    KeyboardInterrupt. Other threads can't be interrupted: a run in one goes on to its end. If this
    process dies, the run is interrupted.

    Raises ConfigError, DataError or another FedstreamError before anything starts if the run is
    impossible; RunFailed, with the run so far, if it can't continue.
    """
    check_names("run", tables, _OTHERS)
    task, table = task_and_table(task)
    if isinstance(task, str):
        table["name"] = task
    if type(trainers) is not int or trainers < 1:
        raise ConfigError(f"trainers = {trainers!r}: must be a whole number of at least 1")
    given = {
        "task": table,
        "strategy": strategy,
        "versions": versions,
        "devices": devices,
        "data_root": None if data_root is None else os.fspath(data_root),
        "redis": redis,
        "journal": journal,
        **tables,
    }
    named = options(set, given)
    file = None if config is None else Path(config)
    settings = PythonRequest(
        file, named, Path(), trainers, port
    ).settings()  # raises for wrong settings first
    with run_folder.for_run(settings.run.name, out) as folder:
        if task is not None and not isinstance(task, str):
            named += options(None, {"task": name_for_others(task, folder)})
        asked = PythonRequest(file, named, folder, trainers, port)
        what = f"{short(settings.strategy.name)} on {label(task or settings.task.name)}"
        return _Process(asked, what, settings.run.versions, progress=progress).result()


class _Process:
    """A run in its own process."""

    def __init__(self, asked: PythonRequest, what: str, versions: int, *, progress: bool) -> None:
        self._asked = asked
        self._what = what
        self._versions = versions
        self._progress = progress
        self._process: subprocess.Popen[str] | None = None
        self._interrupted = 0
        self._ended: Mapping[str, Any] | None = None

    def result(self) -> RunRecord:
        """Run to the end."""
        with (
            tempfile.TemporaryFile() as printed,
            on_interrupt(self._interrupt),
            progress_display(self._what, self._versions, wanted=self._progress) as display,
        ):
            code = self._played(printed, display)
            if self._ended is None:
                if self._interrupted:
                    raise KeyboardInterrupt
                raise FedstreamError(_why(code, printed))
            display.close(f"{self._ended['state']}: {self._ended['why']}")
        record = RunRecord(self._asked.out)
        if self._ended["state"] == "interrupted":
            raise Interrupted(record)
        if self._ended["state"] == "failed":
            raise RunFailed(self._ended["why"], record)
        return record

    def _played(self, printed: IO[bytes], display: ProgressDisplay) -> int:
        """Start the process and show its messages until it ends; return its exit code."""
        process = subprocess.Popen(
            # -P: a user's redis.py or random.py must not shadow the library
            [sys.executable, "-P", "-m", "fedstream.api"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=printed,
            text=True,
            env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            # Its own session: it learns of Ctrl-C from us, and stops its services in order.
            start_new_session=True,
        )
        with process:
            self._process = process
            if self._interrupted:  # before the process started
                process.send_signal(signal.SIGINT)
            try:
                assert process.stdin is not None  # noqa: S101
                assert process.stdout is not None  # noqa: S101
                with suppress(BrokenPipeError), process.stdin as request:
                    request.write(self._asked.as_json())
                for text in process.stdout:
                    self._heard(json.loads(text), display)
            except BaseException:  # also an error of ours: leave nothing running
                process.terminate()
                raise
        return process.returncode

    def _heard(self, message: Mapping[str, Any], display: ProgressDisplay) -> None:
        match message["kind"]:
            case "say":
                display.say(message["text"])
            case "show":
                display.update(message["version"], message["text"])
            case "result":
                self._ended = message
            case "error":
                raise as_error(message)

    def _interrupt(self) -> None:
        """Pass on an interruption: the first one stops the run in order, a second kills it."""
        self._interrupted += 1
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)


def _why(code: int, printed: IO[bytes]) -> str:
    """The reason why the run's process ended without a result."""
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - _TAIL))
    last = printed.read().decode(errors="replace").strip()
    how = how_it_ended(code) + (f":\n{last}" if last else "")
    return f"the process that supervises the run {how}"
