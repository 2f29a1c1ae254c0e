"""Digests, which identify bytes wherever an attacker might substitute others.

An attacker with two updates of the same digest could have one admitted and the other applied, and
blame a device. With xxh3, built only for speed, finding such a pair takes less than a second, so
xxh3 is used only against bit rot (``trainer/workspace.py``). Two digests are collision-resistant:

- BLAKE3, for models and updates: the fastest (6.2 GB/s here). Its digests end in ``-blake3``.
- SHA-256, for everything else, for models and updates of runs with ``wire.digest``, and in
  recordings of early releases (1.8 GB/s). Its digests have no suffix.

So every digest names its algorithm. A check uses the algorithm of the given digest. A new digest
uses the algorithm in the digest of the model from which the new bytes were made.
"""

from __future__ import annotations

import hashlib
from copy import copy
from typing import Final, Literal, TypeAlias

from blake3 import blake3

DigestAlgorithm: TypeAlias = Literal["blake3", "sha256"]

_SUFFIX = "-blake3"
# Pattern of a digest: 64 hexadecimal characters, and the algorithm unless it is SHA-256.
DIGEST_PATTERN: Final = rf"[0-9a-f]{{64}}({_SUFFIX})?"


def algorithm_of(digest: str) -> DigestAlgorithm:
    """The algorithm of a digest; SHA-256 for an invalid digest, which then matches no bytes."""
    return "blake3" if digest.endswith(_SUFFIX) else "sha256"


class Digester:
    """Computes a digest of bytes given in pieces. Releases the GIL for long pieces."""

    def __init__(self, algorithm: DigestAlgorithm) -> None:
        self._hash = blake3() if algorithm == "blake3" else hashlib.sha256()
        self._suffix = _SUFFIX if algorithm == "blake3" else ""

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece."""
        self._hash.update(data)

    def digest(self) -> str:
        """The digest of the pieces so far."""
        return self._hash.hexdigest() + self._suffix

    def copy(self) -> Digester:
        """A copy of the state so far."""
        other = copy(self)
        other._hash = self._hash.copy()  # noqa: SLF001  (the same class)
        return other


def digest_of(data: bytes | memoryview, algorithm: DigestAlgorithm = "sha256") -> str:
    """The digest of bytes. Releases the GIL for long ones."""
    if algorithm == "sha256":
        return hashlib.sha256(data).hexdigest()
    return blake3(data).hexdigest() + _SUFFIX
