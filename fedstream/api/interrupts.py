"""Ctrl-C and a notebook's stop button, while a run lasts."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_interrupt(act: Callable[[], object]) -> Iterator[None]:
    """Inside the block, SIGINT calls ``act`` instead of raising KeyboardInterrupt anywhere.

    Only the main thread can handle signals. Anywhere else this does nothing: there, nothing is
    interrupted either, because KeyboardInterrupt is raised in the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or before in (signal.SIG_IGN, None):  # None: not set by Python, nor settable again
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: act())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
