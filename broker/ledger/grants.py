"""The form in which each role's module declares its rights in Redis."""

from __future__ import annotations

from dataclasses import dataclass

from fedstream.broker.scripts import Script


@dataclass(frozen=True)
class Rights:
    """The rights of one role, with key names as in :class:`Keys` and ``*`` as a wildcard."""

    both: tuple[str, ...] = ()  # read and written
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()  # sent by the service itself
    scripts: tuple[Script, ...] = ()  # run by the service; their commands are allowed too
    apart: tuple[Rights, ...] = ()  # selectors: other commands for other keys
