"""`fedstream`, and `python -m fedstream`: signals first, which takes no time; then the rest."""

from __future__ import annotations

import sys

from fedstream.runtime import signals

SERVICES = ("coordinator", "scheduler", "updater", "trainer", "evaluator")


def main() -> None:
    """The entry point; exit codes are those of :func:`fedstream.cli.main`.

    A service that is told to stop before it has begun has stopped cleanly: 0. Any other command was
    interrupted: 130.
    """
    is_service = sys.argv[1:2] in [[name] for name in SERVICES]
    signals.leave_at_once(0 if is_service else signals.INTERRUPTED)
    from fedstream.cli import main as command

    if not is_service:
        signals.interrupt()
    try:
        command()
    except KeyboardInterrupt:  # outside of what catches it: while the command line is being read
        sys.exit(signals.INTERRUPTED)


if __name__ == "__main__":
    main()
