"""Digests, which identify bytes wherever an attacker might substitute others.

An attacker who finds two updates with the same digest can have one admitted and the other applied,
and blame a device for it. With xxh3, which is built only for speed, that takes less than a second,
so it remains where only bit rot matters (``trainer/workspace.py``). These two are collision-
resistant:

- BLAKE3, for models and updates: the fastest (6.2 GB/s here). Its digests end in ``-blake3``.
- SHA-256, for all else, for models and updates of runs that want it (``wire.digest``), and in
  everything recorded before there was a choice (1.8 GB/s). Its digests are bare.

So every digest says what made it. Whoever checks one takes its algorithm, and whoever makes one
takes that of the model that it comes from.
"""

from __future__ import annotations

import hashlib
from copy import copy
from typing import Final, Literal, TypeAlias

from blake3 import blake3

DigestAlgorithm: TypeAlias = Literal["blake3", "sha256"]

_SUFFIX = "-blake3"
# That of a digest: 64 hexadecimal characters, and what made them unless that is SHA-256.
DIGEST_PATTERN: Final = rf"[0-9a-f]{{64}}({_SUFFIX})?"


def algorithm_of(digest: str) -> DigestAlgorithm:
    """What made a digest. Of a text that is none, SHA-256, by which nothing has that digest."""
    return "blake3" if digest.endswith(_SUFFIX) else "sha256"


class Digester:
    """Makes one digest of bytes that come piece by piece. Releases the GIL for long pieces."""

    def __init__(self, algorithm: DigestAlgorithm) -> None:
        self._hash = blake3() if algorithm == "blake3" else hashlib.sha256()
        self._suffix = _SUFFIX if algorithm == "blake3" else ""

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece."""
        self._hash.update(data)

    def digest(self) -> str:
        """The digest of what was added so far."""
        return self._hash.hexdigest() + self._suffix

    def copy(self) -> Digester:
        """Another one that was given the same so far."""
        other = copy(self)
        other._hash = self._hash.copy()  # noqa: SLF001  (the same class)
        return other


def digest_of(data: bytes | memoryview, algorithm: DigestAlgorithm = "sha256") -> str:
    """The digest of bytes. Releases the GIL for long ones."""
    if algorithm == "sha256":
        return hashlib.sha256(data).hexdigest()
    return blake3(data).hexdigest() + _SUFFIX
