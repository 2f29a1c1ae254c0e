"""How many requests a second a device and an address may make (leaky buckets)."""

from __future__ import annotations

from aiolimiter import AsyncLimiter

from fedstream.coordinator.gateway.refusals import Refusal

_REMEMBERED = 100_000  # of each kind: who asked longest ago begins anew


class Quota:
    """So many requests a second for each device, or for each address; twice as many at once."""

    def __init__(self, what: str, per_s: float) -> None:
        self._what = what
        self._most = max(2.0, 2 * per_s)
        self._time_s = self._most / per_s
        self._limiters: dict[object, AsyncLimiter] = {}

    async def take(self, who: object) -> None:
        """Charge one request. Raises Refusal if there were too many."""
        limiter = self._limiters.pop(who, None) or AsyncLimiter(self._most, self._time_s)
        self._limiters[who] = limiter
        if len(self._limiters) > _REMEMBERED:
            del self._limiters[next(iter(self._limiters))]
        if not limiter.has_capacity():
            raise Refusal(
                429, "too many requests", f"too many requests of this {self._what}: slow down",
                retry_after_s=1.0,
            )  # fmt: skip
        await limiter.acquire()
