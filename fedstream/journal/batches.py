"""Reading many records at once, with as little work for each as checking them takes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fedstream.journal.frames import FRAME_BYTES, filled, frame_of, whole_parts

BATCH = 8192  # records in a batch, whose messages take some 6 MB
_MESSAGE = 1024  # bytes that are read for a frame and its message; most are shorter


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Consecutive records: where each one is, and its encoded message."""

    offsets: list[int]
    messages: list[bytes]
    end: int  # offset after the last of them
    chain: bytes  # the chain's value there


def batch_at(file: int, salt: bytes, at: int, end: int, chain: bytes) -> RecordBatch:
    """The whole records from an offset on, each following the one before it, at most ``BATCH``.

    ``salt``: 8 bytes, as hashed; ``end``: where the last one must end; ``chain``: what the first
    must follow. Fewer where a record is not whole. Raises OSError.
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
