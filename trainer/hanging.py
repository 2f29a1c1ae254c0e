"""Detecting training that hangs: a thread can't be stopped from outside."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOK_S = 1.0


async def returns(
    training: asyncio.Future[Any], cancelled: Callable[[], bool], *, patience_s: float
) -> bool:
    """Wait for training; False if it is still running ``patience_s`` after ``cancelled()``."""
    told_at: float | None = None
    while True:
        done, _ = await asyncio.wait({training}, timeout=min(_LOOK_S, patience_s))
        if done:
            return True
        now = time.monotonic()
        if not cancelled():
            told_at = None
        elif told_at is None:
            told_at = now
        elif now - told_at >= patience_s:
            return False
