"""The folder of a run or simulation, and the errors that carry the results of an unfinished run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from fedstream.core.errors import FedstreamError
from fedstream.history import report
from fedstream.history.record import RunRecord

P = ParamSpec("P")
T = TypeVar("T")

_MODE = 0o700  # updates and models reveal something about people's data


@contextmanager
def for_run(name: str, out: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder for this user alone, removed if the block raises and leaves it empty.

    ``out``: the folder to use, which may exist; None: a new one, ``runs/NAME-TIME``. Raises
    ConfigError if it cannot be made.
    """
    folder = _new(name) if out is None else Path(out)
    with report.usable(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=_MODE, exist_ok=True)
    try:
        yield folder
    except BaseException:
        with suppress(OSError):  # not empty: it holds results
            folder.rmdir()
        raise


def _new(name: str) -> Path:
    """Make a new folder, also if several runs begin within one second."""
    now = datetime.now().astimezone()
    while True:
        folder = report.default_out(name, now)
        with report.usable(folder), suppress(FileExistsError):
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=_MODE)
            return folder


def without_our_frames(function: Callable[P, T]) -> Callable[P, T]:
    """Leave fedstream's frames out of its own errors, whose messages and notes say everything."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except FedstreamError as error:
            raise error.with_traceback(None) from None

    return wrapped


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or a notebook's stop button ended the run; its services stopped in order."""

    def __init__(self, run: RunRecord) -> None:
        super().__init__(f"interrupted: the results so far are fedstream.open({str(run.path)!r})")
        self.run = run
        """the run so far"""


class RunFailed(FedstreamError):
    """The run could not continue; the message says why."""

    def __init__(self, why: str, run: RunRecord) -> None:
        super().__init__(f"{why} (what there is of the run: {run.path})")
        self.run = run
        """the run so far"""
