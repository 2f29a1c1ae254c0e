"""SIGINT and SIGTERM, from a command's first moment to its last. Imports nothing that takes time.

First, while modules are loaded and nothing is begun, either one ends the process at once
(:func:`leave_at_once`). Then a command that only looks is interrupted where it is
(:func:`interrupt`); one that has something to finish or to undo is told (:class:`Stop`), and so is
a service. Whatever the phase, a second signal ends the process at once, with 128 + its number.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    Handler = Callable[[int, FrameType | None], None]

INTERRUPTED = 130  # exit code of a command that the first one ended, whichever of the two it was
BOTH = (signal.SIGINT, signal.SIGTERM)


def _handle(handler: Handler) -> None:
    for number in BOTH:
        signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def leave_at_once(code: int) -> None:
    """From now on either ends this process with ``code``, by a line on stderr and nothing else."""

    def leave(number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):  # nobody may listen
            os.write(2, f"fedstream: {signal.Signals(number).name} before it began\n".encode())
        os._exit(code)

    _handle(leave)


def interrupt() -> None:
    """From now on the first one raises KeyboardInterrupt, and a second one ends the process.

    The second: what is being loaded may swallow an exception that it does not expect.
    """

    def first(_number: int, _frame: FrameType | None) -> None:
        _handle(_end)
        raise KeyboardInterrupt

    _handle(first)


class Stop:
    """Inside the block the first signal is kept until somebody listens, who is then told its name.

    A second one calls ``at_once``, in the middle of whatever goes on, and ends the process. These
    are plain handlers, not the event loop's: it must also end a process whose loop is stuck.
    """

    def __init__(self) -> None:
        self.name: str | None = None  # of the first that came
        self.at_once: Callable[[], object] = lambda: None
        self._told: Callable[[str], object] | None = None

    def listen(self, told: Callable[[str], object] | None) -> None:
        """``told`` is called now if one came already; None: nobody listens any more."""
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
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
