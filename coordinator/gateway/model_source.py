"""One download's way through a model: from memory, or from Redis, a chunk at a time.

Whoever reads slowly keeps a copy in memory for long. Once its room is wanted for another version,
he goes on with what Redis has, and so does who finds no room for what he asks for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from fedstream.broker.blobs import CHUNK
from fedstream.broker.errors import FedstreamError

if TYPE_CHECKING:
    from aiohttp import web

    from fedstream.coordinator.gateway.shelf import Volume

SLICE = 1 << 18  # bytes written to a connection at once, and so held up by a slow reader


class ModelSource:
    """The bytes for one download, as a context manager inside which they stay."""

    def __init__(
        self, volume: Volume | None, chunk: Callable[[int], Awaitable[bytes]] | None = None
    ) -> None:
        """``volume``: the copy in memory. ``chunk``: reads one from Redis, all of them of the same
        length but the last; None: not possible. One of the two is there.
        """
        self._volume = volume
        self._chunk = chunk
        self._until = ExitStack()
        self._data = memoryview(b"")
        self._begin = 0  # of that chunk

    def __enter__(self) -> ModelSource:
        if self._volume is not None:
            self._data = self._until.enter_context(self._volume.read())
        return self

    def __exit__(self, *_error: object) -> None:
        self._data = memoryview(b"")
        self._until.close()

    async def piece(self, begin: int, end: int) -> memoryview:
        """Some bytes from ``begin`` on, and before ``end``. Raises BlobMissing, BlobDamaged."""
        if self._volume is not None and self._volume.is_wanted_back and self._chunk is not None:
            self._volume, self._data = None, memoryview(b"")
            self._until.close()
        end = min(end, begin + SLICE)
        if self._volume is None:
            assert self._chunk is not None  # noqa: S101  (one of the two is there)
            if not self._begin <= begin < self._begin + len(self._data):
                self._begin, self._data = begin - begin % CHUNK, memoryview(b"")  # one at a time
                self._data = memoryview(await self._chunk(begin // CHUNK))
        return self._data[begin - self._begin : end - self._begin]


async def send(
    request: web.Request, response: web.StreamResponse, source: ModelSource, begin: int, end: int,
    *, within_s: float,
) -> None:  # fmt: skip
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
