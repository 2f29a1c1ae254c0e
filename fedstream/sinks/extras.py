"""Packages that only some sinks need."""

from __future__ import annotations

from importlib.util import find_spec

from fedstream.broker.errors import ConfigError


def needs(module: str, extra: str) -> None:
    """Raise ConfigError, saying what to install, unless the module is there."""
    if find_spec(module) is None:
        raise ConfigError(
            f"{extra} is not installed: pip install 'fedstream[{extra}]' adds what it needs"
        )
