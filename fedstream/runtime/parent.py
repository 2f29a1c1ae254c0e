"""Child processes end with the process that started them, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

VARIABLE = "FEDSTREAM_PARENT"  # environment variable: id of the process to end with
_LOOK_S = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


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


def death_with_parent() -> Callable[[], None] | None:
    """Function for the child to call first, so that it dies with us even on SIGKILL.

    None where the system can't do that (anywhere but on Linux).
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up now: between fork and exec it would be unsafe
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
