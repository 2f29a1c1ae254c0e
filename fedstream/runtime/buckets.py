"""Leaky buckets: how often each of many may do something. Pure: callers say what time it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

# Of one event: less than that is rounding, and keeps nobody out who came when he was told to.
_ROUNDING = 1e-6


class Buckets:
    """So many events a second for each, and more at once; ``now`` is in seconds, of any clock.

    A bucket holds its level and when it had that, not when it will be empty: sums of times would
    round, and events of one moment could be counted as a little more than they are.
    """

    def __init__(self, per_s: float, *, at_once: float, remembered: int) -> None:
        """``at_once``: events that fit into an empty bucket, at least 1. ``remembered``: buckets;
        of more, whoever was charged longest ago begins anew.
        """
        self._per_s = per_s
        self._at_once = at_once
        self._remembered = remembered
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_s(self, who: Hashable, now: float) -> float:
        """Seconds until one more event fits; 0 if it does now."""
        excess = self._level(who, now) + 1.0 - self._at_once
        return excess / self._per_s if excess > _ROUNDING else 0.0

    def charge(self, who: Hashable, now: float) -> None:
        """Count one event, whether or not it fits."""
        self._levels[who] = (self._level(who, now) + 1.0, now)
        self._levels.move_to_end(who)
        if len(self._levels) > self._remembered:
            self._levels.popitem(last=False)

    def _level(self, who: Hashable, now: float) -> float:
        """Events in a bucket now."""
        level, then = self._levels.get(who, (0.0, now))
        return max(0.0, level - max(0.0, now - then) * self._per_s)
