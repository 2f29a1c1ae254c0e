"""Devices that rest between two tasks. No I/O, no clock."""

from __future__ import annotations

import math
from collections import OrderedDict


class Rests:
    """When each device may have another task; ``now`` is in seconds, of any clock."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: from the beginning of a task to that of the device's next."""
        self._seconds = seconds
        self._ends: OrderedDict[int, float] = OrderedDict()  # by device, the next first

    def __bool__(self) -> bool:
        """Whether any device may be resting."""
        return bool(self._ends)

    def begin(self, device: int, now: float) -> None:
        """Note that a device was given a task."""
        if not self._seconds:
            return
        self._ends[device] = now + self._seconds
        self._ends.move_to_end(device)
        while self._ends and self._ends[first := next(iter(self._ends))] <= now:
            del self._ends[first]

    def end(self, device: int) -> float:
        """When a device's rest ends; long ago if it has none."""
        return self._ends.get(device, -math.inf)
