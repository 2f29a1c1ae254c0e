"""Blobs that are written one whole chunk at a time, for updates that arrive in parts.

A note beside the blob has the state that its writer needs to continue after a restart or on another
machine. Chunks are written in order, so their number gives the offset. Blob and note expire
together; every write renews both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedstream.broker.blobs import SIZE
from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.scripts import Script
from fedstream.core.errors import BlobMissing

PUT = Script("put_part")
# Commands on the blob, whose bytes the writer need not be allowed to read, and on the note.
ON_BLOB = ("hset", "hexists", "hlen", "pexpire", "unlink")
ON_NOTE = ("get", "set", "pexpire", "unlink")


@dataclass(frozen=True, slots=True)
class Written:
    """The progress of a blob."""

    note: bytes | None  # None: there is none
    chunks: int | None  # None: there is no blob


class PartialBlob:
    """One blob written in parts, and its note."""

    def __init__(self, client: Client, key: str, note_key: str, *, expire_s: float) -> None:
        """``expire_s``: seconds from the last write to the expiry of blob and note."""
        self._client = client
        self._key = key
        self._note_key = note_key
        self._expire_ms = round(expire_s * 1000)

    async def written(self) -> Written:
        """Read the number of written chunks, and the note."""
        note, begun, fields = await self._client.pipeline(
            [("GET", self._note_key), ("HEXISTS", self._key, SIZE), ("HLEN", self._key)]
        )
        return Written(note, fields - 1 if begun else None)

    async def begin(self, size: int, note: bytes) -> None:
        """Begin a blob of ``size`` bytes, replacing any blob of this name."""
        await self._client.pipeline(
            [
                ("MULTI",),
                ("UNLINK", self._key),
                ("HSET", self._key, SIZE, size),
                ("PEXPIRE", self._key, self._expire_ms),
                ("SET", self._note_key, note, "PX", self._expire_ms),
                ("EXEC",),
            ]
        )

    async def put(
        self, number: int, chunk: memoryview, note: bytes, changed: bytes | None = None
    ) -> None:
        """Write chunk ``number``, and the note ``changed`` if given; both or neither.

        ``note``: the expected present note. Raises BlobMissing, having written nothing, if the blob
        has expired, was discarded, or was begun anew by another writer.
        """
        is_written = await PUT(
            self._client,
            {"blob": self._key, "note": self._note_key},
            number,
            chunk,
            note,
            changed or note,
            self._expire_ms,
        )
        if not is_written:
            raise BlobMissing(self._key)

    async def mark(self, note: bytes) -> None:
        """Replace the note."""
        await self._client.call("SET", self._note_key, note, "PX", self._expire_ms)

    def whole(self, data: memoryview, note: bytes, *, note_expire_s: float) -> Sequence[Command]:
        """The commands that write a whole blob of one chunk, replacing any blob of this name.

        Send them before the script that names the blob, as the commands of
        :func:`fedstream.broker.blobs.prepare`.
        """
        return (
            ("MULTI",),
            ("UNLINK", self._key),
            ("HSET", self._key, SIZE, data.nbytes, 0, data),
            ("PEXPIRE", self._key, self._expire_ms),
            ("SET", self._note_key, note, "PX", round(note_expire_s * 1000)),
            ("EXEC",),
        )

    async def discard(self) -> None:
        """Delete the blob and its note."""
        await self._client.pipeline([("UNLINK", self._key), ("UNLINK", self._note_key)])
