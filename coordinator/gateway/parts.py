"""What a request may add to an upload, and how the bytes that arrive become chunks. Pure.

An upload keeps whole chunks, all of one length but the last, so its offset is always a multiple of
that length, or the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from fedstream.broker.blobs import CHUNK

Flaw = Literal["offset", "length", "too short"]


class TooLong(ValueError):
    """More bytes than the upload was to have."""


@dataclass(frozen=True, slots=True)
class UploadPart:
    """What a request says of the bytes in its body."""

    offset: int
    size: int | None  # bytes; None: it doesn't say
    completes: bool  # the upload ends with it

    def flaw(self, *, length: int, at: int, chunk: int = CHUNK) -> Flaw | None:
        """Why an upload of ``length`` bytes that has got to ``at`` can't go on with this part.

        "too short": it would fill no chunk, and so add nothing.
        """
        if self.offset != at:
            return "offset"
        if self.size is None:
            return None
        end = at + self.size
        if end > length or (self.completes and end < length):
            return "length"
        if not self.completes and 0 < self.size < chunk and end < length:
            return "too short"
        return None

    def repeats_the_end(self, *, length: int, at: int) -> bool:
        """Whether this is the end again of an upload that has all its bytes, or an empty end."""
        if not self.completes or at < length or self.offset > length:
            return False
        return self.size is None or self.offset + self.size == length


class Chunks:
    """Makes chunks of the bytes of an upload, from an offset on; holds one at most."""

    def __init__(self, length: int, at: int, *, chunk: int = CHUNK) -> None:
        """``at``: a multiple of ``chunk``, or ``length``."""
        self._length = length
        self._chunk = chunk
        self._begin = at  # where the chunk begins that is being filled
        self._held = bytearray()

    @property
    def received(self) -> int:
        """Bytes of the upload that have arrived, whether or not their chunk is whole."""
        return self._begin + len(self._held)

    @property
    def offset(self) -> int:
        """Bytes of the upload that are in whole chunks."""
        return self._begin

    @property
    def missing(self) -> int:
        """Bytes of the upload that are not in whole chunks yet."""
        return self._length - self._begin

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived."""
        return not self.missing

    @property
    def number(self) -> int:
        """The number of the chunk that is being filled."""
        return -(-self._begin // self._chunk)

    def take(self, data: bytes) -> Iterator[tuple[int, bytearray]]:
        """Take bytes; give each chunk that they fill, and its number.

        Raises TooLong once there are more than the upload was to have.
        """
        rest = memoryview(data)
        while rest:
            size = min(self._chunk, self._length - self._begin)
            room = size - len(self._held)
            if not room:
                raise TooLong
            self._held += rest[:room]
            rest = rest[room:]
            if len(self._held) == size:
                number, whole = self.number, self._held
                self._begin += size
                self._held = bytearray()
                yield number, whole
