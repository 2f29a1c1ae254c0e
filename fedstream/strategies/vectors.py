"""What a strategy keeps of each device: a vector (AFA-CS, SCAFFOLD) and an integer; and vectors by
name."""

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
    """M vectors of ``floats`` float32 each, and one for each of ``names``; zero until written.

    A named vector belongs to no device, but has a number after the last device's, because journals
    know vectors by number. ``numbers`` has an integer of devices that the strategy chose, such as
    the version at which a vector was written. It may be changed freely; every standing holds it, in
    its order.

    Only written vectors are allocated. Above a gigabyte, they are in unnamed temporary files in
    ``TMPDIR``, deleted with the process, as the journal has their content (FedstreamError if there
    is no room).
    """

    def __init__(
        self, devices: int, floats: int, *, names: tuple[str, ...] = (), in_memory: int = IN_MEMORY
    ) -> None:
        self.devices, self.names = devices, names
        self.heard: set[int] = set()  # devices with a written vector
        self.changed: set[int] = set()  # numbers written since a reader cleared this set
        self.numbers: dict[int, int] = {}  # device -> the strategy's integer, not negative
        self._floats = floats
        self._in_memory = in_memory
        self._vectors: dict[int, Floats] = {}
        self._shared: set[int] = set()  # numbers of vectors that are shared with a copy
        self._free: list[Floats] = []  # allocated, the next one last
        self._zero = np.zeros(floats, np.float32)

    def __contains__(self, key: int | str) -> bool:
        """Whether the vector was ever written."""
        return self._number(key) in self._vectors

    def __getitem__(self, key: int | str) -> Floats:
        """The vector of a device, or with a name, read-only."""
        vector = self._vectors.get(self._number(key), self._zero).view()
        vector.flags.writeable = False
        return vector

    def write(self, key: int | str) -> Floats:
        """The vector of a device, or with a name, to write into."""
        number = self._number(key)
        before = self._vectors.get(number)
        if before is None or number in self._shared:
            if not self._free:
                self._free = self._block()
            self._vectors[number] = self._free.pop()
            if before is not None:
                self._vectors[number][:] = before
                self._shared.discard(number)
        if number < self.devices:
            self.heard.add(number)
        self.changed.add(number)
        return self._vectors[number]

    def copy(self) -> DeviceVectors:
        """A copy-on-write copy: memory doubles on the first write of a vector."""
        copied = DeviceVectors(
            self.devices, self._floats, names=self.names, in_memory=self._in_memory
        )
        copied.heard, copied.changed = set(self.heard), set(self.changed)
        copied.numbers = dict(self.numbers)
        copied._vectors = dict(self._vectors)
        self._shared, copied._shared = set(self._vectors), set(self._vectors)
        copied._free, self._free = self._free, []  # the copy is usually the one written to
        return copied

    def label(self, number: int) -> str:
        """The vector with this number, in words."""
        name = dict(enumerate(self.names, self.devices)).get(number)
        return (
            f"the vector of device {number}" if name is None else f"the strategy's vector {name!r}"
        )

    def _number(self, key: int | str) -> int:
        if isinstance(key, str):
            return self.devices + self.names.index(key)
        if not 0 <= key < self.devices + len(self.names):
            raise IndexError(f"device {key} of {self.devices}")
        return key

    def _block(self) -> list[Floats]:
        """Allocate some more vectors, all zero."""
        floats = self._floats
        lacking = self.devices + len(self.names) - len(self._vectors) + len(self._shared)
        rows = max(1, min(lacking, _ROWS, _BLOCK // (4 * floats or 1)))
        size = 4 * rows * floats
        if 4 * floats * len(self._vectors) + size <= self._in_memory or not size:
            return list(np.zeros((rows, floats), np.float32))
        try:
            return list(on_disk(size).view(np.float32).reshape(rows, floats))
        except OSError as error:
            raise FedstreamError(
                f"no room for {rows} more vectors, {size} bytes: {error.strerror}: set TMPDIR to a "
                "folder with enough space"
            ) from error
