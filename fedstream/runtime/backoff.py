"""Exponential back-off, and a pause that ends early on stop."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


class Backoff:
    """Exponential back-off with full jitter: uniform in [0, min(most_s, first_s * 2**n)] seconds.

    Full jitter best spreads out the clients that reconnect to a restarted Redis (AWS Architecture
    Blog, "Exponential Backoff And Jitter").
    """

    def __init__(self, first_s: float = 0.05, most_s: float = 5.0, *, rng: random.Random) -> None:
        self._first_s = min(first_s, most_s)
        self._most_s = most_s
        self._rng = rng
        self._ceiling_s = self._first_s

    def next(self) -> float:
        """Seconds to wait before the next try."""
        ceiling_s = self._ceiling_s
        self._ceiling_s = min(2 * ceiling_s, self._most_s)
        return self._rng.uniform(0, ceiling_s)

    def reset(self) -> None:
        """Start over from the shortest wait, after a success."""
        self._ceiling_s = self._first_s


async def pause(stop: asyncio.Event, seconds: float) -> bool:
    """Wait for ``seconds`` or until ``stop`` is set; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await stop.wait()
    return stop.is_set()
