"""One download's way through a model: from memory, or from Redis, a chunk at a time.

Whoever reads slowly keeps a copy in memory for long. Once its room is wanted for another version,
he goes on with what Redis has, and so does who finds no room for what he asks for: both only while
there is room for one more who reads from Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstream.broker.blobs import CHUNK
from fedstream.core.errors import FedstreamError
from fedstream.runtime.http import SLICE

if TYPE_CHECKING:
    from aiohttp import web

    from fedstream.coordinator.gateway.byte_cache import CachedBytes


class RedisReaders:
    """The downloads that read from Redis, which the updater needs too: at most so many."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.now = 0

    @property
    def has_room(self) -> bool:
        """Whether one more may."""
        return self.now < self._most

    @contextmanager
    def place(self) -> Iterator[None]:
        """One of them inside the block. There has to be room."""
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


@dataclass(frozen=True)
class InRedis:
    """A model that can be read from Redis from any chunk on."""

    chunk: Callable[[int], Awaitable[bytes]]  # reads one; all but the last have the same length
    readers: RedisReaders


class ModelSource:
    """The bytes for one download, as a context manager inside which they stay."""

    def __init__(self, cached: CachedBytes | None, stored: InRedis | None = None) -> None:
        """``cached``: the copy in memory; None: it is read from Redis, where there is room for one
        more reader. ``stored``: None if it can't be read there. One of the two is there.
        """
        self._cached = cached
        self._stored = stored
        self._until = ExitStack()
        self._data = memoryview(b"")
        self._begin = 0  # of that chunk

    def __enter__(self) -> ModelSource:
        if self._cached is not None:
            self._data = self._until.enter_context(self._cached.read())
        else:
            self._read_from_redis()
        return self

    def __exit__(self, *_error: object) -> None:
        self._data = memoryview(b"")
        self._until.close()

    async def piece(self, begin: int, end: int) -> memoryview:
        """Some bytes from ``begin`` on, and before ``end``. Raises BlobMissing, BlobDamaged."""
        cached, stored = self._cached, self._stored
        if cached is not None and cached.is_wanted_back and stored and stored.readers.has_room:
            self._cached, self._data = None, memoryview(b"")
            self._until.close()
            self._read_from_redis()
        end = min(end, begin + SLICE)
        if self._cached is None:
            assert stored is not None  # noqa: S101  (one of the two is there)
            if not self._begin <= begin < self._begin + len(self._data):
                self._begin, self._data = begin - begin % CHUNK, memoryview(b"")  # one at a time
                self._data = memoryview(await stored.chunk(begin // CHUNK))
        return self._data[begin - self._begin : end - self._begin]

    def _read_from_redis(self) -> None:
        assert self._stored is not None  # noqa: S101  (one of the two is there)
        self._until.enter_context(self._stored.readers.place())


async def send(
    request: web.Request,
    response: web.StreamResponse,
    source: ModelSource,
    begin: int,
    end: int,
    *,
    within_s: float,
) -> None:
    """Send these bytes, each MiB within so many seconds, or cut the connection.

    Raises what :meth:`ModelSource.piece` does, as long as nothing has been sent, and
    ConnectionError.
    """
    loop = asyncio.get_running_loop()
    piece = await source.piece(begin, end)
    await response.prepare(request)
    try:
        until, due = loop.time() + within_s, begin + CHUNK
        while begin < end:
            async with asyncio.timeout_at(until):
                await response.write(piece)
            begin += len(piece)
            if begin >= due:
                until, due = loop.time() + within_s, begin + CHUNK
            if begin < end:
                del piece  # of the copy that may be wanted back
                piece = await source.piece(begin, end)
        await response.write_eof()
    except (TimeoutError, FedstreamError) as error:  # too slow; or the version has gone meanwhile
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(str(error)) from error
