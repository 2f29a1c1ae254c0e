"""Detecting training that hangs: a thread can't be stopped from outside."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_S = 1.0


class Guard(AbstractContextManager[None]):
    """Watches over training that is awaited inside the block.

    Calls ``hangs`` once if it is still running ``patience_s`` after ``cancelled()``.
    """

    def __init__(
        self, cancelled: Callable[[], bool], hangs: Callable[[], None], *, patience_s: float
    ) -> None:
        self._cancelled = cancelled
        self._hangs = hangs
        self._patience_s = patience_s
        self._told_at: float | None = None

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._look_later()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _look_later(self) -> None:
        # A timer, since most training has ended before the first look.
        self._timer = self._loop.call_later(min(_LOOK_S, self._patience_s), self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if not self._cancelled():
            self._told_at = None
        elif self._told_at is None:
            self._told_at = now
        elif now - self._told_at >= self._patience_s:
            self._hangs()
            return
        self._look_later()
