"""What devices send instead of updates: noise, and a last value that always changes.

The noise is the same few values in another place each time. So models differ in all of their
values, as trained ones do: what changed between two of them takes about as many bytes. The last
value makes each update another one, however many there are.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass

from fedstream.broker.digest import DigestAlgorithm, Digester

_VALUES = 1 << 23  # from 0 to 1, exact in float32
_STEP = 5_183_117  # odd, so that all values come in turn, and the next one is far away
_LAST = 4  # bytes: a float32, or two bfloat16
_SHIFTS = 8  # places where an update may begin in the noise
# High bytes of bfloat16, and so of float32, whose values are up to 1/2 and not tiny.
_HIGH = bytes((0x3C, 0x3D, 0x3E, 0xBC, 0xBD, 0xBE))


@dataclass(frozen=True, slots=True)
class StandIn:
    """One update; its first bytes are shared with many others."""

    first: memoryview
    last: bytes
    digest: str

    def part(self, start: int, end: int) -> tuple[bytes | memoryview, ...]:
        """The bytes from one place to another, as one or two pieces."""
        size = len(self.first)
        pieces = self.first[start:end], self.last[max(0, start - size) : max(0, end - size)]
        return tuple(piece for piece in pieces if len(piece))


class StandIns:
    """Updates of any size. In float32 and bfloat16, their values are from -1/2 to 1."""

    def __init__(self) -> None:
        self._made = 0
        self._noise: dict[int, bytes] = {}  # by size
        # Digests of all but the last bytes, by size, place and algorithm.
        self._begun: dict[tuple[int, int, DigestAlgorithm], Digester] = {}

    def next(self, size: int, digests: DigestAlgorithm = "sha256") -> StandIn:
        """Another update of so many bytes. ``digests``: what makes its own."""
        if size not in self._noise:
            self._noise[size] = _noise(max(0, size - _LAST) + _LAST * _SHIFTS)
        at = _LAST * (self._made % _SHIFTS)
        self._made += 1
        first = memoryview(self._noise[size])[at : at + max(0, size - _LAST)]
        begun = self._begun.get((size, at, digests))
        if begun is None:
            begun = self._begun[size, at, digests] = Digester(digests)
            begun.update(first)
        last = struct.pack("<f", self._made * _STEP % _VALUES / _VALUES)[-size:]
        digest = begun.copy()
        digest.update(last)
        return StandIn(first, last, digest.digest())


def _noise(size: int) -> bytes:
    """Finite values of both formats, at random, but the same each time."""
    rng = random.Random(size)
    found = bytearray(rng.randbytes(size))
    found[1::2] = bytes(rng.choices(_HIGH, k=len(found) // 2))
    return bytes(found)
