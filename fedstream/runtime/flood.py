"""Rate limits for log lines by kind, so that nothing from outside can fill the disk."""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS = 256  # remembered; the least recently seen is evicted


@dataclass
class _Kind:
    allowance: float
    at: float
    left_out: int = 0


class Flood:
    """A token bucket per kind of line: ``burst`` lines at once, then ``per_s`` a second.

    ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        burst: int = 20,
        per_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst = burst
        self._per_s = per_s
        self._clock = clock
        self._kinds: OrderedDict[object, _Kind] = OrderedDict()

    def passes(self, kind: object) -> int | None:
        """None to drop this line, else how many of its kind were dropped since the last one."""
        now = self._clock()
        known = self._kinds.setdefault(kind, _Kind(self._burst, now))
        self._kinds.move_to_end(kind)
        if len(self._kinds) > _KINDS:
            self._kinds.popitem(last=False)
        grown = known.allowance + self._per_s * (now - known.at)
        known.allowance, known.at = min(float(self._burst), grown), now
        if known.allowance < 1:
            known.left_out += 1
            return None
        known.allowance -= 1
        left_out, known.left_out = known.left_out, 0
        return left_out
