"""Many trainers, forked from one process that has imported torch.

    python -m benchmarks.crowd NAME[:FIRST:LAST] ...

Each is a process of its own, configured by the environment; one with numbers owns the devices FIRST
to LAST - 1. Prints their process ids in one line, and stops them on SIGTERM.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress

import torch  # noqa: F401  (before the forks, which share its pages)

from fedstream.settings.config import read
from fedstream.settings.services import serve_role
from fedstream.trainer import learner  # noqa: F401


def _serve(words: str) -> int:
    """Be a trainer: its exit code."""
    name, *numbers = words.split(":")
    settings = read(None, [])
    if numbers:
        first, last = map(int, numbers)
        trainer = settings.trainer.model_copy(update={"owns": tuple(range(first, last))})
        settings = settings.model_copy(update={"trainer": trainer})
    return serve_role("trainer", settings, name)


def main() -> None:
    """Fork, and wait for the end."""
    gc.freeze()
    pids: list[int] = []

    def stop(number: int, _frame: object) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended by itself
                os.kill(pid, number)

    # Held back until all are there, for the signal must reach each of them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, stop)
    for words in sys.argv[1:]:
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            os._exit(_serve(words))
        pids.append(pid)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    print(*pids, flush=True)
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
