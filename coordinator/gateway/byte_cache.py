"""Bytes that many devices read: each made once, and kept up to a budget."""

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
    """Others are being read or made, and there is no room for one more."""

    retriable = True


@dataclass(slots=True, eq=False)
class CachedBytes:
    """Bytes on the shelf, and what they are."""

    data: memoryview
    digest: str  # what devices know them by
    format: str
    readers: int = field(default=0, init=False)  # now
    is_wanted_back: bool = field(default=False, init=False)  # by others, who need its room

    @contextmanager
    def read(self) -> Iterator[memoryview]:
        """The bytes, which stay on the shelf inside the block."""
        self.readers += 1
        try:
            yield self.data
        finally:
            self.readers -= 1


class ByteCache:
    """The bytes that were last asked for, by name, up to a budget."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._entries: dict[str, CachedBytes] = {}  # least recently asked for first
        self._making: dict[str, asyncio.Task[CachedBytes]] = {}
        self._reserved = 0  # bytes of those that are being made
        self.nbytes = 0  # on the shelf

    def there(self, name: str) -> CachedBytes | None:
        """The bytes of this name, if they are on the shelf."""
        if (found := self._entries.pop(name, None)) is not None:
            self._entries[name] = found
            if not found.readers:
                found.is_wanted_back = False
        return found

    async def get(self, name: str, size: int, make: Make) -> CachedBytes:
        """The bytes of this name, made by whoever asks first.

        ``size``: the most that they take. What is larger than the budget stays while somebody reads
        it. Raises NoRoom, and what ``make`` raises.
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
        """Begin to make what somebody will ask for, if it is neither there nor being made.

        Not if there is no room; nobody hears of errors: who asks will.
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
        """Keep what was made; retrieve an exception, which asyncio would log if all had gone."""
        del self._making[name]
        self._reserved -= size
        if not making.cancelled() and making.exception() is None:
            made = self._entries[name] = making.result()
            self.nbytes += made.data.nbytes

    def _want_back(self, size: int) -> None:
        """Have the readers of the oldest do without, as far as ``size`` more bytes need it."""
        left, room = self.nbytes, self._budget - self._reserved - size
        for cached in self._entries.values():
            if left <= room:
                return
            cached.is_wanted_back = True
            left -= cached.data.nbytes

    def tidy(self, size: int = 0) -> bool:
        """Drop the oldest that nobody reads, until ``size`` more bytes fit: whether they do."""
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
