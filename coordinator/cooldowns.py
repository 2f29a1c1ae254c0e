"""Cooldowns of devices, between two tasks and after failed tasks. No I/O, no clock.

In a live run, `note_failure` in broker/lua/prelude.lua does this in the script that ends a task. So
each end counts once, and all services see the same state. :class:`Cooldowns` is for simulations.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Container

from fedstream.core import reasons

FIRST_REST_S, LONGEST_REST_S = 2.0, 300.0  # also in broker/lua/prelude.lua
_LEAST_FAILED = 5  # tasks in a row
_MOST_TRIED = 30  # devices
_MOST_REFUSED = 100  # updates in a row


def rest_after(failures: int) -> float:
    """Seconds for which a device rests after ``failures`` failed tasks in a row.

    0 after the first failure, which may be chance; then twice as long each time.
    """
    if failures < 2:
        return 0.0
    doublings = min(failures - 2, 20)  # the longest rest is reached long before
    return min(FIRST_REST_S * 2.0**doublings, LONGEST_REST_S)


def no_device_works(failed: int, tried: int, devices: int) -> str:
    """The error if no device works and the run can't succeed; '' while one may work.

    ``failed``: number of tasks that failed since the last update, on ``tried`` different devices
    out of the ``devices`` that can be asked. 30 failing devices count as all devices.
    """
    if failed < _LEAST_FAILED or tried < max(1, min(devices, _MOST_TRIED)):
        return ""
    return f"no device works: {failed} tasks in a row failed, on {tried} of {devices} devices"


def most_refused(why: Container[str], devices: int) -> int:
    """The refused updates in a row after which a run has failed, as its model doesn't change.

    ``why``: the reasons of refusals so far. Until the first answer of a root device all others are
    refused, and its turn may take several times as many tasks as there are ``devices``.
    """
    return max(_MOST_REFUSED, 10 * devices) if reasons.NO_ROOT in why else _MOST_REFUSED


class Cooldowns:
    """The end of each device's cooldown; ``now`` is in seconds, of any clock."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: from the beginning of a task to the beginning of the device's next task."""
        self._seconds = seconds
        self._ends: OrderedDict[int, float] = OrderedDict()  # by device, the earliest first
        self._failing: dict[int, tuple[int, float]] = {}  # device -> failures, end of its rest

    def __bool__(self) -> bool:
        """Whether any device may be resting."""
        return bool(self._ends or self._failing)

    def begin(self, device: int, now: float) -> None:
        """Note that a device begins a task."""
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
        """The end of a device's rest; -infinity if it doesn't rest."""
        after_failures = self._failing.get(device, (0, -math.inf))[1]
        return max(after_failures, self._ends.get(device, -math.inf))
