"""Back-off: bounded, jittered, repeatable; a pause ends at once when stop is set."""

from __future__ import annotations

import asyncio
import random

from fedstream.runtime.backoff import Backoff, pause


class Highest(random.Random):
    """Draws the upper end of every range."""

    def uniform(self, a: float, b: float) -> float:
        return b


def test_ceiling_doubles_up_to_the_maximum_and_resets() -> None:
    backoff = Backoff(0.1, 0.5, rng=Highest())
    assert [backoff.next() for _ in range(5)] == [0.1, 0.2, 0.4, 0.5, 0.5]
    backoff.reset()
    assert backoff.next() == 0.1


def test_full_jitter_stays_within_bounds_and_is_seeded() -> None:
    one, other = (Backoff(rng=random.Random(7)) for _ in range(2))
    waits = [one.next() for _ in range(2000)]
    assert waits == [other.next() for _ in range(2000)]
    assert min(waits) >= 0
    assert max(waits) <= 5.0
    assert min(waits[10:]) < 0.5 < 4.5 < max(waits)


async def test_pause_lasts_as_long_as_asked() -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    assert not await pause(asyncio.Event(), 0.02)
    assert loop.time() - began >= 0.02


async def test_stop_interrupts_a_pause() -> None:
    stop = asyncio.Event()
    waiting = asyncio.create_task(pause(stop, 3600))
    await asyncio.sleep(0)
    stop.set()
    assert await waiting
    assert await pause(stop, 3600)
