"""One collector for all viewers, which pauses without viewers.

Changed panels are drawn and encoded once for all viewers. After each snapshot the collector pauses
fifty times as long as the snapshot took, which is 2% of a core, and ten seconds at most.

A viewer gets the panels that have changed since its last ones, and the events after the id that it
names. Ids are those of the stream of events in Redis, so every replica of the coordinator knows
them.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter

from fedstream.core.errors import FedstreamError, NoRun
from fedstream.history.live.collector import Collected
from fedstream.history.live.snapshot import Snapshot
from fedstream.runtime.backoff import pause

LOG = 10_000  # events that are remembered, about as many as Redis keeps
_LEAST_S, _MOST_S = 1.0, 10.0  # between two snapshots
_SHARE = 50  # the pause, in times that a snapshot took
_LASTS_S = 10.0  # for which loading the page counts as a viewer
_ALIVE_S = 10.0  # without news, until a comment keeps proxies from disconnecting
_RETRY_MS = 1000  # after which a browser connects again

Drawing = Callable[[Collected], Awaitable["DrawnSnapshot"]]
Away = Callable[[Snapshot, float], Mapping[str, str]]
"""The parts that say for how many seconds Redis has not answered."""


@dataclass(frozen=True)
class DrawnSnapshot:
    """A snapshot, drawn."""

    parts: Mapping[str, str]  # HTML by the name of its place on the page
    rows: list[tuple[str, list[object]]]  # lines of the log, with the ids of their events
    seconds: float  # of processor time that drawing took


@dataclass(frozen=True)
class LivePicture:
    """The newest snapshot, drawn."""

    snapshot: Snapshot
    parts: Mapping[str, str]
    number: int  # of the snapshot


class PageFault(FedstreamError):
    """A fault of the page's own code prevents a newer picture."""


class Broadcast:
    """The newest picture, and the log of events."""

    def __init__(
        self,
        look: Callable[[], Awaitable[Collected]],
        draw: Drawing,
        away: Away,
        fault: Callable[[Exception], object],
    ) -> None:
        """``fault``: called with the first error of the page's own code, again after a success."""
        self._fault = fault
        self._look = look
        self._draw = draw
        self._away = away
        self._looked = 0.0  # when a look last went well
        self.viewers = 0
        self.picture: LivePicture | None = None
        self.trouble: FedstreamError | None = None  # why there is no newer picture
        self.is_over = False  # nobody looks any more
        self._seen_until = 0.0  # by those who loaded the page
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._numbers: dict[str, int] = {}  # part -> the look that drew it as it is
        self._number = 0
        self._log: deque[tuple[str, str]] = deque()
        self._first = 0  # the number of the first row in the log, counted since ever
        self._known: dict[str, int] = {}  # event -> how many rows there were with it
        self._begun = 0  # the log's first row since it was begun anew
        self._encoded: dict[tuple[int, int], bytes] = {}  # of this look, by what viewers have

    async def run(self, stop: asyncio.Event) -> None:
        """Collect snapshots while there are viewers, until stop; then the last one, for the end."""
        while not stop.is_set():
            if not self._is_wanted():
                self._rest()
                await _either(self._wake, stop)
                continue
            spent = await self._step()
            await pause(stop, min(_MOST_S, max(_LEAST_S, _SHARE * spent)))
        if self.viewers:
            await self._step()
        self.is_over = True
        self._tell_all()

    def _is_wanted(self) -> bool:
        self._wake.clear()
        return self.viewers > 0 or time.monotonic() < self._seen_until

    def _rest(self) -> None:
        """Forget the picture: the next viewer must not see an old one."""
        self.picture, self.trouble = None, None

    async def _step(self) -> float:
        """Show one snapshot; returns the seconds of this process's time, without waiting."""
        try:
            return await self._shown()
        except Exception as error:  # an error of the page must not end its coordinator
            if not isinstance(self.trouble, PageFault):
                self._fault(error)
                self._begin_anew()  # what was read, and not shown, is missing
            self.trouble = PageFault(
                f"a fault of this page ({type(error).__name__}; the coordinator's log says more): "
                "what it shows is old"
            )
            self._tell_all()
            return _MOST_S

    async def _shown(self) -> float:
        try:
            look = await self._look()
            drawn = await self._draw(look)
        except FedstreamError as error:
            self.trouble = error
            if self.picture is not None:
                away_s = time.monotonic() - self._looked
                parts = {**self.picture.parts, **self._away(self.picture.snapshot, away_s)}
                self._show(self.picture.snapshot, parts)
            self._tell_all()
            return 0.0
        began, self._looked = perf_counter(), time.monotonic()
        if look.is_anew:
            self._begin_anew()
        for id_, row in drawn.rows:
            self._log.append((id_, json.dumps([id_, *row], separators=(",", ":"))))
            self._known[id_] = self._end
        self._known.setdefault(look.snapshot.position, self._end)
        while len(self._log) > LOG:
            gone, _ = self._log.popleft()
            self._known.pop(gone, None)
            self._first += 1
        self._show(look.snapshot, drawn.parts)
        self.trouble = None
        self._tell_all()
        if look.is_anew:  # that takes longer, once
            return 0.0
        return look.seconds + drawn.seconds + perf_counter() - began

    def _show(self, snapshot: Snapshot, parts: Mapping[str, str]) -> None:
        self._number += 1
        before = self.picture.parts if self.picture is not None else {}
        for name, html in parts.items():
            if before.get(name) != html:
                self._numbers[name] = self._number
        self.picture = LivePicture(snapshot, parts, self._number)

    @property
    def _end(self) -> int:
        return self._first + len(self._log)

    def _begin_anew(self) -> None:
        self._first = self._begun = self._end + 1  # so that it differs even if nothing was told
        self._log.clear()
        self._known.clear()

    def _tell_all(self) -> None:
        self._encoded.clear()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def newest(self, within_s: float) -> LivePicture:
        """The newest picture, for a request of the page.

        Raises the collector's errors, and TimeoutError.
        """
        self._seen_until = time.monotonic() + _LASTS_S
        async with asyncio.timeout(within_s):
            return await self._pictured()

    async def _pictured(self) -> LivePicture:
        self._wake.set()
        while self.picture is None:
            if self.trouble is not None:
                raise self.trouble
            await self._changed.wait()
        return self.picture

    async def follow(self, after: str) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one viewer.

        ``after``: id of the last event that the viewer has; '': only new events.
        """
        self.viewers += 1
        try:
            yield f"retry: {_RETRY_MS}\n\n".encode()
            self._wake.set()
            number, begun, is_lost = 0, self._begun, False
            at: int | None = None
            while True:
                changed = self._changed
                if self.picture is not None:
                    if at is None:  # only now is it known what there is
                        at = await self._found(after) if after else self._end
                        changed, begun, is_lost = self._changed, self._begun, at is None
                    elif begun != self._begun:
                        begun, is_lost = self._begun, True
                    if at is None or is_lost:
                        at = self._end
                    if is_lost:
                        is_lost = False
                        yield self._lost()
                    if at < self._first:  # it takes too little
                        at = self._end
                        yield self._lost()
                    news = self._news(number, at)
                    number, at = self.picture.number, self._end
                    if news:
                        yield news
                if self.trouble is not None:
                    yield _event("trouble", json.dumps(_words(self.trouble)))
                if self.is_over:
                    if self.picture is not None:
                        yield _event("over", json.dumps(self.picture.snapshot.tally.run.state))
                    return
                while not await _within(changed, _ALIVE_S):
                    yield b": still here\n\n"
        finally:
            self.viewers -= 1

    async def _found(self, after: str) -> int | None:
        """The number of rows up to an event; None for an unknown event."""
        for _ in range(2):
            known = self._known.get(after)
            if known is not None:
                return known
            changed = self._changed  # another replica may have seen it earlier
            await _within(changed, 2 * _LEAST_S)
        return None

    def _lost(self) -> bytes:
        assert self.picture is not None  # noqa: S101  (asked for only with one)
        return _event("anew", "null", self.picture.snapshot.position)

    def _news(self, number: int, at: int) -> bytes:
        """The news for a viewer that has snapshot ``number`` and ``at`` rows."""
        if (number, at) not in self._encoded:
            self._encoded[number, at] = self._encode(number, at)
        return self._encoded[number, at]

    def _encode(self, number: int, at: int) -> bytes:
        assert self.picture is not None  # noqa: S101  (asked for only with one)
        parts = {
            name: html for name, html in self.picture.parts.items() if self._numbers[name] > number
        }
        found = _event("parts", json.dumps(parts, separators=(",", ":"))) if parts else b""
        rows = [self._log[n - self._first][1] for n in range(at, self._end)]
        if rows:
            found += _event("rows", f"[{','.join(rows)}]", self._log[-1][0])
        return found


def _words(error: FedstreamError) -> str:
    return str(error) if isinstance(error, NoRun | PageFault) else f"{error}: waiting for Redis"


def _event(name: str, data: str, id_: str = "") -> bytes:
    """A server-sent event; JSON has no line breaks."""
    head = f"event: {name}\n" + (f"id: {id_}\n" if id_ else "")
    return f"{head}data: {data}\n\n".encode()


async def _within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await event.wait()
    return False


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
