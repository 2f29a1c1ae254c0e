"""Routes that answer plain requests themselves, without what aiohttp does for any request.

aiohttp makes a task, a request, a response and two timers of each request. Where thousands of
clients ask the same and wait, that is most of what they cost. A quick route gets the request as it
was received, and either answers it, now or later, or leaves it to the route's handler, before
anything has changed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from aiohttp import web

from fedstream.runtime.plain import PlainRequest

_NOTHING = memoryview(b"")
_NAME = re.compile(r"\{(\w+)\}")


class IncomingBody:
    """The body of a request, for one reader, while it comes."""

    __slots__ = ("_data", "_error", "_reader", "_resume", "missing", "size")

    def __init__(self, missing: int, resume: Callable[[], None]) -> None:
        """``missing``: bytes to come. ``resume``: called as soon as all that came was read."""
        self._data: list[bytes] = []
        self._error: ConnectionError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._resume = resume
        self.missing = missing
        self.size = 0  # bytes that nobody has read yet

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        self.missing -= len(data)
        self.size += len(data)
        self._data.append(data)
        self._wake()

    def fail(self, error: ConnectionError) -> None:
        """Have the reader hear that nothing more comes."""
        self._error = error
        self._wake()

    async def readany(self) -> bytes:
        """What has come since the last call, as soon as there is something; nothing at the end.

        Raises ConnectionError.
        """
        while not self._data:
            if self._error is not None:
                raise self._error
            if not self.missing:
                return b""
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        found = self._data[0] if len(self._data) == 1 else b"".join(self._data)
        self.drop()
        return found

    def drop(self) -> None:
        """Forget what has come."""
        self._data.clear()
        self.size = 0
        self._resume()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Exchange(Protocol):
    """A request that a quick route has taken, and has to answer once."""

    @property
    def remote(self) -> str:
        """The address of who asks."""

    @property
    def is_open(self) -> bool:
        """Whether who asked is still there."""

    def incoming(self, request: PlainRequest) -> IncomingBody:
        """The request's body, to be read as it comes. To be asked for as the request is taken."""

    def answer(
        self,
        response: bytes,
        body: memoryview = _NOTHING,
        *,
        is_last: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Send the response. ``body``: bytes of its body that follow. ``is_last``: and close the
        connection. ``then``: called once all bytes were taken, or nobody will take them.
        """


# Whether it takes the request; the last are the parts of its path that have names.
Quick: TypeAlias = Callable[[PlainRequest, Exchange, Mapping[str, str]], bool]


@dataclass(frozen=True)
class QuickRoute(web.AbstractRouteDef):
    """Beside an ordinary route for the same path: ``quick`` is asked first about plain requests."""

    method: str
    path: str  # with names in braces, each for one part of letters, digits, ``_`` and ``-``
    quick: Quick
    in_parts: bool = False  # it is also asked when the request's body is still to come

    def register(self, router: web.UrlDispatcher) -> list[web.AbstractRoute]:
        """Nothing that aiohttp has to know of."""
        return []


class QuickRoutes:
    """The quick routes of a port, by method and path."""

    def __init__(self, routes: Iterable[QuickRoute] = ()) -> None:
        self._routes = [(route, _pattern(route.path)) for route in routes]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._routes)

    def take(self, request: PlainRequest, exchange: Exchange) -> bool:
        """Whether the request's quick route has taken it."""
        for route, pattern in self._routes:
            if route.method == request.method and (found := pattern.fullmatch(request.target)):
                if request.missing and not route.in_parts:
                    return False
                return route.quick(request, exchange, found.groupdict())
        return False


def _pattern(path: str) -> re.Pattern[str]:
    literal = re.escape(path).replace(r"\{", "{").replace(r"\}", "}")
    return re.compile(_NAME.sub(r"(?P<\1>[A-Za-z0-9_-]+)", literal))


QUICK = web.AppKey("quick", QuickRoutes)


# After a timer, for what has come in time: not 0, or uvloop would read nothing in between.
READ_S: Final = 0.002


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
        # A busy loop comes late, and may not have read yet what has come in time.
        self._timer = loop.call_later(READ_S, self._expire, loop, loop.time())

    def _expire(self, loop: asyncio.AbstractEventLoop, until: float) -> None:
        self._timer = None
        for who, end in tuple(self._ends.items()):
            if end > until:
                self._timer = loop.call_at(end, self._look, loop)
                return
            del self._ends[who]
            who.expire()
