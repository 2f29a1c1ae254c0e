"""Devices that rest: between two tasks, and after tasks that failed. No I/O, no clock.

In a live run, `note_failure` in broker/lua/prelude.lua decides about failures, in the step that
ends a task: it sees each end once, whoever ends it, and a scheduler that takes over, coordinators
and observers know the same. :class:`Cooldowns` does so for simulations.
"""

from __future__ import annotations

import math
from collections import OrderedDict

FIRST_REST_S, LONGEST_REST_S = 2.0, 300.0  # also in broker/lua/prelude.lua
_LEAST_FAILED = 5  # tasks in a row
_MOST_TRIED = 30  # devices


def rest_after(failures: int) -> float:
    """Seconds that a device rests after so many failed tasks in a row.

    None after the first, which may be chance; then twice as long each time.
    """
    if failures < 2:
        return 0.0
    doublings = min(failures - 2, 20)  # the longest rest is reached long before
    return min(FIRST_REST_S * 2.0**doublings, LONGEST_REST_S)


def no_device_works(failed: int, tried: int, devices: int) -> str:
    """Why a run can't succeed, if no device works; '' while one may.

    ``failed``: tasks in a row without an update in between, of ``tried`` different devices of the
    ``devices`` that can be asked. Of very many devices, 30 that fail stand for all.
    """
    if failed < _LEAST_FAILED or tried < max(1, min(devices, _MOST_TRIED)):
        return ""
    return f"no device works: {failed} tasks in a row failed, on {tried} of {devices} devices"


class Cooldowns:
    """When each device may have another task; ``now`` is in seconds, of any clock."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: from the beginning of a task to that of the device's next."""
        self._seconds = seconds
        self._ends: OrderedDict[int, float] = OrderedDict()  # by device, the next first
        self._failing: dict[int, tuple[int, float]] = {}  # device -> failures, end of its rest

    def __bool__(self) -> bool:
        """Whether any device may be resting."""
        return bool(self._ends or self._failing)

    def begin(self, device: int, now: float) -> None:
        """Note that a device was given a task."""
        if not self._seconds:
            return
        self._ends[device] = now + self._seconds
        self._ends.move_to_end(device)
        while self._ends and self._ends[first := next(iter(self._ends))] <= now:
            del self._ends[first]

    def ended(self, device: int, now: float, *, failed: bool) -> None:
        """Note that a device's task ended."""
        if failed:
            failures = self._failing.get(device, (0, 0.0))[0] + 1
            self._failing[device] = failures, now + rest_after(failures)
        else:
            self._failing.pop(device, None)

    def after_failures(self, now: float) -> set[int]:
        """The devices that rest after failures."""
        return {device for device, (_, end) in self._failing.items() if end > now}

    def end(self, device: int) -> float:
        """When a device's rest ends; long ago if it has none."""
        after_failures = self._failing.get(device, (0, -math.inf))[1]
        return max(after_failures, self._ends.get(device, -math.inf))
