"""Published models for devices: one copy in memory, however many read it, in whole or in part."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from fedstream.broker import blobs
from fedstream.broker.errors import BlobDamaged, BlobMissing
from fedstream.broker.layout import Payload
from fedstream.coordinator.downloads import send
from fedstream.coordinator.gateway.offers import model_format
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.protocol import headers
from fedstream.wire import format_of

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.broker.records import Head
    from fedstream.coordinator.gateway.current import Current
    from fedstream.coordinator.gateway.settings import GatewaySettings

_RETRY_S = 2.0
_OF_A_DEVICE = 2  # downloads at once: one that was cut, and the next
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")


class _Copy:
    """A model's bytes as published, and how many read them now."""

    __slots__ = ("data", "readers")

    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.readers = 0


class ModelCopies:
    """The newest models that were asked for, up to a budget of bytes."""

    def __init__(
        self, client: Client, keys: Keys, current: Current, settings: GatewaySettings
    ) -> None:
        self._client = client
        self._keys = keys
        self._current = current
        self._most = settings.downloads
        self._budget = settings.model_bytes
        self._copies: dict[str, _Copy] = {}  # by digest, least recently asked for first
        self._making: dict[str, asyncio.Task[_Copy]] = {}
        self._reserved = 0  # bytes of those that are being made
        self.downloads = 0  # now
        self._downloading: Counter[int] = Counter()  # downloads of each device, now

    async def get(self, request: web.Request, device: int) -> web.StreamResponse:
        """Answer GET and HEAD of a device. Raises Refusal."""
        digest = request.match_info["digest"]
        head = await self._current.version_of(digest) if _DIGEST.fullmatch(digest) else None
        if head is None:
            raise _superseded(digest)
        tag = f'"{digest}"'
        about = {
            hdrs.ETAG: tag,
            hdrs.CACHE_CONTROL: "private, max-age=31536000, immutable",
            hdrs.ACCEPT_RANGES: "bytes",
            headers.FORMAT: model_format(head),
        }
        known = request.headers.get(hdrs.IF_NONE_MATCH)
        if known is not None and (known.strip() == "*" or tag in known):
            return web.Response(status=304, headers=about)
        size = self._size(head)
        part: tuple[int, int] | None = None
        asked = request.headers.get(hdrs.RANGE)
        if asked is not None and request.headers.get(hdrs.IF_RANGE, tag) == tag:
            part = byte_range(asked, size) if request.method == "GET" else None
        begin, end = part or (0, size)
        if part is not None:
            about[hdrs.CONTENT_RANGE] = f"bytes {begin}-{end - 1}/{size}"
        if request.method == "HEAD":
            response = web.StreamResponse(headers=about)
            response.content_type, response.content_length = "application/octet-stream", size
            await response.prepare(request)
            await response.write_eof()
            return response
        status = 200 if part is None else 206
        return await self._send(request, device, head, (begin, end), about, status)

    async def _send(
        self,
        request: web.Request,
        device: int,
        head: Head,
        part: tuple[int, int],
        about: dict[str, str],
        status: int,
    ) -> web.StreamResponse:
        if self.downloads >= self._most:
            raise _busy(f"{self._most} downloads are in progress")
        if self._downloading[device] >= _OF_A_DEVICE:
            raise _busy(f"{_OF_A_DEVICE} downloads of this device are in progress")
        self.downloads += 1
        self._downloading[device] += 1
        try:
            copy = await self._copy(head)
            copy.readers += 1
            try:
                return await send(request, copy.data[slice(*part)], about, status)
            finally:
                copy.readers -= 1
                self._make_room(0)
        finally:
            self.downloads -= 1
            self._downloading[device] -= 1
            if not self._downloading[device]:
                del self._downloading[device]

    async def _copy(self, head: Head) -> _Copy:
        """The copy of a version's model; read from Redis by whoever asks first."""
        digest = head.given
        if (copy := self._copies.pop(digest, None)) is not None:
            self._copies[digest] = copy
            return copy
        making = self._making.get(digest)
        if making is None:
            size = self._size(head)
            if not self._make_room(size) and (self._making or self._copies):
                raise _busy("other models are being read, and there is no room for one more")
            self._reserved += size
            making = asyncio.create_task(self._read(head, size), name="read model")
            making.add_done_callback(partial(self._made, digest, size))
            self._making[digest] = making
        try:
            return await asyncio.shield(making)
        except BlobMissing as error:
            self._current.forget(digest)
            raise _superseded(digest) from error
        except BlobDamaged as error:
            raise Refusal(
                503, "unavailable", "this model can't be read now: check in again",
                retry_after_s=_RETRY_S,
            ) from error  # fmt: skip

    def _made(self, digest: str, size: int, making: asyncio.Task[_Copy]) -> None:
        """Keep what was read; retrieve an exception, which asyncio would log if all had gone."""
        del self._making[digest]
        self._reserved -= size
        if not making.cancelled() and making.exception() is None:
            self._copies[digest] = making.result()

    async def _read(self, head: Head, size: int) -> _Copy:
        """Read a published blob as it is, and check it as far as its digest is that of its bytes.

        The digest of a compressed model is that of what is inside: devices check it.
        """
        payload = Payload.empty(size)
        compressed = head.encoded is not None and format_of(head.encoded.format).zstd
        await blobs.read(
            self._client, self._keys.model(head.blob), payload,
            digest=None if compressed else head.given, chunks=head.chunks, encoded=head.encoded,
        )  # fmt: skip
        return _Copy(payload.buffer.data.toreadonly())

    def _make_room(self, size: int) -> bool:
        """Drop the oldest copies that nobody reads, until ``size`` more fit: whether they do."""
        used = self._reserved + sum(copy.data.nbytes for copy in self._copies.values())
        for digest, copy in tuple(self._copies.items()):
            if used + size <= self._budget:
                return True
            if not copy.readers:
                del self._copies[digest]
                used -= copy.data.nbytes
        return used + size <= self._budget

    def _size(self, head: Head) -> int:
        return head.encoded.size if head.encoded else self._current.run.layout.nbytes


def byte_range(asked: str, size: int) -> tuple[int, int] | None:
    """The bytes from and up to which a Range header asks for; None: all, as for several ranges.

    Raises Refusal (416) if there are none of them.
    """
    found = _RANGE.fullmatch(asked.strip())
    if found is None or not (found[1] or found[2]):
        return None
    if found[1]:
        begin = int(found[1])
        end = int(found[2]) + 1 if found[2] else max(size, begin + 1)
        if end <= begin:
            return None  # not valid, and so to be ignored (RFC 9110, 14.1.1)
    else:
        begin, end = max(0, size - int(found[2])), size
    if begin >= size:
        raise Refusal(
            416, "range", f"the model has {size} bytes",
            headers={hdrs.CONTENT_RANGE: f"bytes */{size}"},
        )  # fmt: skip
    return begin, min(end, size)


def _superseded(digest: str) -> Refusal:
    return Refusal(
        404, "superseded", f"model {digest[:64]!r} is not among the newest: check in again"
    )


def _busy(why: str) -> Refusal:
    return Refusal(503, "busy", f"{why}: try again later", retry_after_s=_RETRY_S)
