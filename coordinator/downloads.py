"""Model downloads over HTTP: each model is in memory once for any number of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from weakref import WeakValueDictionary

from aiohttp import web
from safetensors import numpy as safetensors

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.published import read_model, with_unshared
from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Layout, Model
from fedstream.runtime.http import SLICE

_MODELS = 2  # distinct models in memory: a new version may come during a download


class Busy(FedstreamError):
    """The limit on downloads is reached; try again later."""

    retriable = True


class _Body:
    """A model as safetensors, kept only while a client downloads it."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data


class Downloads:
    """At most ``most`` downloads at a time, of at most two different models."""

    def __init__(self, client: Client, keys: Keys, most: int) -> None:
        self._client = client
        self._keys = keys
        self._most = most
        self._now = 0
        self._bodies: WeakValueDictionary[str, _Body] = WeakValueDictionary()
        self._making: dict[str, asyncio.Task[_Body]] = {}
        self._turn = asyncio.Lock()

    @contextmanager
    def place(self) -> Iterator[None]:
        """Hold one of the download slots inside the block. Raises Busy."""
        if self._now >= self._most:
            raise Busy(f"{self._most} downloads are in progress: try again later")
        self._now += 1
        try:
            yield
        finally:
            self._now -= 1

    async def body(self, layout: Layout, version: int, blob: str, digest: str) -> _Body:
        """Get a model, sharing an existing copy or a load under way.

        Raises Busy, BlobMissing, BlobDamaged.
        """
        if (body := self._bodies.get(digest)) is not None:
            return body
        making = self._making.get(digest)
        if making is None:
            making = asyncio.create_task(self._made(layout, version, blob, digest))
            making.add_done_callback(partial(self._is_made, digest))
            self._making[digest] = making
        return await asyncio.shield(making)

    def _is_made(self, digest: str, making: asyncio.Task[_Body]) -> None:
        """Retrieve a load's exception, which asyncio would log if no client were left."""
        del self._making[digest]
        if not making.cancelled():
            making.exception()

    async def _made(self, layout: Layout, version: int, blob: str, digest: str) -> _Body:
        """Read and check a model; one model at a time, as this briefly takes several copies."""
        async with self._turn:
            if len(self._bodies) >= _MODELS:
                raise Busy(f"{_MODELS} other versions are being read: try again later")
            model = Model(await with_unshared(self._client, self._keys, layout))
            key = self._keys.model(blob)
            chunks, encoded = await blobs.stated(self._client, key)
            await read_model(
                self._client, key, model, digest=digest, chunks=chunks, encoded=encoded
            )
            made = await asyncio.to_thread(
                safetensors.save,
                model.tensors(),
                {"version": str(version), "format": encoded.format if encoded else "f32"},
            )
            body = self._bodies[digest] = _Body(made)
            return body


async def send(
    request: web.Request, data: memoryview, headers: dict[str, str], status: int = 200
) -> web.StreamResponse:
    """Send bytes in slices as the client reads them. The connection aborts slow clients."""
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = "application/octet-stream"
    response.content_length = len(data)
    await response.prepare(request)
    if request.method != "HEAD":
        for at in range(0, len(data), SLICE):
            await response.write(data[at : at + SLICE])
    await response.write_eof()
    return response
