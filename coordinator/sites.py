"""Sites: groups of trainers that trust each other, and their permissions.

A site has a Redis user, an inbox and a key prefix. The operator's own trainers are the site
``pool``; every other site owns devices and trains only for these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedstream.broker.keys import check_name
from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL

_FORM = "'name', or 'name:0-99,200' to name the devices that it may own"


@dataclass(frozen=True)
class Site:
    """A site that the coordinators serve."""

    name: str
    trusted: bool = True  # claims about its trainers' work are believed
    may_own: tuple[range, ...] | None = None  # devices; None: any without an owner

    def denied(self, owns: Iterable[int]) -> list[int]:
        """The devices in ``owns`` that the site may not own."""
        if self.may_own is None:
            return []
        return [device for device in owns if not any(device in some for some in self.may_own)]


def served(named: Sequence[str], trusted: Sequence[str]) -> Mapping[str, Site]:
    """Parse ``coordinator.sites``; return the sites by name. Raises ConfigError."""
    found: dict[str, Site] = {}
    for text in named:
        name, colon, devices = text.partition(":")
        check_name("coordinator.sites", name)
        if name in found:
            raise ConfigError(f"coordinator.sites: {name!r} is listed twice")
        may_own = _ranges(text, devices) if colon else None
        found[name] = Site(name, name in trusted, may_own)
    if POOL not in found:
        raise ConfigError(
            f"coordinator.sites: {POOL!r} is missing; it serves the devices that no site owns"
        )
    if unknown := sorted(set(trusted) - found.keys()):
        raise ConfigError(f"coordinator.trusted_sites: {unknown[0]!r} is not in coordinator.sites")
    return found


def _ranges(text: str, devices: str) -> tuple[range, ...]:
    found = []
    for part in devices.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"coordinator.sites: {text!r}: expected {_FORM}")
        found.append(range(int(first), int(last if dash else first) + 1))
    return tuple(found)
