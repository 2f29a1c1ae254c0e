"""Settings of a recording: a run's folder or a journal, possibly from someone you don't trust.

A recording names the task it was made with, and loading a user's task runs its program. So a task
named by the recording alone is not loaded: the user must name the task or trust the recorded one.
Built-in tasks are fedstream's own code and always load.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedstream.broker.errors import ConfigError
from fedstream.journal import journal_of, opened
from fedstream.runtime.config import load
from fedstream.settings.config import Settings, options, read
from fedstream.trainer.loading import runs_program

CONFIG = "run.toml"
TRUST = "--trust-recorded-task"
_NAME = "task.name"
_VARIABLE, _DOWNLOAD = "FEDSTREAM_TASK__NAME", "FEDSTREAM_TASK__DOWNLOAD"


def settings_of(
    folder: Path,
    config: Path | None,
    sets: Sequence[str] = (),
    *,
    trusted: bool,
    otherwise: str = "",
    **given: object,
) -> Settings:
    """Read the run's configuration, as far as the task needs it.

    It comes from ``config``, else from the run's own file, else from the defaults with the task
    named by the journal. ``given`` are the command's own options. ``otherwise``: text for the error
    that says what can be done without the task. Raises ConfigError if only the recording names the
    task, unless it is ``trusted``.
    """
    if config is not None:
        return read(config, sets, options(**given))
    journal = journal_of(folder).resolve()
    left = (journal / CONFIG, journal.parent / CONFIG)
    file = next((file for file in left if file.is_file()), None)
    # The user's environment overrides these. A recording must not make us download anything.
    recorded = {_DOWNLOAD: "false"}
    if file is None:
        with opened(folder) as chain:
            recorded[_VARIABLE] = chain[-1].head.task
    settings = load(
        Settings, path=file, environ=recorded | dict(os.environ), sets=sets,
        options=options(**given),
    )  # fmt: skip
    if not trusted:
        check_task(settings, file or folder, sets, given.get("task"), otherwise)
    return settings


def check_task(
    settings: Settings, where: Path, sets: Sequence[str], task: object, otherwise: str = ""
) -> None:
    """Raise ConfigError if only the recording at ``where`` named the task.

    ``sets`` and ``task`` are the command's ``--set`` and ``--task``.
    """
    named = task is not None or _VARIABLE in os.environ
    named = named or any(item.partition("=")[0].strip() == _NAME for item in sets)
    if named or not runs_program(settings.task.name):
        return
    raise ConfigError(
        f"{where} names the task {settings.task.name!r}, and loading it runs its code: give "
        f"--task TASK to choose the task yourself, or {TRUST} if you trust this one{otherwise}"
    )
