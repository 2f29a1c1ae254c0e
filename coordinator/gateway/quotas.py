"""How many requests a second a device and an address may make (leaky buckets)."""

from __future__ import annotations

import time
from collections.abc import Callable

from fedstream.coordinator.gateway.refusals import Refusal

_REMEMBERED = 100_000  # of each kind: who asked longest ago begins anew


class Quota:
    """So many requests a second for each device, or for each address; twice as many at once."""

    def __init__(
        self, what: str, per_s: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock``: monotonic seconds."""
        self._what = what
        self._per_s = per_s
        self._most = max(2.0, 2 * per_s)
        self._clock = clock
        self._full_until: dict[object, float] = {}  # when each bucket will be empty

    def has_room(self, who: object) -> bool:
        """Whether one more request is within the quota."""
        return self._level(who, self._clock()) + 1.0 <= self._most

    def take(self, who: object) -> None:
        """Charge one request. Raises Refusal if there were too many."""
        now = self._clock()
        level = self._level(who, now) + 1.0
        if level > self._most:
            raise Refusal(
                429, "too many requests", f"too many requests of this {self._what}: slow down",
                retry_after_s=1.0,
            )  # fmt: skip
        self._full_until.pop(who, None)
        self._full_until[who] = now + level / self._per_s
        if len(self._full_until) > _REMEMBERED:
            del self._full_until[next(iter(self._full_until))]

    def _level(self, who: object, now: float) -> float:
        """Requests in a bucket; it leaks so many a second."""
        return max(0.0, self._full_until.get(who, now) - now) * self._per_s
