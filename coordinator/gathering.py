"""Letting more happen before the next look, where that makes no trainer wait.

Entries and versions that follow one another within a moment then share a wake-up, an exchange with
Redis and a script. Where many tasks are open for each trainer, none waits for the next one.
"""

from __future__ import annotations

import asyncio
import time

_AMPLE = 4  # tasks for each trainer
# Of the open tasks, that is what comes in a wait. Two waits lie on a task's way, or three if it was
# asked for by a trigger, so most of the tasks are always with the trainers.
_SHARE = 1 / 8
_MOST_S = 0.02
_RECENT = 32  # tasks whose pace counts


class Gathering:
    """Waits of one loop. It learns how fast tasks follow one another."""

    def __init__(self) -> None:
        self._ended: float | None = None  # when the last wait did
        self._each_s = 0.0  # between one task and the next
        self._since = 0.0  # when tasks were last counted

    async def more(self, tasks: int, trainers: int, done: int) -> None:
        """Wait a moment, counted from the end of the last wait, if so many tasks are open.

        ``done``: tasks that passed here since the last call.
        """
        now = time.monotonic()
        if self._ended is None:
            self._ended = self._since = now
        elif done:
            weight = min(1.0, done / _RECENT)
            self._each_s += weight * ((now - self._since) / done - self._each_s)
            self._since = now
        if tasks >= _AMPLE * trainers > 0:
            left_s = self._ended + min(_MOST_S, _SHARE * tasks * self._each_s) - now
            if left_s > 0:
                await asyncio.sleep(left_s)
        self._ended = time.monotonic()
