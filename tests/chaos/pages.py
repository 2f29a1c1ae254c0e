"""The journal's bytes, read a second time: a parser that shares nothing with the updater's.

What the chaos suite believes of a journal comes from here. The format stands in the docstrings of
`fedstream/journal/`; where that changes, this module follows it, and no other of the suite.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
from blake3 import blake3

SUFFIX = ".journal"
_PAGE = 4096
_FILE = struct.Struct("<8sI4xQ")  # magic, format, salt
_FRAME = struct.Struct("<IIQQQ32s")  # mark, message, payload, synced, its own place, the one before
_SUM = 32  # bytes of SHA-256, which follow the frame
_NONE = bytes(_SUM)  # before the first
_MARK = 0x6C6E726A
_LONGEST = 16 << 20


class Unreadable(Exception):
    """The bytes are not a journal; the message says where."""


@dataclass(frozen=True)
class Written:
    """One record as its bytes say it."""

    segment: str
    at: int
    message: dict[str, Any]
    payload: bytes
    synced: int  # bytes of the segment that were on disk when it was written
    ends: int  # of the message's bytes in the file
    begins: int  # of the payload's
    end: int  # of it all, with what fills the last page
    chain: bytes  # its checksum, which the next one names

    def __str__(self) -> str:
        return f"{self.segment} at byte {self.at}"

    @property
    def kind(self) -> str:
        """What the message calls itself."""
        return str(self.message["k"])


@dataclass(frozen=True)
class Pages:
    """One segment."""

    name: str
    head: dict[str, Any]
    standing: Written
    vectors: tuple[Written, ...]
    records: tuple[Written, ...]  # to the torn end
    size: int
    torn: int = field(default=0)  # bytes behind the last whole record


def digest_of(data: bytes, like: str = "") -> str:
    """The digest by which messages name bytes. ``like``: another one, made the same way."""
    if like.endswith("-blake3"):
        return f"{blake3(data).hexdigest()}-blake3"
    return hashlib.sha256(data).hexdigest()


def _padded(length: int) -> int:
    return -(-length // _PAGE) * _PAGE


def _record(name: str, data: bytes, at: int, salt: int, before: bytes) -> Written | None:
    """The record at an offset, behind the one of that checksum; None where none is whole."""
    if len(data) < at + _FRAME.size + _SUM:
        return None
    mark, length, payload, synced, place, follows = _FRAME.unpack_from(data, at)
    starts = at + _FRAME.size + _SUM
    ends = starts + length
    begins = at + _padded(_FRAME.size + _SUM + length)
    end = begins + _padded(payload)
    if mark != _MARK or length > _LONGEST or end > len(data):
        return None
    chain = data[at + _FRAME.size : starts]
    covered = salt.to_bytes(8, "little") + data[at : at + _FRAME.size] + data[starts:ends]
    if hashlib.sha256(covered).digest() != chain or (place, follows) != (at, before):
        return None
    message = msgpack.unpackb(data[starts:ends], use_list=False)
    return Written(
        name, at, message, data[begins : begins + payload], synced, ends, begins, end, chain
    )


def read(path: Path) -> Pages:
    """One segment. Raises Unreadable."""
    data = path.read_bytes()
    if len(data) < _PAGE or data[:8] != b"fedstrm\n":
        raise Unreadable(f"{path.name}: no segment")
    _, _, salt = _FILE.unpack_from(data)
    found: list[Written] = []
    at, before = _PAGE, _NONE
    while (record := _record(path.name, data, at, salt, before)) is not None:
        if record.kind == "taken" and record.payload:
            said = record.message["upload"]["digest"]
            if digest_of(record.payload, said) != said:
                break  # a page of it never got to the disk
        found.append(record)
        at, before = record.end, record.chain
    if len(found) < 2 or (found[0].kind, found[1].kind) != ("segment", "standing"):
        raise Unreadable(f"{path.name}: does not begin with a head and a standing")
    head, standing, *rest = found
    here = len(standing.message.get("here", ()))
    vectors, records = rest[:here], rest[here:]
    for record in records:
        if record.kind not in ("taken", "round_closed", "quarantine_set", "step_scaled"):
            raise Unreadable(f"{record}: a {record.kind} among the records")
    return Pages(
        path.name,
        head.message,
        standing,
        tuple(vectors),
        tuple(records),
        len(data),
        len(data) - at,
    )


def chain(folder: Path) -> list[Pages]:
    """The segments that count, oldest first, by who names whom as its predecessor."""
    names = sorted(path.name for path in folder.glob(f"*{SUFFIX}"))
    found: list[Pages] = []
    name = names[-1] if names else None
    while name is not None:
        if not (folder / name).exists():
            raise Unreadable(f"{name}: is missing")
        found.append(read(folder / name))
        name = found[-1].head.get("predecessor")
    return found[::-1]


def counting(segments: Sequence[Pages]) -> Iterator[tuple[Pages, list[Written]]]:
    """Each segment with those of its records that its successor has not cut off."""
    for segment, successor in zip(segments, [*segments, None][1:], strict=True):
        cut = successor.head.get("cut") if successor else None
        if cut is not None and cut > segment.size - segment.torn:
            raise Unreadable(
                f"{successor and successor.name}: counts {cut} bytes of {segment.name}, which has "
                f"{segment.size - segment.torn}"
            )
        counts = [r for r in segment.records if cut is None or r.end <= cut]
        if successor is not None:
            last = [segment.standing, *segment.vectors, *counts][-1]
            if (successor.head["cut"], successor.head["follows"]) != (last.end, last.chain.hex()):
                raise Unreadable(f"{successor.name}: does not follow {last}")
        yield segment, counts
