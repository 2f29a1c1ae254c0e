"""The other replicas of a gateway that are there: those that were heard of lately."""

from __future__ import annotations

import math
from typing import Final

GREET_S: Final = 10.0  # between two signs of life of a replica
_SILENT_S = 3 * GREET_S + 5.0  # without one, it is gone
_DEAF_S = 3.0  # without listening: somebody may have gone unheard


class OtherReplicas:
    """The other replicas. ``now`` is in monotonic seconds everywhere."""

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}
        self._listened = self._hears_since = -math.inf  # the last time; without a break

    def __bool__(self) -> bool:
        """Whether there is one."""
        return bool(self._heard)

    def heard(self, name: str, now: float) -> None:
        """Note that a replica has told something."""
        self._heard[name] = now

    def listened(self, now: float) -> None:
        """Note that all is known that was told until now, and forget who is silent.

        Silence counts only while replicas could be heard: not while Redis is away.
        """
        if now - self._listened > _DEAF_S:
            self._hears_since = now
        self._listened = now
        self._heard = {
            name: heard
            for name, heard in self._heard.items()
            if now - max(heard, self._hears_since) < _SILENT_S
        }
