"""A vector for each device: what AFA-CS and SCAFFOLD remember of them."""

from __future__ import annotations

import os
import tempfile

import numpy as np

from broker.errors import FedstreamError
from broker.layout import Floats

IN_MEMORY = 1 << 30  # bytes; more are in a file


class DeviceVectors:
    """M vectors of ``floats`` float32 each, zero until they are written.

    Where they are larger than a gigabyte they lie in a file of their own, which nobody else sees
    and which ends with the process (``TMPDIR`` says where; FedstreamError without room there): the
    journal has what is in it.
    """

    def __init__(self, devices: int, floats: int, *, in_memory: int = IN_MEMORY) -> None:
        self.heard: set[int] = set()  # whose vector was ever written
        self.changed: set[int] = set()  # since whoever reads this emptied it
        self._vectors = self._empty(devices, floats, in_memory)
        self._in_memory = in_memory

    @staticmethod
    def _empty(devices: int, floats: int, in_memory: int) -> Floats:
        size = 4 * devices * floats
        if size <= in_memory:
            return np.zeros((devices, floats), np.float32)
        try:
            with tempfile.TemporaryFile(prefix="fedstream-devices-") as file:
                if hasattr(os, "posix_fallocate"):  # a disk that is full later kills by a signal
                    os.posix_fallocate(file.fileno(), 0, size)
                return np.memmap(file, np.float32, "w+", shape=(devices, floats))
        except OSError as error:
            raise FedstreamError(
                f"no room for {devices} devices' vectors, {size} bytes: {error.strerror}: set "
                "TMPDIR to a folder that has it"
            ) from error

    def __len__(self) -> int:
        return len(self._vectors)

    def __getitem__(self, device: int) -> Floats:
        """The device's vector, to read."""
        vector: Floats = self._vectors[device]
        vector.flags.writeable = False
        return vector

    def write(self, device: int) -> Floats:
        """The device's vector, to write into."""
        self.heard.add(device)
        self.changed.add(device)
        vector: Floats = self._vectors[device]
        return vector

    def copy(self) -> DeviceVectors:
        """The same vectors, once more."""
        copied = DeviceVectors(*self._vectors.shape, in_memory=self._in_memory)
        copied._vectors[:] = self._vectors
        copied.heard, copied.changed = set(self.heard), set(self.changed)
        return copied
