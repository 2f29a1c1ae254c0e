"""Reading many records at once, and their messages in groups of one shape.

The messages of a journal have the same keys in the same order, and most numbers have the same
encoded length as in the previous message. So one message is parsed to get its shape: the bytes that
determine the structure. Messages with the same structural bytes have the same shape, and numpy
reads their numbers at once. The constraints on numbers are intervals, so only the messages with the
least and the greatest number of each field are decoded and validated.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.core.errors import BadMessage
from fedstream.core.messages import decode
from fedstream.journal.errors import JournalDamaged
from fedstream.journal.frames import FRAME_BYTES, filled, frame_of, whole_parts
from fedstream.journal.records import (
    EntryRecord,
    EvaluationEnded,
    QuarantineSet,
    RoundClosed,
    StepScaled,
    SumOpened,
    Taken,
)

Path: TypeAlias = tuple[str | int, ...]  # keys that lead to a value
NumberArray: TypeAlias = npt.NDArray[Any]

_FREE = frozenset(
    {"entry", "task", "attempt", "trainer", "base", "layout", "digest", "given"}
)  # keys of texts that differ from one message to the next
_FEW = 32  # with fewer messages, a shape isn't worthwhile
_POOR = 8  # poorly fitting shapes, after which messages are read one by one
_DEEP = 4  # most levels; our messages have 3
_WORD = 8  # bytes that are compared at once
_BLOCK = 256 << 10  # bytes of messages that are compared while they are in the cache
_FIXED = 0xFF  # mask: all bits are structure
_SMALL = 0x80  # mask: only the first bit, which marks a small number


@dataclass(frozen=True)
class Alike:
    """Messages of one shape, which differ in numbers and in free texts."""

    places: npt.NDArray[np.int64]  # indices of the messages, ascending
    sample: EntryRecord  # one message; fields not in ``numbers`` are equal in all
    numbers: Mapping[Path, NumberArray]


@dataclass(frozen=True)
class _Shape:
    words: npt.NDArray[np.uint64]
    mask: npt.NDArray[np.uint64]
    numbers: Mapping[Path, tuple[int, str]]  # offset and dtype


def alike(messages: Sequence[bytes]) -> Iterator[Alike]:
    """Group encoded messages of queue entries by shape. Raises JournalDamaged for an invalid one.

    Free texts are checked in the samples only, and are not part of a group.
    """
    lengths = np.fromiter(map(len, messages), np.int64, len(messages))
    poor = 0
    for length in sorted({*lengths.tolist()}):
        left = np.flatnonzero(lengths == length)
        pad = bytes(-length % _WORD)
        wide = length + len(pad)
        joined = pad.join([*[messages[place] for place in left.tolist()], b""])
        table = np.frombuffer(joined, np.uint8).reshape(len(left), wide)
        while len(left) > _FEW and poor < _POOR:
            shape = _shape_of(messages[left[0]], wide)
            if shape is None:
                break
            fits = _fitting(table, shape)
            poor += int(fits.sum()) <= _FEW
            if fits.all():
                yield _group(messages, left, table, shape)
                left = left[:0]
                break
            yield _group(messages, left[fits], table[fits], shape)
            left, table = left[~fits], table[~fits]
        for place in left.tolist():
            yield Alike(np.array([place]), _decoded(messages[place]), {})


def _fitting(table: npt.NDArray[np.uint8], shape: _Shape) -> npt.NDArray[np.bool_]:
    """A mask of the rows that have the shape."""
    words = table.view(np.uint64)
    step = max(1, _BLOCK // table.shape[1])
    other = np.empty((min(step, len(words)), words.shape[1]), np.uint64)
    fits = np.empty(len(words), bool)
    for begin in range(0, len(words), step):
        block = words[begin : begin + step]
        room = other[: len(block)]
        np.bitwise_xor(block, shape.words, out=room)
        np.bitwise_and(room, shape.mask, out=room)
        np.logical_not(room.any(axis=1), out=fits[begin : begin + step])
    return fits


def _group(
    messages: Sequence[bytes],
    places: npt.NDArray[np.int64],
    table: npt.NDArray[np.uint8],
    shape: _Shape,
) -> Alike:
    names = [str(number) for number in range(len(shape.numbers))]
    at, formats = zip(*shape.numbers.values(), strict=True)
    of = np.dtype({"names": names, "formats": formats, "offsets": at, "itemsize": table.shape[1]})
    rows = table.view(of)[:, 0]
    numbers = {path: rows[name] for path, name in zip(shape.numbers, names, strict=True)}
    extreme = {0}
    for values in numbers.values():
        extreme |= {int(values.argmin()), int(values.argmax())}  # of a NaN, if there is one
        if values.dtype.kind == "f" and np.isnan(values).any():
            known = np.flatnonzero(~np.isnan(values))
            found = values[known]
            extreme |= (
                {int(known[found.argmin()]), int(known[found.argmax()])} if len(known) else set()
            )
    checked = [_decoded(messages[places[number]]) for number in sorted(extreme)]
    return Alike(places, checked[0], numbers)


def _decoded(message: bytes) -> EntryRecord:
    try:
        return decode(
            message, Taken, RoundClosed, QuarantineSet, EvaluationEnded, StepScaled, SumOpened
        )
    except BadMessage as error:
        raise JournalDamaged(str(error)) from error


# shapes


def _shape_of(message: bytes, wide: int) -> _Shape | None:
    """The shape of a message, padded to ``wide`` bytes; None for a foreign message."""
    mask = bytearray([_FIXED]) * wide
    numbers: dict[Path, tuple[int, str]] = {}
    try:
        end = _taken_apart(message, 0, (), mask, numbers)
    except (IndexError, _Foreign):
        return None
    if end != len(message) or not numbers:
        return None
    words = np.frombuffer(message.ljust(wide, b"\0"), np.uint64)
    return _Shape(words, np.frombuffer(bytes(mask), np.uint64), numbers)


class _Foreign(Exception):
    """A msgpack type that messages don't contain."""


_NUMBERS = {0xCB: ">f8", 0xCC: "u1", 0xCD: ">u2", 0xCE: ">u4", 0xCF: ">u8"}
_PLAIN = (0xC0, 0xC2, 0xC3)  # nil, false, true
_TEXT, _LIST, _MAP = "text", "list", "map"
_LONG = {0xD9: (_TEXT, 1), 0xDA: (_TEXT, 2), 0xDC: (_LIST, 2), 0xDE: (_MAP, 2)}


def _taken_apart(
    data: bytes, at: int, path: Path, mask: bytearray, numbers: dict[Path, tuple[int, str]]
) -> int:
    """Note the places of a msgpack value's numbers and free texts; return its end.

    Raises _Foreign; IndexError if it is cut off.
    """
    kind = data[at]
    if kind < 0x80:
        mask[at], numbers[path] = _SMALL, (at, "u1")
        return at + 1
    if kind in _NUMBERS:
        size = np.dtype(_NUMBERS[kind]).itemsize
        mask[at + 1 : at + 1 + size] = bytes(size)
        numbers[path] = at + 1, _NUMBERS[kind]
        return at + 1 + size
    if kind in _PLAIN:
        return at + 1
    what, length, at = _header(data, at)
    if what == _TEXT:
        if path and path[-1] in _FREE:
            mask[at : at + length] = bytes(length)
        return at + length
    if len(path) == _DEEP:
        raise _Foreign
    for number in range(length):
        key: str | int = number
        if what == _MAP:
            kind_of_key, size, begin = _header(data, at)
            if kind_of_key != _TEXT:
                raise _Foreign
            at = begin + size
            key = data[begin:at].decode("latin-1")
        at = _taken_apart(data, at, (*path, key), mask, numbers)
    return at


def _header(data: bytes, at: int) -> tuple[str, int, int]:
    """Parse the header of a text, list or map; return kind, length and begin of its content."""
    kind = data[at]
    if 0xA0 <= kind <= 0xBF:
        return _TEXT, kind & 0x1F, at + 1
    if 0x80 <= kind <= 0x9F:
        return _LIST if kind >= 0x90 else _MAP, kind & 0x0F, at + 1
    if kind not in _LONG:
        raise _Foreign
    what, size = _LONG[kind]
    begin = at + 1 + size
    return what, int.from_bytes(data[at + 1 : begin], "big"), begin


BATCH = 8192  # records in a batch, whose messages take some 6 MB
_MESSAGE = 1024  # bytes that are read for a frame and its message; most are shorter


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Consecutive records: offsets and encoded messages."""

    offsets: list[int]
    messages: list[bytes]
    end: int  # offset after the last of them
    chain: bytes  # checksum of the last record


def batch_at(file: int, salt: bytes, at: int, end: int, chain: bytes) -> RecordBatch:
    """Read at most ``BATCH`` whole consecutive records from an offset on.

    ``salt``: the 8 hashed bytes; ``end``: limit of the last record; ``chain``: the first record's
    previous checksum. Stops before a record that is not whole. Raises OSError.
    """
    offsets: list[int] = []
    messages: list[bytes] = []
    while at < end and len(offsets) < BATCH:
        data = os.pread(file, _MESSAGE, at)
        parts = whole_parts(salt, data)
        if parts is None and (frame := frame_of(data)) is not None:  # a longer one, perhaps
            parts = whole_parts(salt, os.pread(file, FRAME_BYTES + frame.length, at))
        if parts is None:
            break
        message, payload, offset, follows, checksum = parts
        after = at + filled(FRAME_BYTES + len(message)) + filled(payload)
        if offset != at or follows != chain or after > end:
            break
        offsets.append(at)
        messages.append(message)
        at, chain = after, checksum
    return RecordBatch(offsets, messages, at, chain)
