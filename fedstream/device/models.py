"""Downloading an offered model, or the changes since the model in the folder.

Downloads go into a file, resume where they were cut, and are checked by the model's digest.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.core import changes
from fedstream.core.digest import algorithm_of, digest_of
from fedstream.core.errors import BlobDamaged, FedstreamError, Unavailable, Undecodable
from fedstream.core.formats import format_of
from fedstream.core.given import decode, inside, room_for
from fedstream.core.layout import Layout, Model, Payload
from fedstream.core.messages import Encoded
from fedstream.device.connection import NotNow, Reply, replied
from fedstream.device.gateway import TOKEN
from fedstream.protocol.headers import as_bearer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import aiohttp

    from fedstream.device.gateway import OwnGateway
    from fedstream.protocol.messages import OfferedModel

ModelBytes: TypeAlias = npt.NDArray[np.uint8]

SUPERSEDED = "superseded"  # reason of a refusal
_PIECE = 1 << 18  # bytes
_PART = ".part"  # ending of a file that isn't complete
_MOST_BAD = 3  # failed downloads of changes before whole models are preferred
_RANGE = re.compile(r"bytes ([0-9]{1,15})-[0-9]{1,15}/([0-9]{1,15})")


class Superseded(FedstreamError):
    """The offered model is gone, because there is a newer one: check in again."""


class _NoChanges(FedstreamError):
    """The gateway has no changes that are smaller than the model."""


class ModelStore:
    """The newest downloaded model, in a folder, by digest."""

    def __init__(
        self,
        gateway: OwnGateway,
        folder: Path,
        say: Callable[[str], None],
        show: Callable[[str], None],
    ) -> None:
        """``say``: called with a line about an error, ``show``: with a short status."""
        self._gateway = gateway
        self._folder = folder
        self._say = say
        self._show = show
        self.bad_changes = 0  # downloads of changes that did not give the offered model

    @property
    def has(self) -> str | None:
        """The digest of the model in the folder."""
        return next((one.name for one in self._folder.iterdir() if one.suffix != _PART), None)

    async def model(self, offered: OfferedModel, layout: Layout) -> Model:
        """The offered model, downloaded if necessary.

        Raises Superseded; BlobDamaged for an impossible size, before downloading, or a wrong
        digest; Unavailable if this release can't read the format.
        """
        encoded = Encoded(offered.format, offered.size, offered.digest)
        room_for(encoded, layout)
        plain = _uncompressed(encoded, layout)
        data = await asyncio.to_thread(self._kept, plain, layout)
        if data is None:
            data = await self._changed(offered, plain, layout)
        if data is None:
            data = await self._whole(offered, encoded, layout)
        return await asyncio.to_thread(_model, data, plain, layout)

    def _kept(self, plain: Encoded, layout: Layout) -> ModelBytes | None:
        """A model's bytes from its file; None if missing or damaged."""
        file = self._folder / plain.digest
        try:
            return _read(file, plain, layout)
        except FileNotFoundError:
            return None
        except BlobDamaged:
            file.unlink()
            return None

    async def _changed(
        self, offered: OfferedModel, plain: Encoded, layout: Layout
    ) -> ModelBytes | None:
        """The offered model, made from the model in the folder and changes; None if impossible."""
        old = self.has
        if offered.changes is None or old is None or self.bad_changes >= _MOST_BAD:
            return None
        part = _Part(self._folder / f"{offered.digest}.changes{_PART}")
        try:
            while not part.is_whole:
                await self._ask(offered.changes, part, most=offered.size)
            data = await asyncio.to_thread(_applied, self._folder / old, part.path, plain)
        except _NoChanges:
            return None
        except (BlobDamaged, Undecodable) as error:
            self.bad_changes += 1
            self._say(f"what changed in the model can't be used: {error}; downloading all of it")
            return None
        finally:
            part.drop()
        await asyncio.to_thread(self._keep, data, plain)
        return data

    async def _whole(self, offered: OfferedModel, encoded: Encoded, layout: Layout) -> ModelBytes:
        """The offered whole model, resuming an earlier download."""
        part = _Part(self._folder / f"{offered.digest}{_PART}", f'"{offered.digest}"', offered.size)
        self._clear(but=part.path)
        while not part.is_whole:
            await self._ask(offered.url, part, most=offered.size)
        try:
            data = await asyncio.to_thread(_read, part.path, encoded, layout)
        except (BlobDamaged, Unavailable):
            part.drop()
            raise
        if format_of(encoded.format).zstd:
            await asyncio.to_thread(self._keep, data, encoded)
        else:
            part.path.replace(self._folder / offered.digest)
        return data

    def _keep(self, data: ModelBytes, encoded: Encoded) -> None:
        """Write a model's bytes into its file, and delete all others."""
        aside = self._folder / f".{encoded.digest}{_PART}"
        aside.write_bytes(data.data)
        self._clear(but=aside)
        aside.replace(self._folder / encoded.digest)

    def _clear(self, but: Path) -> None:
        """Delete all models and partial downloads except ``but``."""
        for one in self._folder.iterdir():
            if one != but:
                one.unlink()

    async def _ask(self, path: str, part: _Part, *, most: int) -> None:
        """Request the missing bytes of a file once, and write at most ``most`` bytes."""
        connection = self._gateway.connection
        try:
            headers = {"Authorization": as_bearer(await self._gateway.token())}
            if part.have:
                headers |= {"Range": f"bytes={part.have}-", "If-Range": part.tag}
            async with connection.opened("GET", path, headers=headers) as response:
                if response.status in (200, 206):
                    await self._write(response, part, most)
                    connection.settled()
                else:
                    await self._refused(await replied(response, "the model"), part)
        except NotNow as error:
            await connection.wait(error)

    async def _write(self, response: aiohttp.ClientResponse, part: _Part, most: int) -> None:
        """Append an answer's bytes to the file, or replace it.

        Raises NotNow if the bytes don't continue the file, BlobDamaged for changes above ``most``
        bytes.
        """
        if response.status == 200:
            part.drop()
            if not part.is_model:
                length = response.content_length
                if length is None or not 0 < length <= most:
                    raise BlobDamaged(
                        f"the gateway announced {length} bytes of changes, for a model of {most} "
                        "bytes"
                    )
                part.size, part.tag = length, response.headers.get("ETag", "")
        elif _bounds(response) != (part.have, part.size):
            part.drop()
            raise NotNow("the gateway sent another range of the model than was asked for")
        async for piece in response.content.iter_chunked(_PIECE):
            if part.have + len(piece) > part.size:
                part.drop()
                raise NotNow("the gateway sent more bytes of the model than announced")
            await asyncio.to_thread(part.append, piece)
            self._show(f"downloading the model: {part.have / part.size:.0%}")

    async def _refused(self, reply: Reply, part: _Part) -> None:
        refusal = reply.refusal("the model")
        if reply.status == 404 and refusal.reason == SUPERSEDED:
            raise Superseded(str(refusal))
        if reply.status == 404 and not part.is_model:  # for any reason: the whole model is left
            raise _NoChanges(str(refusal))
        if reply.status == 401 and refusal.reason == TOKEN:
            await self._gateway.token(fresh=True)
        elif reply.status == 416:  # the file is no beginning of the model
            part.drop()
            raise NotNow(str(refusal))
        else:
            raise refusal


class _Part:
    """A partial download."""

    def __init__(self, path: Path, tag: str = "", size: int = 0) -> None:
        """``tag``, ``size``: a model's ETag and bytes; for changes, from the first answer."""
        self.path = path
        self.is_model = size > 0
        self.tag = tag  # ETag of the whole
        self.size = size  # bytes of the whole; 0: not known yet
        self.have = path.stat().st_size if path.exists() else 0
        if self.have > size:
            self.drop()

    @property
    def is_whole(self) -> bool:
        """Whether the file has all bytes."""
        return 0 < self.size == self.have

    def append(self, piece: bytes) -> None:
        """Add bytes at the end."""
        with self.path.open("ab") as file:
            file.write(piece)
        self.have += len(piece)

    def drop(self) -> None:
        """Delete what has been downloaded so far."""
        self.path.unlink(missing_ok=True)
        self.have = 0


def _bounds(response: aiohttp.ClientResponse) -> tuple[int, int] | None:
    """The begin of the sent range and the whole size, from Content-Range; None if invalid."""
    found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return None if found is None else (int(found[1]), int(found[2]))


def _uncompressed(encoded: Encoded, layout: Layout) -> Encoded:
    """The description of a compressed model's decompressed bytes."""
    how = format_of(encoded.format)
    if not how.zstd:
        return encoded
    how = replace(how, zstd=False)
    return Encoded(how.name, how.sizes(layout)[1], encoded.digest)


def _read(file: Path, encoded: Encoded, layout: Layout) -> ModelBytes:
    """The bytes that a model's digest covers. Raises BlobDamaged, Unavailable, OSError."""
    payload = room_for(encoded, layout)
    with file.open("rb") as source:
        got = source.readinto(payload.buffer.data)
        if got != encoded.size or source.read(1):
            raise BlobDamaged(f"the model's file has another size than {encoded.size} bytes")
    if format_of(encoded.format).zstd:
        try:
            return inside(payload, encoded, layout)
        except Undecodable as error:
            raise Unavailable(f"the published model can't be decoded: {error}") from error
    if (own := payload.digest_like(encoded.digest)) != encoded.digest:
        raise BlobDamaged(f"the model's bytes have digest {own}, not {encoded.digest}")
    return payload.buffer


def _applied(old: Path, frame: Path, plain: Encoded) -> ModelBytes:
    """Apply changes; return the newer model's bytes. Raises BlobDamaged, Undecodable."""
    before = np.frombuffer(old.read_bytes(), np.uint8)
    if before.size != plain.size:
        raise BlobDamaged(f"the downloaded model has {before.size} bytes, not {plain.size}")
    sent = np.frombuffer(frame.read_bytes(), np.uint8)
    data = changes.decode(before, sent, changes.width_of(format_of(plain.format).kind))
    if (own := digest_of(data.data, algorithm_of(plain.digest))) != plain.digest:
        raise BlobDamaged(f"the changes give a model with digest {own}, not {plain.digest}")
    return data


def _model(data: ModelBytes, plain: Encoded, layout: Layout) -> Model:
    """Decode a model's bytes. Raises Unavailable."""
    if format_of(plain.format).is_plain and data.flags.writeable:
        return Model(layout, data)
    model = Model(layout)
    decode(Payload(data), plain, model)
    return model
