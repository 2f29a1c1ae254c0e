"""Whether a run is going on in a folder: its process holds a lock (flock) of the folder itself.

The system releases it however the process ends, so a killed run is not taken for a running one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedstream.broker.errors import FedstreamError

_LOOK_S = 1.0  # for how long somebody may be looking, which takes a shared lock for a moment


@contextmanager
def occupied(out: Path) -> Iterator[None]:
    """Occupy an existing folder for the block. Raises FedstreamError if another process does.

    A file system without locks changes nothing: nobody will see that the run is going on.
    """
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _LOOK_S
        while not _locked(folder, fcntl.LOCK_EX):
            if time.monotonic() > until:
                raise FedstreamError(
                    f"{out}: another process is writing a run there: wait for it, or choose "
                    "another folder"
                )
            time.sleep(0.01)
        yield
    finally:
        os.close(folder)


def is_occupied(out: Path) -> bool:
    """Whether a run is going on in the folder. Raises OSError if it can't be opened."""
    folder = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return not _locked(folder, fcntl.LOCK_SH)
    finally:
        os.close(folder)


def _locked(folder: int, how: int) -> bool:
    """Lock the folder unless another process holds a lock that excludes this one."""
    try:
        fcntl.flock(folder, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks on this file system
        return True
    return True
