"""The byte format of a segment's file: its first page and its records.

The file's first page has magic, format and salt. A record is

    mark (4 bytes) | length of the message (4) | length of the payload (8)
    | bytes known to be on disk when it was written (8) | the record's own offset (8)
    | checksum of the record before it (32) | SHA-256 of salt, all that and the message (32)
    | the message, msgpack | the payload: a model's bytes

little-endian, padded to a page after the message and after the payload, so that both can be written
past the page cache, which for models costs more than the disk. The digest in the message covers the
payload. The salt is random for each file, so that no update can contain a record.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from fedstream.core.layout import PAGE

FORMAT = 2
LONGEST = 16 << 20  # most bytes of a message
BEGINNING = bytes(32)  # the previous checksum of a segment's first record

_FILE = struct.Struct("<8sI4xQ")  # magic, format, salt; alone on its page
_MAGIC = b"fedstrm\n"
_FRAME = struct.Struct("<IIQQQ32s")
_CHECKSUM = hashlib.sha256().digest_size
_WHOLE = struct.Struct(f"{_FRAME.format}{_CHECKSUM}s")  # a frame with the record's checksum
_MARK = 0x6C6E726A  # "jrnl"

FILE_BYTES = _FILE.size
FRAME_BYTES = _FRAME.size + _CHECKSUM


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a record."""

    path: Path  # of the segment
    offset: int  # bytes from its beginning

    def __str__(self) -> str:
        return f"{self.path.name} at byte {self.offset}"

    @property
    def where(self) -> str:
        """The place with its folder, for messages."""
        return f"{self.path} at byte {self.offset}"


@dataclass(frozen=True, slots=True)
class Frame:
    """The header of a record."""

    length: int  # of the message
    payload: int  # bytes of it
    synced: int  # bytes of the file known to be on disk at that time
    offset: int  # the record's own offset
    follows: bytes  # the checksum of the record before it
    checksum: bytes

    def end(self, at: int) -> int:
        """Offset just past the record that starts at ``at``."""
        return self.payload_at(at) + filled(self.payload)

    def payload_at(self, at: int) -> int:
        """Offset of the payload of the record that starts at ``at``."""
        return at + filled(FRAME_BYTES + self.length)


def file_page(salt: int) -> bytes:
    """The beginning of a segment's file."""
    return _FILE.pack(_MAGIC, FORMAT, salt)


def file_parts(data: bytes) -> tuple[int, int] | None:
    """Format and salt of the file that begins with ``data``; None if it is not a segment."""
    if len(data) < FILE_BYTES or data[: len(_MAGIC)] != _MAGIC:
        return None
    _, number, salt = _FILE.unpack_from(data)
    return number, salt


def packed(
    message: bytes, *, payload: int, synced: int, offset: int, follows: bytes, salt: int
) -> tuple[bytes, bytes]:
    """Frame and message joined, and the record's checksum."""
    frame = _FRAME.pack(_MARK, len(message), payload, synced, offset, follows)
    checksum = _checksum(salt, frame, message)
    return frame + checksum + message, checksum


def frame_of(data: bytes | memoryview) -> Frame | None:
    """Parse the frame at the beginning of the bytes; None if there is none."""
    found = frame_parts(data)
    return None if found is None else Frame(*found)


def frame_parts(data: bytes | memoryview) -> tuple[int, int, int, int, bytes, bytes] | None:
    """The fields of :func:`frame_of` as a tuple, which is much faster to make."""
    if len(data) < FRAME_BYTES:
        return None
    mark, length, payload, synced, offset, follows = _FRAME.unpack_from(data)
    if mark != _MARK or length > LONGEST:
        return None
    return length, payload, synced, offset, follows, bytes(data[_FRAME.size : FRAME_BYTES])


def whole_parts(salt: bytes, data: bytes) -> tuple[bytes, int, int, bytes, bytes] | None:
    """Parse a record; return message, payload's bytes, offset, previous checksum, checksum.

    None if frame and message are not intact. ``salt``: the 8 hashed bytes.
    """
    if len(data) < FRAME_BYTES:
        return None
    mark, length, payload, _, offset, follows, checksum = _WHOLE.unpack_from(data)
    message = data[FRAME_BYTES : FRAME_BYTES + length]
    if mark != _MARK or len(message) < length or length > LONGEST:
        return None
    if hashlib.sha256(salt + data[: _FRAME.size] + message).digest() != checksum:
        return None
    return message, payload, offset, follows, checksum


def is_whole(salt: int, data: bytes, checksum: bytes) -> bool:
    """Whether frame and message are intact. ``data``: exactly these two."""
    return _checksum(salt, data[: _FRAME.size], data[FRAME_BYTES:]) == checksum


def filled(length: int) -> int:
    """``length`` bytes rounded up to whole pages."""
    return length + -length % PAGE


def _checksum(salt: int, frame: bytes, message: bytes) -> bytes:
    return hashlib.sha256(salt_bytes(salt) + frame + message).digest()


def salt_bytes(salt: int) -> bytes:
    """The hashed bytes of a salt."""
    return salt.to_bytes(8, "little")
