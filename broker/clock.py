"""Redis's clock, which all services of a run share.

Machines' clocks differ, and services compare times that other services wrote.
"""

from __future__ import annotations

import sys
import time

if sys.platform == "linux":

    def uptime() -> float:
        """The machine's uptime in seconds, sleep included; setting a clock doesn't change it."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    uptime = time.monotonic


class Clock:
    """An estimate of Redis's clock, from replies to TIME and this machine's uptime."""

    def __init__(self) -> None:
        self._ahead: float | None = None  # seconds ahead of the uptime; None: not known

    def read(self, at: float, sent: float) -> None:
        """Note that a TIME command sent at ``sent`` (uptime) returned ``at`` (seconds since 1970).

        A late reply gives only loose bounds; the estimate moves just far enough to fit them.
        """
        least, most = at - uptime(), at - sent
        ahead = (least + most) / 2 if self._ahead is None else self._ahead
        self._ahead = min(max(ahead, least), most)

    def now(self) -> float:
        """Redis's time in seconds since 1970; before the first reply, this machine's time."""
        return time.time() if self._ahead is None else uptime() + self._ahead
