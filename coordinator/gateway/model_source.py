"""The source of a download: a copy of the model in memory, or Redis, chunk by chunk.

A slow download keeps a copy in memory for a long time. When another version needs the memory, the
download continues from Redis. A download for which memory has no room begins there. The number of
downloads that read from Redis is limited.
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
    """A limit on the downloads that read from Redis, which the updater needs too."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.now = 0

    @property
    def has_room(self) -> bool:
        """Whether one more download may read from Redis."""
        return self.now < self._most

    @contextmanager
    def place(self) -> Iterator[None]:
        """Count a download inside the block. There must be room."""
        self.now += 1
        try:
            yield
        finally:
            self.now -= 1


@dataclass(frozen=True)
class InRedis:
    """A model in Redis, readable from any chunk on."""

    chunk: Callable[[int], Awaitable[bytes]]  # reads a chunk; all but the last have the same length
    readers: RedisReaders


class ModelSource:
    """The bytes for one download, available inside a ``with`` block."""

    def __init__(self, cached: CachedBytes | None, stored: InRedis | None = None) -> None:
        """``cached``: the copy in memory; None: read from Redis, which needs room for one more
        reader. ``stored``: the model in Redis; None if it can't be read there. One must be given.
        """
        self._cached = cached
        self._stored = stored
        self._until = ExitStack()
        self._data = memoryview(b"")
        self._begin = 0  # offset of that chunk

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
        """The next bytes from ``begin``, at most up to ``end``. Raises BlobMissing, BlobDamaged."""
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
    """Send the bytes from ``begin`` to ``end``, each MiB within ``within_s``, or abort.

    Raises the errors of :meth:`ModelSource.piece` before the first byte is sent, and
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
                del piece  # a view of the copy, which may have to be freed
                piece = await source.piece(begin, end)
        await response.write_eof()
    except (TimeoutError, FedstreamError) as error:  # or the version was deleted
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(str(error)) from error
