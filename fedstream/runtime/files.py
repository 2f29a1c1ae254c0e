"""Opening regular files only; and how many files, and so connections, this process may open."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; never wait, as opening a named pipe does.

    Raises OSError, also for a folder, pipe, socket or device.
    """
    strange = OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        # That of a socket, or of a pipe that nobody reads.
        raise strange if error.errno == errno.ENXIO else error from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise strange
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises OSError, like :func:`open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def allow_files(wanted: int) -> int | None:
    """Raise the limit of open files to ``wanted``, as far as it may be, and never lower it.

    Returns the limit; None: there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
