"""Redis's clock, by which all of a run's services tell the time.

Their machines' own clocks may be wrong, and so differ; a time that one service writes and another
compares must be of one clock.
"""

from __future__ import annotations

import sys
import time

if sys.platform == "linux":

    def uptime() -> float:
        """The machine's uptime in seconds, with its sleep; setting a clock doesn't change it."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

else:
    uptime = time.monotonic


class Clock:
    """What Redis's clock shows, counted on from the answers to TIME by this machine's uptime."""

    def __init__(self) -> None:
        self._ahead: float | None = None  # of the machine's uptime, in seconds; None: not known

    def read(self, at: float, sent: float) -> None:
        """Note that Redis's clock showed ``at`` (seconds since 1970) since ``sent`` (uptime).

        An answer that is late tells little, so the clock is corrected only as far as it must be
        wrong.
        """
        least, most = at - uptime(), at - sent
        ahead = (least + most) / 2 if self._ahead is None else self._ahead
        self._ahead = min(max(ahead, least), most)

    def now(self) -> float:
        """Seconds since 1970; by this machine's own clock until Redis has answered once."""
        return time.time() if self._ahead is None else uptime() + self._ahead
