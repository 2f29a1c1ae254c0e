"""Limits on events, log lines and connections. Pure: callers pass the time."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Hashable
from functools import lru_cache
from ipaddress import IPv4Address, ip_address
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable

# Part of an event that is tolerated as rounding, for a retry exactly at the given time.
_ROUNDING = 1e-6


class TokenBuckets:
    """A token bucket per key: a rate and a burst of events; ``now`` is in seconds, of any clock.

    A bucket stores its level and the time of the level, not the time at which it will be empty:
    sums of times would round, and concurrent events could count as slightly more.
    """

    def __init__(self, per_s: float, *, at_once: float, remembered: int) -> None:
        """``at_once``: events that fit into an empty bucket, at least 1. ``remembered``: most
        buckets; the least recently charged is dropped.
        """
        self._per_s = per_s
        self._at_once = at_once
        self._remembered = remembered
        self._levels: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def wait_s(self, who: Hashable, now: float) -> float:
        """Seconds until one more event fits; 0: it fits now."""
        excess = self._level(who, now) + 1.0 - self._at_once
        return excess / self._per_s if excess > _ROUNDING else 0.0

    def charge(self, who: Hashable, now: float) -> None:
        """Count one event, whether or not it fits."""
        self._levels[who] = (self._level(who, now) + 1.0, now)
        self._levels.move_to_end(who)
        if len(self._levels) > self._remembered:
            self._levels.popitem(last=False)

    def _level(self, who: Hashable, now: float) -> float:
        """The present level of a bucket, in events."""
        level, then = self._levels.get(who, (0.0, now))
        return max(0.0, level - max(0.0, now - then) * self._per_s)


_KINDS = 256  # remembered kinds of lines


class LogLimiter:
    """A limit for each kind of line: ``burst`` lines at once, then ``per_s`` a second.

    ``clock`` is monotonic, in seconds.
    """

    def __init__(
        self,
        burst: int = 20,
        per_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._buckets = TokenBuckets(per_s, at_once=burst, remembered=_KINDS)
        self._clock = clock
        self._left_out: dict[Hashable, int] = {}  # dropped lines of each kind, since the last line

    def passes(self, kind: Hashable) -> int | None:
        """None: drop this line. Else the number of lines of its kind dropped since the last one."""
        now = self._clock()
        if not self._buckets.wait_s(kind, now):
            self._buckets.charge(kind, now)
            return self._left_out.pop(kind, 0)
        self._left_out[kind] = self._left_out.get(kind, 0) + 1
        if len(self._left_out) > _KINDS:
            del self._left_out[next(iter(self._left_out))]
        return None


# Too many connections; too many from one address; too frequent from one address.
TooMany: TypeAlias = Literal["busy", "address", "arrivals"]
_REMEMBERED = 100_000  # most recent addresses


@lru_cache(maxsize=1 << 14)  # asked for each request
def network_of(address: str) -> str:
    """The network to charge for an address: itself, or an IPv6 address's /64 prefix."""
    try:
        found = ip_address(address)
    except ValueError:  # a proxy may forward any text
        return address
    if isinstance(found, IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return found.packed[:8].hex()


class ConnectionLimit:
    """Counts and limits the open connections of a port."""

    def __init__(
        self, most: int, of_address: int | None = None, arrivals: float | None = None
    ) -> None:
        """``most``: connections in all. ``of_address``: connections per address; None: unlimited.

        ``arrivals``: new connections per second from an address, after a burst of ``of_address``;
        None: unlimited.
        """
        self.most = most
        self.of_address = of_address
        self.arrivals = arrivals
        self._lately = (
            None
            if arrivals is None
            else TokenBuckets(
                arrivals,
                at_once=most if of_address is None else min(most, of_address),
                remembered=_REMEMBERED,
            )
        )
        self._inside: dict[object, str] = {}
        self._from: Counter[str] = Counter()

    def __len__(self) -> int:
        """The number of open connections."""
        return len(self._inside)

    def enter(self, who: object, address: str, now: float) -> TooMany | None:
        """Count an accepted connection; if there are too many, return the exceeded limit.

        ``now``: monotonic seconds.
        """
        network = network_of(address)
        if len(self._inside) >= self.most:
            return "busy"
        if self.of_address is not None and self._from[network] >= self.of_address:
            return "address"
        if self._lately is not None:
            if self._lately.wait_s(network, now):
                return "arrivals"
            self._lately.charge(network, now)
        self._inside[who] = network
        self._from[network] += 1
        return None

    def leave(self, who: object) -> None:
        """Stop counting a connection."""
        network = self._inside.pop(who, None)
        if network is not None:
            self._from[network] -= 1
            if not self._from[network]:
                del self._from[network]
