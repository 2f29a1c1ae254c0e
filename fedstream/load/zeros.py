"""Updates of zeros: one buffer for all devices, and its digest for each size."""

from __future__ import annotations

from fedstream.broker.digest import digest_of


class Zeros:
    """As many zeros as an update has bytes. In float32 and bfloat16, they are parameters of 0."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")
        self._digests: dict[int, str] = {}

    def of(self, size: int) -> tuple[memoryview, str]:
        """So many bytes, and their digest."""
        if size > len(self._buffer):
            self._buffer = memoryview(bytes(size))
        data = self._buffer[:size]
        if size not in self._digests:
            self._digests[size] = digest_of(data)
        return data, self._digests[size]
