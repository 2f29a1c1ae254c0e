"""The folder of a run or simulation."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from fedstream.history import report

_MODE = 0o700  # updates and models reveal something about people's data


@contextmanager
def for_run(name: str, out: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder that only this user may enter, removed again if the block raises and left it empty.

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
    """Make a folder of our own, although several runs may begin within one second."""
    first = report.default_out(name, datetime.now().astimezone())
    with report.usable(first):
        first.parent.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            folder = first if number == 1 else first.with_name(f"{first.name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir(mode=_MODE)
                return folder
    raise AssertionError("there is always a next number")
