"""What devices send instead of updates: zeros, except for the last value, which always changes.

If it did not, the run's model would become the same from version to version, and nobody would have
to download it again.
"""

from __future__ import annotations

import hashlib
import struct

_VALUES = 1 << 23  # from 0 to 1, exact in float32
_STEP = 5_183_117  # odd, so that all values come in turn, and the next one is far away
_LAST = 4  # bytes: a float32, or a zero and a bfloat16


class StandIns:
    """Updates of any size. In float32 and bfloat16, they are parameters from 0 to 1."""

    def __init__(self) -> None:
        self._made = 0
        self._begun: dict[int, hashlib._Hash] = {}  # digests of all but the last bytes, by size

    def next(self, size: int) -> tuple[bytes, str]:
        """So many bytes and their SHA-256 as hexadecimal digits."""
        zeros = bytes(max(0, size - _LAST))
        if size not in self._begun:
            self._begun[size] = hashlib.sha256(zeros)
        self._made += 1
        last = struct.pack("<f", self._made * _STEP % _VALUES / _VALUES)[-size:]
        digest = self._begun[size].copy()
        digest.update(last)
        return zeros + last, digest.hexdigest()
