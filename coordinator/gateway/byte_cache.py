"""A cache of bytes that many devices download, within a memory budget."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from fedstream.core.errors import FedstreamError

Make: TypeAlias = Callable[[], Coroutine[Any, Any, "CachedBytes"]]


class NoRoom(FedstreamError):
    """The budget is taken by entries that are being read or made."""

    retriable = True


@dataclass(slots=True, eq=False)
class CachedBytes:
    """Cached bytes, with digest and format."""

    data: memoryview
    digest: str  # by which devices request them
    format: str
    readers: int = field(default=0, init=False)  # current readers
    is_wanted_back: bool = field(default=False, init=False)  # to make room

    @contextmanager
    def read(self) -> Iterator[memoryview]:
        """The bytes, which stay cached inside the block."""
        self.readers += 1
        try:
            yield self.data
        finally:
            self.readers -= 1


class ByteCache:
    """The most recently requested bytes, by name, within a budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: dict[str, CachedBytes] = {}  # least recently requested first
        self._making: dict[str, asyncio.Task[CachedBytes]] = {}
        self._reserved = 0  # bytes reserved for entries being made
        self.nbytes = 0  # cached bytes

    def there(self, name: str) -> CachedBytes | None:
        """The cached bytes of this name, or None."""
        if (found := self._entries.pop(name, None)) is not None:
            self._entries[name] = found
            if not found.readers:
                found.is_wanted_back = False
        return found

    async def get(self, name: str, size: int, make: Make) -> CachedBytes:
        """Get the bytes of this name; the first request makes them.

        ``size``: the most bytes that ``make`` may return. Bytes above the budget are kept only
        while they are read. Raises NoRoom, and the errors of ``make``.
        """
        if (found := self.there(name)) is not None:
            return found
        making = self._making.get(name)
        if making is None:
            if not self.tidy(size) and (self._making or self._entries):
                self._want_back(size)
                raise NoRoom(f"no room for {size} bytes more")
            making = self._begin(name, size, make)
        return await asyncio.shield(making)

    def prepare(self, name: str, size: int, make: Make) -> None:
        """Begin to make bytes for later requests, unless they are cached or being made.

        Does nothing if the budget has no room. Errors are dropped: a later request will report
        them.
        """
        if name in self._entries or name in self._making:
            return
        if self.tidy(size):
            self._begin(name, size, make)
        else:
            self._want_back(size)

    def _begin(self, name: str, size: int, make: Make) -> asyncio.Task[CachedBytes]:
        self._reserved += size
        making = self._making[name] = asyncio.create_task(make(), name=f"make {name}")
        making.add_done_callback(partial(self._is_made, name, size))
        return making

    def _is_made(self, name: str, size: int, making: asyncio.Task[CachedBytes]) -> None:
        """Cache the result; retrieve its exception, which asyncio would log without a waiter."""
        del self._making[name]
        self._reserved -= size
        if not making.cancelled() and making.exception() is None:
            made = self._entries[name] = making.result()
            self.nbytes += made.data.nbytes

    def _want_back(self, size: int) -> None:
        """Ask readers of the oldest entries to free them, until ``size`` more bytes fit."""
        left, room = self.nbytes, self._budget - self._reserved - size
        for cached in self._entries.values():
            if left <= room:
                return
            cached.is_wanted_back = True
            left -= cached.data.nbytes

    def tidy(self, size: int = 0) -> bool:
        """Drop the oldest unread entries until ``size`` more bytes fit; return whether they fit."""
        room = self._budget - self._reserved - size
        if self.nbytes <= room:
            return True
        for name, cached in tuple(self._entries.items()):
            if not cached.readers:
                del self._entries[name]
                self.nbytes -= cached.data.nbytes
                if self.nbytes <= room:
                    return True
        return False
