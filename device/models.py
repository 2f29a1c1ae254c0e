"""Downloading the model of an offer: into a file, from where it was cut, checked by its digest."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING

from fedstream.broker.encoded import Encoded
from fedstream.broker.errors import BlobDamaged, FedstreamError
from fedstream.broker.layout import Layout, Model
from fedstream.device.connection import Reply, replied
from fedstream.device.errors import NotNow
from fedstream.device.gateway import TOKEN
from fedstream.protocol.headers import as_bearer
from fedstream.wire import format_of
from fedstream.wire.given import decode, room_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import aiohttp

    from fedstream.device.gateway import OwnGateway
    from fedstream.protocol.messages import OfferedModel

SUPERSEDED = "superseded"  # reason of a refusal
_PIECE = 1 << 18  # bytes
_PART = ".part"  # ending of a file that isn't complete
_RANGE = re.compile(r"bytes ([0-9]{1,15})-[0-9]{1,15}/([0-9]{1,15})")


class Superseded(FedstreamError):
    """The offered model is gone, because there is a newer one: check in again."""


class ModelStore:
    """The newest model that was downloaded, in a folder, by its digest."""

    def __init__(self, gateway: OwnGateway, folder: Path, show: Callable[[str], None]) -> None:
        """``show`` gets what is going on, in a few words."""
        self._gateway = gateway
        self._folder = folder
        self._show = show

    @property
    def has(self) -> str | None:
        """The digest of the model that is there."""
        return next((one.name for one in self._folder.iterdir() if one.suffix != _PART), None)

    async def model(self, offered: OfferedModel, layout: Layout) -> Model:
        """The offered model, downloaded if it isn't there.

        Raises Superseded; BlobDamaged if no model has that size, before anything is downloaded, or
        if the bytes are not those of the digest; Unavailable if this release can't read the format.
        """
        encoded = Encoded(offered.format, offered.size, offered.digest)
        room_for(encoded, layout)
        file = self._folder / offered.digest
        if (found := await asyncio.to_thread(_kept, file, encoded, layout)) is not None:
            return found
        part = _Part(file.with_suffix(_PART), offered.size)
        self._clear(but=part.path)
        while part.have < offered.size:
            await self._ask(offered, part)
        try:
            found = await asyncio.to_thread(_load, part.path, encoded, layout)
        except BlobDamaged:
            part.drop()
            raise
        part.path.replace(file)
        return found

    def _clear(self, but: Path) -> None:
        """Delete all models, also parts of them, except this file."""
        for one in self._folder.iterdir():
            if one != but:
                one.unlink()

    async def _ask(self, offered: OfferedModel, part: _Part) -> None:
        """Make one request for what is missing in a file, and write what comes."""
        connection = self._gateway.connection
        try:
            headers = {"Authorization": as_bearer(await self._gateway.token())}
            if part.have:
                headers |= {"Range": f"bytes={part.have}-", "If-Range": f'"{offered.digest}"'}
            async with connection.opened("GET", offered.url, headers=headers) as response:
                if response.status in (200, 206):
                    await self._write(response, part)
                    connection.settled()
                else:
                    await self._refused(await replied(response, "the model"), part)
        except NotNow as error:
            await connection.wait(error)

    async def _write(self, response: aiohttp.ClientResponse, part: _Part) -> None:
        """Append an answer's bytes to the file, or replace it. Raises NotNow if they don't fit."""
        if response.status == 200:
            part.drop()
        elif _bounds(response) != (part.have, part.size):
            part.drop()
            raise NotNow("the gateway sent another range of the model than was asked for")
        async for piece in response.content.iter_chunked(_PIECE):
            if part.have + len(piece) > part.size:
                part.drop()
                raise NotNow("the gateway sent more bytes of the model than it said")
            await asyncio.to_thread(part.append, piece)
            self._show(f"downloading the model: {part.have / part.size:.0%}")

    async def _refused(self, reply: Reply, part: _Part) -> None:
        refusal = reply.refusal("the model")
        if reply.status == 404 and refusal.reason == SUPERSEDED:
            raise Superseded(str(refusal))
        if reply.status == 401 and refusal.reason == TOKEN:
            await self._gateway.token(fresh=True)
        elif reply.status == 416:  # the file is not a part of it
            part.drop()
            raise NotNow(str(refusal))
        else:
            raise refusal


class _Part:
    """A file to which a model's bytes are appended as they come."""

    def __init__(self, path: Path, size: int) -> None:
        """``size``: bytes of the whole model."""
        self.path = path
        self.size = size
        self.have = path.stat().st_size if path.exists() else 0
        if self.have > size:
            self.drop()

    def append(self, piece: bytes) -> None:
        """Add bytes at the end."""
        with self.path.open("ab") as file:
            file.write(piece)
        self.have += len(piece)

    def drop(self) -> None:
        """Begin anew."""
        self.path.unlink(missing_ok=True)
        self.have = 0


def _bounds(response: aiohttp.ClientResponse) -> tuple[int, int] | None:
    """Where the sent range begins, and of how many bytes it is a part; None: it doesn't say."""
    found = _RANGE.fullmatch(response.headers.get("Content-Range", ""))
    return None if found is None else (int(found[1]), int(found[2]))


def _kept(file: Path, encoded: Encoded, layout: Layout) -> Model | None:
    """The model in a file that was complete; None: there is none, or it was damaged since."""
    try:
        return _load(file, encoded, layout)
    except FileNotFoundError:
        return None
    except BlobDamaged:
        file.unlink()
        return None


def _load(file: Path, encoded: Encoded, layout: Layout) -> Model:
    """The model in a file. Raises BlobDamaged, and Unavailable for an unknown format."""
    payload = room_for(encoded, layout)
    with file.open("rb") as source:
        got = source.readinto(payload.buffer.data)
        if got != encoded.size or source.read(1):
            raise BlobDamaged(f"a model of another size than {encoded.size} bytes")
    how = format_of(encoded.format)
    if not how.zstd and (own := payload.digest()) != encoded.digest:  # else decode() looks inside
        raise BlobDamaged(f"a model with digest {own}, expected {encoded.digest}")
    if how.is_plain:
        return Model(layout, payload.buffer)
    model = Model(layout)
    decode(payload, encoded, model)
    return model
