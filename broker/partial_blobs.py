"""Updates that arrive in parts: blobs written one chunk at a time, each when it is whole.

Beside such a blob is a note, in which its writer keeps what it must know to go on after a restart,
or on another machine. Chunks are written in order, so their number says how far the blob has got.
Blob and note expire together; every write renews both.
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
# Commands on the blob, which its writer need not be able to read, and on the note.
ON_BLOB = ("hset", "hexists", "hlen", "pexpire", "unlink")
ON_NOTE = ("get", "set", "pexpire", "unlink")


@dataclass(frozen=True, slots=True)
class Written:
    """How far a blob has got."""

    note: bytes | None  # None: there is none
    chunks: int | None  # None: there is no blob


class PartialBlob:
    """One blob that arrives in parts, and its note."""

    def __init__(self, client: Client, key: str, note_key: str, *, expire_s: float) -> None:
        """``expire_s``: after the last write."""
        self._client = client
        self._key = key
        self._note_key = note_key
        self._expire_ms = round(expire_s * 1000)

    async def written(self) -> Written:
        """Read how far the blob has got, and its note."""
        note, begun, fields = await self._client.pipeline(
            [("GET", self._note_key), ("HEXISTS", self._key, SIZE), ("HLEN", self._key)]
        )
        return Written(note, fields - 1 if begun else None)

    async def begin(self, size: int, note: bytes) -> None:
        """Begin a blob of ``size`` bytes in place of what was there under its name."""
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
        """Write the chunk of this number, and the note if it changes; both or neither.

        ``note``: as it was when this upload began or went on. Raises BlobMissing if the blob has
        expired, was discarded, or begun anew by somebody else: then nothing is written.
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
        """Write the note anew."""
        await self._client.call("SET", self._note_key, note, "PX", self._expire_ms)

    def whole(self, data: memoryview, note: bytes, *, note_expire_s: float) -> Sequence[Command]:
        """The commands that write a blob of one chunk at once, in place of what was there.

        They go ahead of the script that names the blob, as those of
        :func:`fedstream.broker.blobs.prepare` do.
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
