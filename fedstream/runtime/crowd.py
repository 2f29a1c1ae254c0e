"""Who is connected to a port, in all and from each address, and how many may be."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from ipaddress import IPv4Address, ip_address
from typing import Literal, TypeAlias

from fedstream.runtime.buckets import Buckets

# In all; from one address; too often from one address.
TooMany: TypeAlias = Literal["busy", "address", "arrivals"]
_REMEMBERED = 100_000  # addresses from which connections came lately


@lru_cache(maxsize=1 << 14)  # asked for each request
def network_of(address: str) -> str:
    """Whom an address is charged to: itself, or the /64 of IPv6, of which one host has any."""
    try:
        found = ip_address(address)
    except ValueError:  # what a proxy forwards may be anything
        return address
    if isinstance(found, IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return found.packed[:8].hex()


class Crowd:
    """The connections of a port, from when they are accepted until they are lost."""

    def __init__(
        self, most: int, of_address: int | None = None, arrivals: float | None = None
    ) -> None:
        """``most``: connections; ``of_address``: of each address, None: any number.

        ``arrivals``: new ones per second from an address, beyond as many at once as it may have;
        None: any number.
        """
        self.most = most
        self.of_address = of_address
        self.arrivals = arrivals
        self._lately = None if arrivals is None else Buckets(
            arrivals, at_once=most if of_address is None else min(most, of_address),
            remembered=_REMEMBERED,
        )  # fmt: skip
        self._inside: dict[object, str] = {}
        self._from: Counter[str] = Counter()

    def __len__(self) -> int:
        """Connections in all."""
        return len(self._inside)

    def enter(self, who: object, address: str, now: float) -> TooMany | None:
        """Count a connection that was accepted, unless there are too many: then say of what.

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
        """Count a connection no more, if it was."""
        network = self._inside.pop(who, None)
        if network is not None:
            self._from[network] -= 1
            if not self._from[network]:
                del self._from[network]
