"""Trust in programs that a configuration file or a recording names.

Both may come from a stranger, and name a task and perhaps a strategy and other plug-ins; loading
these runs their programs. One rule holds for all commands: commands that train or serve run the
programs that a file names. Any other command runs a program only if the user names it, by an option
or in the environment, or trusts the file. Built-in plug-ins always load.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.core.errors import ConfigError
from fedstream.journal import RuleChanged, journal_of, opened
from fedstream.journal.rebuild import check_sources, rule_of
from fedstream.runtime.config import load
from fedstream.runtime.plugins import allowing, runs_program
from fedstream.runtime.process import open_regular

if TYPE_CHECKING:  # reading a recording doesn't need the services' settings
    from fedstream.settings.config import Settings

CONFIG = "run.toml"
SUMMARY = "summary.json"
TRUST = "--trust-recorded-code"
_NAME = "task.name"
_MEASURING = ("task", "evaluator")
_VARIABLE, _DOWNLOAD = "FEDSTREAM_TASK__NAME", "FEDSTREAM_TASK__DOWNLOAD"


@contextmanager
def its_programs(
    folder: Path, *, trusted: bool, changed: bool, ask: Callable[[str], None] | None = None
) -> Iterator[None]:
    """Inside the block, permit loading the rules of a recording.

    ``trusted``: also rules that only the recording names. ``changed``: also rules whose source has
    changed; ``ask`` then asks the user first, unless None. Raises ConfigError, also if the answer
    is no.
    """
    with allowing(recorded=trusted, changed=changed), ExitStack() as more:
        if ask is not None and not changed:
            try:
                with opened(folder) as chain:
                    for segment in chain:
                        if segment.head.sources:
                            rule_of(segment)
            except RuleChanged as error:
                ask(f"{error}. Go on with the changed source?")
                more.enter_context(allowing(changed=True))
        yield


def resumable(folder: Path, settings: Settings, ask: Callable[[str], None] | None) -> bool:
    """Whether to resume a run with rules whose source has changed.

    ``ask``: asks the user; if None, RuleChanged is raised. False: the source has not changed.
    """
    if not journal_of(folder).is_dir():
        return False  # reported later
    try:
        with opened(folder) as chain:
            check_sources(chain[-1], settings.strategy)
    except RuleChanged as error:
        if ask is None:
            raise
        ask(f"{error}. Resume with the changed source?")
        return True
    return False


def settings_of(
    folder: Path,
    config: Path | None,
    sets: Sequence[str] = (),
    *,
    trusted: bool,
    otherwise: str = "",
    **given: object,
) -> Settings:
    """Read the part of the run's configuration that measuring a model needs.

    Other plug-ins that the recording names, such as a solver, are not loaded. The configuration
    comes from ``config``, else from the run's own file, else from the defaults with the task named
    by the journal. ``given``: the command's options. ``otherwise``: for the error, how to do
    without the task. Raises ConfigError if only a file names the task, unless it is ``trusted``.
    """
    from fedstream.settings.config import Settings, options

    file, recorded = config, dict[str, str]()  # the user's environment overrides the latter
    if config is None:
        journal = journal_of(folder).resolve()
        left = (journal / CONFIG, journal.parent / CONFIG)
        file = next(filter(is_left, left), None)
        recorded[_DOWNLOAD] = "false"  # a recording must not make us download anything
    if file is None:
        with opened(folder) as chain:
            recorded[_VARIABLE] = chain[-1].head.task
    settings = load(
        Settings,
        path=file,
        environ=recorded | dict(os.environ),
        sets=sets,
        options=options(**given),
        trusted=trusted,
        keys=_MEASURING,
    )
    if not trusted:
        check_task(settings, file or folder, sets, given.get("task"), otherwise)
    return settings


def is_left(file: Path) -> bool:
    """Whether a run left its configuration in ``file``. Raises ConfigError if it is unreadable."""
    if not file.exists():
        return False
    try:
        os.close(open_regular(file))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    return True


def check_task(
    settings: Settings, where: Path, sets: Sequence[str], task: object, otherwise: str = ""
) -> None:
    """Raise ConfigError if only the file or recording at ``where`` named the task.

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
