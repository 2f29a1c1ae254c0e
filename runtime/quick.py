"""Routes that answer plain requests themselves, without what aiohttp does for any request.

aiohttp makes a task, a request, a response and two timers of each request. Where thousands of
clients ask the same and wait, that is most of what they cost. A quick route gets the request as it
was received, and either answers it, now or later, or leaves it to the route's handler, before
anything has changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from aiohttp import web

from fedstream.runtime.plain import PlainRequest


class Exchange(Protocol):
    """A request that a quick route has taken, and has to answer once."""

    @property
    def remote(self) -> str:
        """The address of who asks."""

    @property
    def is_open(self) -> bool:
        """Whether who asked is still there."""

    def answer(self, response: bytes, *, is_last: bool = False) -> None:
        """Send the response. ``is_last``: and close the connection."""


# Whether it takes the request.
Quick: TypeAlias = Callable[[PlainRequest, Exchange], bool]


@dataclass(frozen=True)
class QuickRoute(web.AbstractRouteDef):
    """Beside an ordinary route for the same path: ``quick`` is asked first about plain requests."""

    method: str
    path: str
    quick: Quick

    def register(self, router: web.UrlDispatcher) -> list[web.AbstractRoute]:
        """Nothing that aiohttp has to know of."""
        return []


QUICK = web.AppKey("quick", dict[tuple[str, str], Quick])


class Expiring(Protocol):
    """What may be idle."""

    def expire(self) -> None:
        """Hear that it was idle for too long."""


class Idle:
    """Connections that are idle, with one timer for all of them."""

    def __init__(self, within_s: float) -> None:
        """``within_s``: for which one may be idle."""
        self._within_s = within_s
        self._ends: dict[Expiring, float] = {}  # by the loop's clock, the next first
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, who: Expiring) -> None:
        """Count the time from now on."""
        loop = asyncio.get_running_loop()
        self._ends.pop(who, None)
        self._ends[who] = end = loop.time() + self._within_s
        if self._timer is None:
            self._timer = loop.call_at(end, self._look, loop)

    def end(self, who: Expiring) -> None:
        """Count it no more."""
        self._ends.pop(who, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        now = loop.time()
        for who, end in tuple(self._ends.items()):
            if end > now:
                self._timer = loop.call_at(end, self._look, loop)
                return
            del self._ends[who]
            who.expire()
