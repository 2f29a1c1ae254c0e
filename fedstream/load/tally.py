"""What the devices of the laboratory heard, counted: answers, refusals, latencies, bytes. Pure."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

_WIDTH = math.log(1.02)  # of a bucket: 2%
_SHORTEST_S = 1e-6


class Latencies:
    """Durations in buckets 2% wide, so memory does not grow with their number."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.most_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        number = math.ceil(math.log(max(seconds, _SHORTEST_S) / _SHORTEST_S) / _WIDTH)
        self._buckets[number] += 1
        self.count += 1
        self.most_s = max(self.most_s, seconds)

    def quantile(self, share: float) -> float:
        """The shortest time, to 2%, that this share of them did not exceed; 0 if there are none."""
        wanted, seen = math.ceil(share * self.count), 0
        for number in sorted(self._buckets):
            seen += self._buckets[number]
            if seen >= wanted:
                return min(self.most_s, _SHORTEST_S * math.exp(number * _WIDTH))
        return 0.0


class LoadTally:
    """Counts of one process's devices."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget everything, as after warming up."""
        self.answers: Counter[tuple[str, int]] = Counter()  # by route and status
        self.refusals: Counter[str] = Counter()  # by reason
        self.latencies: defaultdict[str, Latencies] = defaultdict(Latencies)  # by route
        self.turns = Latencies()  # from an offer to the receipt, without what devices waited
        self.lag = Latencies()  # by which the laboratory itself was late
        self.receipts: Counter[str] = Counter()  # what became of updates
        self.events: Counter[str] = Counter()  # what devices did, or what happened to them
        self.ended: Counter[str] = Counter()  # devices that stopped early, by reason
        self.sent = 0  # bytes of bodies
        self.received = 0

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count an answer, and how long it took from the request's first byte to its last."""
        self.answers[route, status] += 1
        self.latencies[route].add(seconds)
