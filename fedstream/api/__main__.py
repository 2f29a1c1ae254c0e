"""The process of a run started from Python: `fedstream run` with messages as output.

This process is separate, so that a run changes nothing in its caller's process: no signal handlers,
no umask, no event loop, no fork beside the caller's threads. If the caller dies, the run is
interrupted as by a signal and writes its results.

The request arrives on stdin, since other users can see a command line.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, NoReturn

from fedstream.runtime import process

if TYPE_CHECKING:
    from typing import IO

_NOBODY_ELSE = 0o077  # the mode bits of group and others


def main() -> NoReturn:
    """Read a request, and run it to its end."""
    process.leave_at_once(process.INTERRUPTED)
    process.take()
    os.umask(os.umask(_NOBODY_ELSE) | _NOBODY_ELSE)
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a task's output is no message
    code = process.INTERRUPTED
    try:
        process.interrupt()
        code = _run(channel)
        process.end_at_once()
    except KeyboardInterrupt:
        pass
    sys.stderr.flush()
    os._exit(code)  # tearing down the interpreter takes a second with torch loaded


def _run(channel: IO[bytes]) -> int:
    with process.importing():
        from fedstream.api.messages import MessageWriter
        from fedstream.api.parameters import request_of
        from fedstream.core.errors import FedstreamError
        from fedstream.local.launcher import new_launcher
        from fedstream.local.run import run
        from fedstream.runtime.process import end_with_parent

    writer = MessageWriter(channel)
    try:
        # Before the request is read, which may import a user's rule; the caller has checked it.
        with new_launcher() as launcher:
            end_with_parent()  # starts a thread, after which forking is not safe
            code, _ = run(request_of(sys.stdin.read()), writer, launcher)
    except FedstreamError as error:
        writer.error(error)
        return 1
    except OSError as error:  # a full disk, or a file or folder without permission
        where = "" if error.filename is None else f"{error.filename}: "
        writer.error(FedstreamError(f"{where}{error.strerror or error}"))
        return 1
    return code


if __name__ == "__main__":
    main()
