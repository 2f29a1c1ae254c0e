"""An ordered set of devices with fast access to the n-th."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import compress
from typing import Self, overload

from fedstream.runtime.task_settings import Rated


class DeviceSet(Rated):
    """Devices below ``limit``, in ascending order; reads as a sequence.

    A Fenwick tree (A New Data Structure for Cumulative Frequency Tables, 1994) over one bit for
    each device: adding, discarding, and finding the n-th take log2(limit) steps.
    """

    def __init__(
        self, limit: int, members: Iterable[int] = (), shares: Sequence[int] | None = None
    ) -> None:
        """``shares``: the rate of every device, for proportional draws; None: equal rates."""
        self._limit = limit
        self._has = bytearray(limit)
        for device in members:
            self._has[device] = 1
        self._size = sum(self._has)
        self._sums = _tree(self._has)
        self._shares = shares
        # Integers, as sums of floats would drift.
        held = [] if shares is None else [s * has for s, has in zip(shares, self._has, strict=True)]
        self._total = sum(held)
        self._totals = _tree(held)
        self._top = 1 << limit.bit_length() >> 1
        self._discarded: list[int] | None = None  # inside a `with` block

    def add(self, device: int) -> None:
        """Add a device. Raises IndexError if it is not below the limit."""
        if not self._has[device]:
            self._change(device, 1)

    def discard(self, device: int) -> None:
        """Remove a device if it is there."""
        if device in self:
            self._change(device, -1)
            if self._discarded is not None:
                self._discarded.append(device)

    def pop(self, place: int) -> int:
        """Remove the device at ``place`` and return it. Raises IndexError."""
        device = self[place]
        self.discard(device)
        return device

    def __enter__(self) -> Self:
        """Restore, after the block, the devices discarded inside it. Add none inside it."""
        self._discarded = []
        return self

    def __exit__(self, *_error: object) -> None:
        discarded, self._discarded = self._discarded, None
        for device in discarded or ():
            self.add(device)

    def _change(self, device: int, by: int) -> None:
        self._has[device] += by
        self._size += by
        _add(self._sums, device, by)
        if self._shares is not None:
            self._total += by * self._shares[device]
            _add(self._totals, device, by * self._shares[device])

    def __len__(self) -> int:
        return self._size

    def __contains__(self, device: object) -> bool:
        return isinstance(device, int) and 0 <= device < self._limit and bool(self._has[device])

    def __iter__(self) -> Iterator[int]:
        return compress(range(self._limit), self._has)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        if isinstance(place, slice):
            return tuple(self)[place]
        if place < 0:
            place += self._size
        if not 0 <= place < self._size:
            raise IndexError(f"there are {self._size} devices in the set")
        return self._found(self._sums, place)

    def _found(self, sums: Sequence[int], total: int) -> int:
        """The first device with which the running total exceeds ``total``."""
        at, step, limit = 0, self._top, self._limit
        while step:
            if at + step <= limit and sums[at + step] <= total:
                at += step
                total -= sums[at]
            step >>= 1
        return at

    @property
    def is_rated(self) -> bool:
        """Whether devices have shares."""
        return self._shares is not None

    def place_at(self, share: float) -> int:
        """The place where the running total of shares exceeds ``share`` (below 1) of the total."""
        above, below = share.as_integer_ratio()
        return self.index(self._found(self._totals, above * self._total // below))

    def index(self, device: int, start: int = 0, stop: int | None = None) -> int:
        """The place of a device. Raises ValueError if it is not between ``start`` and ``stop``."""
        place, at = 0, device if device in self else 0
        while at > 0:
            place += self._sums[at]
            at -= at & -at
        if device not in self or not start <= place < (self._size if stop is None else stop):
            raise ValueError(f"device {device} is not there")
        return place


def _tree(values: Sequence[int]) -> list[int]:
    """A Fenwick tree of values: element i is the sum of (i & -i) values that end before i."""
    sums = [0, *values]
    for at in range(1, len(sums)):
        above = at + (at & -at)
        if above < len(sums):
            sums[above] += sums[at]
    return sums


def _add(sums: MutableSequence[int], at: int, by: int) -> None:
    at += 1
    limit = len(sums)
    while at < limit:
        sums[at] += by
        at += at & -at
