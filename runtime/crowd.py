"""Who is connected to a port, in all and from each address, and how many may be."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from ipaddress import IPv4Address, ip_address
from typing import Literal, TypeAlias

TooMany: TypeAlias = Literal["busy", "address"]  # in all; from one address


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

    def __init__(self, most: int, of_address: int | None = None) -> None:
        """``most``: connections; ``of_address``: of each address, None: any number."""
        self.most = most
        self.of_address = of_address
        self._inside: dict[object, str] = {}
        self._from: Counter[str] = Counter()

    def __len__(self) -> int:
        """Connections in all."""
        return len(self._inside)

    def enter(self, who: object, address: str) -> TooMany | None:
        """Count a connection that was accepted, unless there are too many: then say of what."""
        network = network_of(address)
        if len(self._inside) >= self.most:
            return "busy"
        if self.of_address is not None and self._from[network] >= self.of_address:
            return "address"
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
