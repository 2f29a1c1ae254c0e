"""`fedstream` and `python -m fedstream`: set up signals before the slow imports."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn

from fedstream.runtime import signals

SERVICES = ("coordinator", "scheduler", "updater", "trainer", "evaluator")


def main() -> None:
    """Run the command line; exit codes are those of :func:`fedstream.cli.app.main`.

    A signal during start-up means a clean stop for a service (exit code 0) and an interruption for
    any other command (130).
    """
    is_service = sys.argv[1:2] in [[name] for name in SERVICES]
    signals.leave_at_once(0 if is_service else signals.INTERRUPTED)
    from fedstream.cli.app import main as command

    if not is_service:
        signals.interrupt()
    try:
        command()
    except SystemExit as end:
        _leave(end.code if isinstance(end.code, int) else 0)
    except KeyboardInterrupt:  # raised while the command line is parsed, where nothing catches it
        _leave(signals.INTERRUPTED)


def _leave(code: int) -> NoReturn:
    """Exit without tearing down the interpreter, which takes a second with torch loaded."""
    atexit._run_exitfuncs()  # noqa: SLF001  (a user's task may have registered some)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
