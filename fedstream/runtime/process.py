"""What a process may do because it is a command's or a service's own. Imports nothing slow."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_own = False


def take() -> None:
    """Note that no other program runs in this process. Called once, at its beginning."""
    global _own  # noqa: PLW0603  (a process has one beginning)
    _own = True


def is_own() -> bool:
    """Whether no other program runs in this process."""
    return _own


@contextmanager
def importing() -> Iterator[None]:
    """Import without collecting garbage, neither now nor ever among what exists afterwards.

    Modules are a quarter of a million objects and no garbage. To look through them again and again
    takes a fifth of the time that importing them does, and copies pages that forks share. In a
    process that is not our own, there may be garbage.
    """
    if not _own:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
