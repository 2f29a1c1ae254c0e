"""What a recording says of its run: a run's folder, or a journal, which may be a stranger's.

A recording names the task that it was made with, and to load a task of one's own is to run its
program. So a name that comes from a recording alone is not followed: whoever looks at the recording
names the task, or says that this one may be trusted. Built-in tasks are our own program.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedstream.broker.errors import ConfigError
from fedstream.config import Settings, options, read
from fedstream.runtime.config import load
from fedstream.trainer.task import runs_program
from fedstream.updater.inspection import journal_of, opened

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
    """What the run was configured with, as far as the task needs it.

    ``config``, else the run's own, else the defaults with the task that its journal names.
    ``given`` are the command's own options. ``otherwise``: what could be done without the task.
    Raises ConfigError for a task that only the recording names, unless it is ``trusted``.
    """
    if config is not None:
        return read(config, sets, options(**given))
    journal = journal_of(folder).resolve()
    left = (journal / CONFIG, journal.parent / CONFIG)
    file = next((file for file in left if file.is_file()), None)
    # Below whatever the user says. Nor is anything fetched because a recording says so.
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
    """Raises ConfigError if nobody but the recording at ``where`` named the task.

    ``sets`` and ``task`` are the command's ``--set`` and ``--task``.
    """
    named = task is not None or _VARIABLE in os.environ
    named = named or any(item.partition("=")[0].strip() == _NAME for item in sets)
    if named or not runs_program(settings.task.name):
        return
    raise ConfigError(
        f"{where} names the task {settings.task.name!r}, and loading it runs that program: say "
        f"--task TASK to choose the program yourself, or {TRUST} if you trust this one{otherwise}"
    )
