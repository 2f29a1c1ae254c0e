"""One request at a time for each upload: the newest takes over from those before it.

A device whose connection broke comes again, while its gateway may not have noticed and still waits
for more on the old one (draft-ietf-httpbis-resumable-upload, "Concurrency"). What has arrived there
already is still taken: the old request goes on as long as it need not wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

_QUIET_S = 0.05  # an older request that waits for longer has nothing more
_LONGEST_S = 1.0  # that an older request may go on for


class TakenOver(Exception):
    """A newer request for the same upload has come."""


class UploadLock:
    """A request's turn."""

    def __init__(self) -> None:
        self._ends: float | None = None  # by the loop's clock; None: nobody else has come
        self._waiting: asyncio.Timeout | None = None

    def end(self) -> None:
        """Have the request end as soon as it has to wait."""
        now = asyncio.get_running_loop().time()
        if self._ends is None:
            self._ends = now + _LONGEST_S
        waiting = self._waiting
        if waiting is not None and not waiting.expired():
            waiting.reschedule(min(now + _QUIET_S, waiting.when() or now))

    async def within(self, until: float, wait: Callable[[], Awaitable[T]]) -> T:
        """Wait for something, until ``until`` of the loop's clock.

        Raises TimeoutError, or TakenOver if a newer request has come meanwhile.
        """
        now = asyncio.get_running_loop().time()
        if self._ends is not None:
            if now >= self._ends:
                raise TakenOver
            until = min(until, now + _QUIET_S)
        try:
            async with asyncio.timeout_at(until) as self._waiting:
                return await wait()
        except TimeoutError:
            if self._ends is not None:
                raise TakenOver from None
            raise
        finally:
            self._waiting = None


class _Line:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.newest: UploadLock | None = None
        self.requests = 0


class UploadLocks:
    """The turns of all uploads, by name."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    async def end(self) -> None:
        """Wait until no upload has a request."""
        await self._empty.wait()

    @asynccontextmanager
    async def taken(self, name: str) -> AsyncIterator[UploadLock]:
        """Take over as soon as the request before has ended.

        Raises TakenOver if a newer one has come by then.
        """
        line = self._lines.setdefault(name, _Line())
        self._empty.clear()
        if line.newest is not None:
            line.newest.end()
        line.newest = lock = UploadLock()
        line.requests += 1
        try:
            async with line.lock:
                if line.newest is not lock:
                    raise TakenOver
                yield lock
        finally:
            line.requests -= 1
            if not line.requests:
                del self._lines[name]
                if not self._lines:
                    self._empty.set()
