"""The digest that identifies bytes wherever an attacker might substitute others.

SHA-256, for models, updates, layouts and the journal's chain. An attacker who finds two updates
with the same digest can have one admitted and the other applied, and blame a device for it. With
xxh3, which is built only for speed, that takes less than a second. SHA-256 is the fastest
collision-resistant digest here, since processors have instructions for it (1.8 GB/s; BLAKE2b
0.9 GB/s). xxh3 remains where only bit rot matters (``trainer/workspace.py``).
"""

from __future__ import annotations

import hashlib


def digest_of(data: bytes | memoryview) -> str:
    """SHA-256 of the bytes as 64 hexadecimal characters. Releases the GIL for long inputs."""
    return hashlib.sha256(data).hexdigest()
