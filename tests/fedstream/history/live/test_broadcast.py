"""How often somebody looks, whoever is watching."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from fedstream.core.errors import Unavailable
from fedstream.history.live import broadcast
from fedstream.history.live.broadcast import Broadcast, LivePicture
from tests.fedstream.history.live.snapshots import snapshot
from tests.support import Pauses, wait_until


def faulty(error: Exception) -> None:
    """Nothing here fails."""
    raise error


@pytest.mark.parametrize(
    ("spent_s", "rests_s"), [(0.001, 1.0), (0.1, 5.0), (1.0, 10.0)], ids=["least", "share", "most"]
)
async def test_rests_fifty_times_as_long_as_it_looked(
    monkeypatch: pytest.MonkeyPatch, spent_s: float, rests_s: float
) -> None:
    """So it takes no more than 2% of a core; only the first look, which takes longer, is free."""
    pauses, stop = Pauses(0.001), asyncio.Event()
    monkeypatch.setattr(broadcast, "pause", pauses)

    async def draw() -> LivePicture:
        return LivePicture(snapshot(), {"headline": "x"}, spent_s)

    cast = Broadcast(draw, lambda _scene, _away_s: {}, faulty)
    working = asyncio.create_task(cast.run(stop))
    await cast.newest(60)
    await wait_until(lambda: len(pauses.asked_s) > 2)
    stop.set()
    await working
    first, second, *_ = pauses.asked_s
    assert first == 1.0
    assert rests_s <= second < rests_s + 0.5


class Gap:
    """A broadcast of one picture; while ``is_away``, Redis does not answer."""

    def __init__(self, parts: dict[str, str], away: Callable[[float], dict[str, str]]) -> None:
        self.is_away = False
        self._parts = parts
        self.cast = Broadcast(self._draw, lambda _snapshot, away_s: away(away_s), faulty)

    async def _draw(self) -> LivePicture:
        if self.is_away:
            raise Unavailable("Redis does not answer")
        return LivePicture(snapshot(), self._parts, 0.0)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Broadcast]:
        stop = asyncio.Event()
        working = asyncio.create_task(self.cast.run(stop))
        try:
            yield self.cast
        finally:
            stop.set()
            await working


async def test_picture_that_was_there_says_how_long_redis_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "pause", Pauses(0.001))
    parts = {"headline": "there", "flow": "as it was"}
    gap = Gap(parts, lambda away_s: {"headline": f"away {away_s >= 0}"})
    async with gap.running() as cast:
        assert (await cast.newest(60)).parts["headline"] == "there"
        gap.is_away = True
        await wait_until(lambda: cast.trouble is not None)
        assert cast.picture is not None
        assert cast.picture.parts == {"headline": "away True", "flow": "as it was"}
        gap.is_away = False
        await wait_until(lambda: cast.trouble is None)
        assert (await cast.newest(60)).parts["headline"] == "there"


async def test_a_warning_ends_with_the_gap_even_if_nothing_else_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(broadcast, "pause", Pauses(0.001))
    gap = Gap({"headline": "there"}, lambda _away_s: {})
    async with gap.running() as cast, aclosing(cast.follow()) as events:
        assert (await anext(events)).startswith(b"retry: ")
        assert await anext(events) == b'event: parts\ndata: {"headline":"there"}\n\n'
        gap.is_away = True
        assert b"waiting for Redis" in await anext(events)
        gap.is_away = False
        while (news := await anext(events)).startswith(b"event: trouble"):
            pass
        assert news == b"event: parts\ndata: {}\n\n"
