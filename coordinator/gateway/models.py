"""Downloads of published models and of changes between them, whole or by byte range.

The source of a download is a copy of the model in memory, or Redis, chunk by chunk. A slow download
keeps a copy in memory for a long time. When another version needs the memory, the download
continues from Redis. A download for which memory has no room begins there. The number of downloads
that read from Redis is limited.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from fedstream.broker import blobs
from fedstream.broker.blobs import CHUNK
from fedstream.coordinator.gateway.byte_cache import ByteCache, CachedBytes, NoRoom
from fedstream.coordinator.gateway.changes import ModelChanges, NotWorthIt
from fedstream.coordinator.gateway.offers import model_format
from fedstream.coordinator.gateway.refusals import RETRY_S, Refusal
from fedstream.core.digest import DIGEST_PATTERN
from fedstream.core.errors import BlobDamaged, BlobMissing, FedstreamError
from fedstream.core.formats import format_of
from fedstream.core.layout import Payload
from fedstream.core.records import head_of
from fedstream.protocol import headers
from fedstream.protocol.messages import CHANGES_ROUTE
from fedstream.runtime.http import SLICE

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.coordinator.gateway.replica import RunCache
    from fedstream.coordinator.gateway.settings import GatewaySettings
    from fedstream.core.records import Head

_OF_A_DEVICE = 2  # concurrent downloads: one that was cut, and the next
_BYTES = "application/octet-stream"
_DIGEST = re.compile(DIGEST_PATTERN)
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")


class ModelCopies:
    """The requested models and changes, cached within two budgets."""

    def __init__(
        self, client: Client, keys: Keys, run_cache: RunCache, settings: GatewaySettings
    ) -> None:
        self._client = client
        self._keys = keys
        self._run_cache = run_cache
        self._most = settings.downloads
        self._redis_readers = RedisReaders(settings.redis_downloads)
        self._within_s = settings.chunk_s
        self._copies = ByteCache(settings.model_bytes)
        self._changes = ModelChanges(settings.changes_bytes)
        self.downloads = 0  # current downloads
        self._downloading: Counter[int] = Counter()  # current downloads by device

    @property
    def changes_bytes(self) -> int:
        """Bytes of changes in memory."""
        return self._changes.nbytes

    def changes_url(self, head: Head, has: str | None) -> str | None:
        """The URL of the changes for a device that has the model ``has``; None: no offer.

        An offer costs nothing, as the first request makes the changes.
        """
        if has is None or self._base(head, has) is None:
            return None
        self._changes.offer(has, head.given)
        return CHANGES_ROUTE.format(digest=head.given, has=has)

    def _base(self, head: Head, has: str) -> CachedBytes | None:
        """The copy of the device's model ``has``, if changes from it may save bytes."""
        unshared = self._run_cache.run.layout.unshared
        if has == head.given or (unshared is not None and has == unshared.digest):
            return None
        old = self._copies.there(has)
        if old is None or old.format != model_format(head):
            return None
        return old if self._changes.may_help(has, head.given) else None

    def prepare(self, head: Head) -> None:
        """Begin to read an offered model, before newer ones replace it in Redis."""
        size = self._size(head)
        self._copies.prepare(head.given, size, partial(self._read, head, size))

    async def get(self, request: web.Request, device: int) -> web.StreamResponse:
        """Answer GET and HEAD of a model. Raises Refusal."""
        head = await self._asked(request)
        about = _About(request, head.given, self._size(head), model_format(head))
        if not about.has_body:
            return await about.answer()
        with self._place(device), self._reading(head), await self._source(head) as source:
            return await about.send(source, self._within_s)

    async def get_changes(
        self, request: web.Request, device: int
    ) -> tuple[web.StreamResponse, int]:
        """Answer GET and HEAD of the changes since a model that the device has.

        Also returns how many bytes the changes save compared with the whole model; 0 for an answer
        with only a part of the changes, so that no saving counts twice. Raises Refusal.
        """
        head = await self._asked(request)
        with self._place(device):
            cached = await self._changed(head, request.match_info["has"])
            size = cached.data.nbytes
            about = _About(request, cached.digest, size, cached.format)
            with ModelSource(cached) as source:
                response = await about.send(source, self._within_s)
        is_all = about.is_whole and request.method == "GET"
        return response, self._size(head) - size if is_all else 0

    async def _changed(self, head: Head, has: str) -> CachedBytes:
        """Get the changes since the model ``has``. Raises Refusal.

        Changes are made only to the newest version or to an offered one: otherwise devices could
        request any pair of models.
        """
        if (made := self._changes.there(has, head.given)) is not None:
            return made
        is_newest = head.given == self._run_cache.head.given
        if not is_newest and not self._changes.is_offered(has, head.given):
            raise _no_changes()
        if self._base(head, has) is None:
            raise _no_changes()
        try:
            with self._reading(head):
                new = await self._copy(head)
        except NoRoom as error:
            raise _no_changes() from error
        if (old := self._copies.there(has)) is None:
            raise _no_changes()
        try:
            with old.read(), new.read():
                return await self._changes.get(old, new, self._run_cache.run.layout)
        except NotWorthIt as error:
            raise _no_changes() from error

    async def _asked(self, request: web.Request) -> Head:
        """The version whose model a request names, or the unshared values. Raises Refusal."""
        digest = request.match_info["digest"]
        unshared = self._run_cache.run.layout.unshared
        if unshared is not None and digest == unshared.digest:
            return head_of(unshared)
        head = await self._run_cache.version_of(digest) if _DIGEST.fullmatch(digest) else None
        if head is None:
            raise _superseded(digest)
        return head

    @contextmanager
    def _place(self, device: int) -> Iterator[None]:
        """Count a download inside the block. Raises Refusal above a limit."""
        if self.downloads >= self._most:
            raise _busy(f"{self._most} downloads are in progress")
        if self._downloading[device] >= _OF_A_DEVICE:
            raise _busy(f"{_OF_A_DEVICE} downloads of this device are in progress")
        self.downloads += 1
        self._downloading[device] += 1
        try:
            yield
        finally:
            self.downloads -= 1
            self._downloading[device] -= 1
            if not self._downloading[device]:
                del self._downloading[device]
            self._copies.tidy()
            self._changes.tidy()

    @contextmanager
    def _reading(self, head: Head) -> Iterator[None]:
        """Turn errors of the block, which reads a version's model, into Refusal."""
        try:
            yield
        except BlobMissing as error:
            self._run_cache.forget(head.given)
            raise _superseded(head.given) from error
        except BlobDamaged as error:
            raise Refusal(
                503,
                "unavailable",
                "this model can't be read now: check in again",
                retry_after_s=RETRY_S,
            ) from error

    async def _source(self, head: Head) -> ModelSource:
        """The source of a version's model: memory, or Redis if memory has no room.

        Raises Refusal, BlobMissing, BlobDamaged.
        """
        size = self._size(head)
        seekable = head.chunks in (None, blobs.chunks_of(size))  # this release's chunks
        readers = self._redis_readers
        stored = InRedis(partial(self._chunk, head, size), readers) if seekable else None
        try:
            return ModelSource(await self._copy(head), stored)
        except NoRoom as error:
            if stored is None or not readers.has_room:
                raise _busy("others are read, and there is no room for one more model") from error
            return ModelSource(None, stored)

    async def _copy(self, head: Head) -> CachedBytes:
        """The copy of a version's model; the first request reads it from Redis.

        Raises NoRoom, BlobMissing, BlobDamaged.
        """
        size = self._size(head)
        return await self._copies.get(head.given, size, partial(self._read, head, size))

    async def _chunk(self, head: Head, size: int, number: int) -> bytes:
        key = self._keys.model(head.blob)
        return await blobs.read_chunk(self._client, key, number, size, encoded=head.encoded)

    async def _read(self, head: Head, size: int) -> CachedBytes:
        """Read a published blob without decoding it, and check its digest if possible.

        The digest of a compressed model covers the decompressed bytes, so devices check it.
        """
        payload = Payload.empty(size)
        compressed = head.encoded is not None and format_of(head.encoded.format).zstd
        await blobs.read(
            self._client,
            self._keys.model(head.blob),
            payload,
            digest=None if compressed else head.given,
            chunks=head.chunks,
            encoded=head.encoded,
        )
        return CachedBytes(payload.buffer.data.toreadonly(), head.given, model_format(head))

    def _size(self, head: Head) -> int:
        return head.encoded.size if head.encoded else self._run_cache.run.layout.nbytes


class RedisReaders:
    """A limit on the downloads that read from Redis, as the updater needs Redis too."""

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


class _About:
    """A request for bytes or a range of them, and its answer."""

    def __init__(self, request: web.Request, digest: str, size: int, format_: str) -> None:
        """Raises Refusal for an unsatisfiable range."""
        self._request = request
        tag = f'"{digest}"'
        self._headers = {
            hdrs.ETAG: tag,
            hdrs.CACHE_CONTROL: "private, max-age=31536000, immutable",
            hdrs.ACCEPT_RANGES: "bytes",
            headers.FORMAT: format_,
        }
        self.status, self._begin, self._end, self._size = 200, 0, size, size
        known = request.headers.get(hdrs.IF_NONE_MATCH)
        if known is not None and (known.strip() == "*" or tag in known):
            self.status = 304
            return
        asked = request.headers.get(hdrs.RANGE) if request.method == "GET" else None
        if asked is None or request.headers.get(hdrs.IF_RANGE, tag) != tag:
            return
        if (part := byte_range(asked, size)) is not None:
            self.status, (self._begin, self._end) = 206, part
            self._headers[hdrs.CONTENT_RANGE] = f"bytes {part[0]}-{part[1] - 1}/{size}"

    @property
    def has_body(self) -> bool:
        """Whether the answer has any of the bytes."""
        return self.status != 304 and self._request.method != "HEAD"

    @property
    def is_whole(self) -> bool:
        """Whether the answer has all bytes."""
        return self.status != 304 and (self._begin, self._end) == (0, self._size)

    async def answer(self) -> web.StreamResponse:
        """Answer without a body: HEAD, or a client that has the bytes."""
        if self.status == 304:
            return web.Response(status=304, headers=self._headers)
        response = self._response(self._size)
        await response.prepare(self._request)
        await response.write_eof()
        return response

    async def send(self, source: ModelSource, within_s: float) -> web.StreamResponse:
        """Send the requested bytes, each MiB within ``within_s``. Raises as the source does."""
        if not self.has_body:
            return await self.answer()
        response = self._response(self._end - self._begin)
        await send(self._request, response, source, self._begin, self._end, within_s=within_s)
        return response

    def _response(self, size: int) -> web.StreamResponse:
        response = web.StreamResponse(status=self.status, headers=self._headers)
        response.content_type, response.content_length = _BYTES, size
        return response


def byte_range(asked: str, size: int) -> tuple[int, int] | None:
    """Parse a Range header; return (begin, end), or None for all bytes and several ranges.

    Raises Refusal (416) for an unsatisfiable range.
    """
    found = _RANGE.fullmatch(asked.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if found[1]:
        begin = int(found[1])
        end = int(found[2]) + 1 if found[2] else max(size, begin + 1)
        if end <= begin:
            return None  # an invalid header is ignored (RFC 9110, 14.1.1)
    else:
        begin, end = max(0, size - int(found[2])), size
    if begin >= size:
        raise Refusal(
            416,
            "range",
            f"the model has {size} bytes",
            headers={hdrs.CONTENT_RANGE: f"bytes */{size}"},
        )
    return begin, min(end, size)


def _superseded(digest: str) -> Refusal:
    return Refusal(
        404, "superseded", f"model {digest[:64]!r} is not among the newest: check in again"
    )


def _no_changes() -> Refusal:
    return Refusal(404, "no changes", "there are none that are smaller: download the model")


def _busy(why: str) -> Refusal:
    return Refusal(503, "busy", f"{why}: try again later", retry_after_s=RETRY_S)
