"""Services that `fedstream run` started end with it, however it ends."""

from __future__ import annotations

import os
import signal
import threading
import time

VARIABLE = "FEDSTREAM_PARENT"  # in the environment: the process to end with
_LOOK_S = 1.0


def end_with_parent() -> None:
    """If ``fedstream run`` started this process: stop it as SIGTERM does once that is gone.

    A thread that looks: it works on every system, and a parent that ended before is noticed too.
    """
    if parent := os.environ.get(VARIABLE):
        threading.Thread(target=_watch, args=(int(parent),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os.kill(os.getpid(), signal.SIGTERM)
