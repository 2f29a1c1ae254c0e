"""SIGINT and SIGTERM, from a command's start to its end. Imports nothing slow.

At first, while modules are imported and no work has begun, either signal ends the process at once
(:func:`leave_at_once`). After that, a read-only command is interrupted where it is
(:func:`interrupt`); a service, or a command with work to finish or undo, is notified
(:class:`Stop`). A second signal always ends the process at once, with exit code 128 + its number.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], None]

INTERRUPTED = 130  # exit code of a command ended by its first signal, whichever it was
BOTH = (signal.SIGINT, signal.SIGTERM)


def _handle(handler: Handler) -> None:
    for number in BOTH:
        signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_at_once() -> None:
    """From now on, either signal ends this process at once, with 128 + its number."""
    _handle(_end)


def leave_at_once(code: int) -> None:
    """From now on, either signal ends this process with ``code`` after a line on stderr."""

    def leave(number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):  # stderr may be closed
            os.write(2, f"fedstream: {signal.Signals(number).name} during start-up\n".encode())
        os._exit(code)

    _handle(leave)


def interrupt() -> None:
    """From now on, the first signal raises KeyboardInterrupt, and a second ends the process.

    Python swallows an exception that is raised in a callback, such as those of its import locks. A
    :class:`Stop` that is entered later knows of the signal all the same.
    """

    def first(number: int, _frame: FrameType | None) -> None:
        end_at_once()
        Stop.swallowed = signal.Signals(number).name
        raise KeyboardInterrupt

    Stop.swallowed = None
    _handle(first)


class Stop:
    """Keep the first signal inside the block until there is a listener, and pass on its name.

    A second signal calls ``at_once``, interrupting whatever is running, and ends the process. These
    are plain handlers rather than the event loop's, so that they work even if the loop is stuck.
    """

    swallowed: ClassVar[str | None] = None  # a signal whose KeyboardInterrupt may not have arrived

    def __init__(self) -> None:
        self.name: str | None = None  # of the first signal
        self.at_once: Callable[[], object] = lambda: None
        self._told: Callable[[str], object] | None = None

    def listen(self, told: Callable[[str], object] | None) -> None:
        """Set the listener, called now if a signal has already arrived; None removes it."""
        self._told = told
        if told is not None and self.name is not None:
            told(self.name)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            try:
                self.at_once()
            finally:
                _end(number, frame)
        self.name = signal.Signals(number).name
        if self._told is not None:
            self._told(self.name)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._came) for number in BOTH}
        self.name = self.name or Stop.swallowed
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
