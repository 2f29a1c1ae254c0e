"""A lock per upload, which the newest request takes over from older ones.

After a broken connection, a device sends a new request while the gateway may still wait for bytes
on the old connection (draft-ietf-httpbis-resumable-upload, "Concurrency"). The old request
continues as long as it need not wait, so bytes that have arrived are not lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

_QUIET_S = 0.05  # wait after which an older request ends
_LONGEST_S = 1.0  # longest continuation of an older request


class TakenOver(Exception):
    """A newer request for the same upload has taken the lock."""


class UploadLock:
    """The lock as held by one request."""

    def __init__(self) -> None:
        self._ends: float | None = None  # by the loop's clock; None: no newer request
        self._waiting: asyncio.Timeout | None = None

    def end(self) -> None:
        """End this request for a newer one: at a wait of 50 ms, or at the first wait after 1 s."""
        now = asyncio.get_running_loop().time()
        if self._ends is None:
            self._ends = now + _LONGEST_S
        waiting = self._waiting
        if waiting is not None and not waiting.expired():
            waiting.reschedule(min(now + _QUIET_S, waiting.when() or now))

    async def within(self, until: float, wait: Callable[[], Awaitable[T]]) -> T:
        """Await ``wait()``, at most until ``until`` on the loop's clock.

        Raises TimeoutError, or TakenOver if a newer request has come.
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
    """The locks of all uploads, by name."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._empty = asyncio.Event()
        self._empty.set()

    async def end(self) -> None:
        """Wait until no request holds or awaits a lock."""
        await self._empty.wait()

    @asynccontextmanager
    async def taken(self, name: str) -> AsyncIterator[UploadLock]:
        """Acquire the lock once the previous request has ended.

        Raises TakenOver if a newer request has come meanwhile.
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
