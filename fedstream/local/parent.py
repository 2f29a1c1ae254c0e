"""Services started by `fedstream run` end with it, however it ends."""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "FEDSTREAM_PARENT"  # environment variable: id of the process to end with
_LOOK_S = 1.0


def end_with_parent() -> None:
    """If ``fedstream run`` started this process, send SIGTERM to it once the parent is gone.

    A thread polls: this works on every system, and also notices a parent that has already ended.
    """
    if parent := os.environ.get(VARIABLE):
        threading.Thread(target=_watch, args=(int(parent),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
