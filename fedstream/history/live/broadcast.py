"""One collector for all viewers, which pauses without viewers.

Changed panels are drawn and encoded once for all viewers. After each snapshot the collector pauses
fifty times as long as the snapshot took, which is 2% of a core, and ten seconds at most.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from fedstream.core.errors import FedstreamError, NoRun
from fedstream.history.live.snapshot import Snapshot
from fedstream.runtime.backoff import pause

_LEAST_S, _MOST_S = 1.0, 10.0  # between two snapshots
_SHARE = 50  # the pause, in times that a snapshot took
_LASTS_S = 10.0  # for which loading the page counts as a viewer
_ALIVE_S = 10.0  # without news, until a comment keeps proxies from disconnecting
_RETRY_MS = 1000  # after which a browser connects again


@dataclass(frozen=True)
class LivePicture:
    """A snapshot drawn as HTML."""

    snapshot: Snapshot
    parts: Mapping[str, str]  # HTML by the name of its place on the page
    seconds: float  # of processor time that it took


class PageFault(FedstreamError):
    """A fault of the page's own code prevents a newer picture."""


class Broadcast:
    """The newest picture, and its changes for each viewer."""

    def __init__(
        self,
        draw: Callable[[], Awaitable[LivePicture]],
        away: Callable[[Snapshot, float], Mapping[str, str]],
        fault: Callable[[Exception], object],
    ) -> None:
        """``draw``: draws the run as it is now. ``away``: makes the parts that say for how many
        seconds Redis has not answered. ``fault``: called with the first error of the page's own
        code, again after a success.
        """
        self._draw = draw
        self._away = away
        self._fault = fault
        self._drawn = 0.0  # when a picture last succeeded
        self.viewers = 0
        self.picture: LivePicture | None = None
        self.trouble: FedstreamError | None = None  # why there is no newer picture
        self.is_over = False  # no picture follows any more
        self._seen_until = 0.0  # by those who loaded the page
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._number = 0  # of the newest picture
        self._numbers: dict[str, int] = {}  # part -> the picture that changed the part last
        self._encoded: dict[int, bytes] = {}  # changes since a picture, by its number

    async def run(self, stop: asyncio.Event) -> None:
        """Draw pictures while there are viewers, until stop; then the final one."""
        while not stop.is_set():
            self._wake.clear()
            if not self.viewers and time.monotonic() >= self._seen_until:
                # Forget the picture: the next viewer must not see an old one.
                self.picture, self.trouble = None, None
                await _either(self._wake, stop)
                continue
            spent = await self._step()
            await pause(stop, min(_MOST_S, max(_LEAST_S, _SHARE * spent)))
        if self.viewers:
            await self._step()
        self.is_over = True
        self._tell_all()

    async def _step(self) -> float:
        """Show one picture; returns the processor time that it took, 0 for the first one."""
        try:
            picture = await self._draw()
        except FedstreamError as error:
            self.trouble, spent = error, 0.0
            if self.picture is not None:
                parts = self._away(self.picture.snapshot, time.monotonic() - self._drawn)
                self._show(replace(self.picture, parts={**self.picture.parts, **parts}))
        except Exception as error:  # an error of the page must not end its coordinator
            if not isinstance(self.trouble, PageFault):
                self._fault(error)
            self.trouble, spent = _fault_of(error), _MOST_S
        else:
            spent = picture.seconds if self.picture is not None else 0.0
            self._drawn, self.trouble = time.monotonic(), None
            self._show(picture)
        self._tell_all()
        return spent

    def _show(self, picture: LivePicture) -> None:
        self._number += 1
        before = self.picture.parts if self.picture is not None else {}
        changed = (name for name, html in picture.parts.items() if before.get(name) != html)
        self._numbers |= dict.fromkeys(changed, self._number)
        self.picture = picture

    def _tell_all(self) -> None:
        self._encoded.clear()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def newest(self, within_s: float) -> LivePicture:
        """The newest picture, for a request of the page.

        Raises the errors of drawing it, and TimeoutError after ``within_s`` seconds.
        """
        self._seen_until = time.monotonic() + _LASTS_S
        self._wake.set()
        async with asyncio.timeout(within_s):
            while self.picture is None:
                if self.trouble is not None:
                    raise self.trouble
                await self._changed.wait()
            return self.picture

    async def follow(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events for one viewer: all parts at first, then those that change."""
        self.viewers += 1
        seen = 0  # number of the picture that the viewer has
        is_warned = False
        try:
            yield f"retry: {_RETRY_MS}\n\n".encode()
            self._wake.set()
            while True:
                changed, trouble = self._changed, self.trouble
                if self.picture is not None:
                    news, seen = self._news(seen), self._number
                    if news or (is_warned and trouble is None):
                        yield news or _event("parts", {})  # which takes the warning away
                is_warned = trouble is not None
                if trouble is not None:
                    yield _event("trouble", _words(trouble))
                if self.is_over:
                    if self.picture is not None:
                        yield _event("over", self.picture.snapshot.tally.run.state)
                    return
                while not await _within(changed, _ALIVE_S):
                    yield b": still here\n\n"
        finally:
            self.viewers -= 1

    def _news(self, seen: int) -> bytes:
        """The parts that changed after picture ``seen``."""
        if seen not in self._encoded and self.picture is not None:
            parts = {
                name: html
                for name, html in self.picture.parts.items()
                if self._numbers[name] > seen
            }
            self._encoded[seen] = _event("parts", parts) if parts else b""
        return self._encoded[seen]


def _fault_of(error: Exception) -> PageFault:
    return PageFault(
        f"a fault of this page ({type(error).__name__}; the coordinator's log says more): what it "
        "shows is old"
    )


def _words(error: FedstreamError) -> str:
    return str(error) if isinstance(error, NoRun | PageFault) else f"{error}: waiting for Redis"


def _event(name: str, data: object) -> bytes:
    """A server-sent event; JSON has no line breaks."""
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


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
