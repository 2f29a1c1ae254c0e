"""A vector for each device, as AFA-CS and SCAFFOLD need."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import numpy.typing as npt

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Floats

IN_MEMORY = 1 << 30  # bytes; the rest is in files
_BLOCK = 64 << 20  # bytes of vectors allocated together,
_ROWS = 1024  # and their number, as each is also an object


def on_disk(size: int) -> npt.NDArray[np.uint8]:
    """Allocate ``size`` zero bytes in an unnamed file of ``TMPDIR``, deleted with the process.

    Raises OSError if there is no room.
    """
    with tempfile.TemporaryFile(prefix="fedstream-vectors-") as file:
        if hasattr(os, "posix_fallocate"):  # else a later write to a full disk kills the process
            os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(file, np.uint8, "w+", shape=(size,))


class DeviceVectors:
    """M vectors of ``floats`` float32 each, zero until they are written.

    Only written vectors are allocated. Above a gigabyte, they are in unnamed temporary files in
    ``TMPDIR``, deleted with the process, as the journal has their content (FedstreamError if there
    is no room).
    """

    def __init__(self, devices: int, floats: int, *, in_memory: int = IN_MEMORY) -> None:
        self.heard: set[int] = set()  # devices with a written vector
        self.changed: set[int] = set()  # devices written since a reader cleared this set
        self._shape = (devices, floats)
        self._in_memory = in_memory
        self._vectors: dict[int, Floats] = {}
        self._shared: set[int] = set()  # devices whose vector is shared with a copy
        self._free: list[Floats] = []  # allocated, the next one last
        self._bytes = 0  # allocated bytes
        self._zero = np.zeros(floats, np.float32)

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, device: int) -> Floats:
        """The device's vector, read-only."""
        self._check(device)
        vector = self._vectors.get(device, self._zero).view()
        vector.flags.writeable = False
        return vector

    def write(self, device: int) -> Floats:
        """The device's vector, to write into."""
        self._check(device)
        before = self._vectors.get(device)
        if before is None or device in self._shared:
            if not self._free:
                self._free = self._block()
            self._vectors[device] = self._free.pop()
            if before is not None:
                self._vectors[device][:] = before
                self._shared.discard(device)
        self.heard.add(device)
        self.changed.add(device)
        return self._vectors[device]

    def copy(self) -> DeviceVectors:
        """A copy-on-write copy: memory doubles on the first write of a vector."""
        copied = DeviceVectors(*self._shape, in_memory=self._in_memory)
        copied.heard, copied.changed = set(self.heard), set(self.changed)
        copied._vectors, copied._bytes = dict(self._vectors), self._bytes
        self._shared, copied._shared = set(self._vectors), set(self._vectors)
        copied._free, self._free = self._free, []  # the copy is usually the one written to
        return copied

    def _check(self, device: int) -> None:
        if not 0 <= device < len(self):
            raise IndexError(f"device {device} of {len(self)}")

    def _block(self) -> list[Floats]:
        """Allocate some more vectors, all zero."""
        devices, floats = self._shape
        lacking = devices - len(self._vectors) + len(self._shared)
        rows = max(1, min(lacking, _ROWS, _BLOCK // (4 * floats or 1)))
        size = 4 * rows * floats
        self._bytes += size
        if self._bytes <= self._in_memory or not size:
            return list(np.zeros((rows, floats), np.float32))
        try:
            return list(on_disk(size).view(np.float32).reshape(rows, floats))
        except OSError as error:
            raise FedstreamError(
                f"no room for the vectors of {rows} more devices, {size} bytes: {error.strerror}: "
                "set "
                "TMPDIR to a folder with enough space"
            ) from error
