"""A vector for each device: what AFA-CS and SCAFFOLD remember of them."""

from __future__ import annotations

import os
import tempfile

import numpy as np

from fedstream.broker.errors import FedstreamError
from fedstream.broker.layout import Floats

IN_MEMORY = 1 << 30  # bytes; more are in files
_BLOCK = 64 << 20  # bytes of vectors that room is made for at once
_ROWS = 1024  # and so many of them: each is an object, which takes more than a small vector


class DeviceVectors:
    """M vectors of ``floats`` float32 each, zero until they are written.

    Room is made for those that were written alone, whatever M is said to be. Where they come to
    more than a gigabyte the rest lies in files, which nobody else sees and which end with the
    process (``TMPDIR`` says where; FedstreamError without room there): the journal has what is in
    them.
    """

    def __init__(self, devices: int, floats: int, *, in_memory: int = IN_MEMORY) -> None:
        self.heard: set[int] = set()  # whose vector was ever written
        self.changed: set[int] = set()  # since whoever reads this emptied it
        self._shape = (devices, floats)
        self._in_memory = in_memory
        self._vectors: dict[int, Floats] = {}
        self._free: list[Floats] = []  # made room for, the next one last
        self._bytes = 0  # made room for
        self._zero = np.zeros(floats, np.float32)

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, device: int) -> Floats:
        """The device's vector, to read."""
        self._check(device)
        vector = self._vectors.get(device, self._zero).view()
        vector.flags.writeable = False
        return vector

    def write(self, device: int) -> Floats:
        """The device's vector, to write into."""
        self._check(device)
        if device not in self._vectors:
            if not self._free:
                self._free = self._block()
            self._vectors[device] = self._free.pop()
        self.heard.add(device)
        self.changed.add(device)
        return self._vectors[device]

    def copy(self) -> DeviceVectors:
        """The same vectors, once more."""
        copied = DeviceVectors(*self._shape, in_memory=self._in_memory)
        for device, vector in self._vectors.items():
            copied.write(device)[:] = vector
        copied.heard, copied.changed = set(self.heard), set(self.changed)
        return copied

    def _check(self, device: int) -> None:
        if not 0 <= device < len(self):
            raise IndexError(f"device {device} of {len(self)}")

    def _block(self) -> list[Floats]:
        """Room for some more vectors, all zero."""
        devices, floats = self._shape
        rows = max(1, min(devices - len(self._vectors), _ROWS, _BLOCK // (4 * floats or 1)))
        size = 4 * rows * floats
        self._bytes += size
        if self._bytes <= self._in_memory or not size:
            return list(np.zeros((rows, floats), np.float32))
        try:
            with tempfile.TemporaryFile(prefix="fedstream-devices-") as file:
                if hasattr(os, "posix_fallocate"):  # a disk that is full later kills by a signal
                    os.posix_fallocate(file.fileno(), 0, size)
                return list(np.memmap(file, np.float32, "w+", shape=(rows, floats)))
        except OSError as error:
            raise FedstreamError(
                f"no room for {rows} more devices' vectors, {size} bytes: {error.strerror}: set "
                "TMPDIR to a folder that has it"
            ) from error
