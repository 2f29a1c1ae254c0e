"""`fedstream` and `python -m fedstream`: set up signals before the slow imports."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from fedstream.runtime import process

if TYPE_CHECKING:
    from collections.abc import Callable

SERVICES = (
    "coordinator",
    "scheduler",
    "updater",
    "trainer",
    "evaluator",
    "sinks",
    "gateway",
    "helper",
)


def main() -> None:
    """Run the command line; exit codes are those of :func:`fedstream.cli.app.main`.

    A signal during start-up means a clean stop for a service (exit code 0) and an interruption for
    any other command (130).
    """
    process.take()
    is_service = sys.argv[1:2] in [[name] for name in SERVICES]
    process.leave_at_once(0 if is_service else process.INTERRUPTED)
    with process.importing():
        from fedstream.cli.app import main as command

    code = process.INTERRUPTED
    try:
        if not is_service:
            process.interrupt()
        code = _code(command)
        process.end_at_once()  # inside the block, so that no interruption escapes it
    except KeyboardInterrupt:  # not caught by the command
        pass
    _leave(code)


def _code(command: Callable[[], None]) -> int:
    """Run a command; return the exit code that Python would use."""
    try:
        command()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        from fedstream.terminal import line

        line(end.code, err=True)
        return 1
    return 0


def _leave(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which takes a second with torch loaded."""
    atexit._run_exitfuncs()  # noqa: SLF001  (a user's task may have registered some)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
