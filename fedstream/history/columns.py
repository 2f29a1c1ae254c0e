"""A journal's versions and updates as arrays: what a page needs of 100,000 of them at once.

No payload is read. Texts that few pages ask for (task, trainer, digests) stay in the journal: a row
knows where its record is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.broker.messages import OUTCOMES

RowArray: TypeAlias = npt.NDArray[Any]

MADE = np.dtype(
    [
        ("version", "i8"),
        ("time", "f8"),  # seconds since 1970; of a simulation, since 0
        ("end", "i8"),  # of its updates: the number of the first that came after it
        ("begins", "?"),  # a checkpoint that no update made: the journal's first, or one adopted
        ("segment", "i4"),
        ("offset", "i8"),  # of the record that made it; NONE: a checkpoint
    ]
)
UPDATE = np.dtype(
    [
        ("version", "i8"),  # the newest one after it
        ("time", "f8"),
        ("device", "i8"),
        ("tau", "i8"),
        ("staleness", "i8"),
        ("weight", "f8"),
        ("outcome", "i1"),  # its number in OUTCOMES
        ("reason", "i4"),  # its number in the journal's reasons
        ("bytes", "i8"),
        ("samples", "i8"),
        ("steps", "i8"),
        ("loss", "f8"),  # NaN: not known
        ("norm", "f8"),  # how far it alone would move the parameters; NaN: not known
        ("seconds", "f8"),  # that the device trained
        ("waited", "f8"),  # seconds from admission to decision
        ("segment", "i4"),
        ("offset", "i8"),  # of its record
    ]
)
NONE = -1  # in place of a version or an offset: there is none
_USED = tuple(OUTCOMES.index(name) for name in ("applied", "buffered"))


@dataclass
class Reasons:
    """Reasons by number; 0 is no reason."""

    names: list[str] = field(default_factory=lambda: [""])

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def number(self, name: str) -> int:
        """The number of a reason, which is added if it is new."""
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]


@dataclass(frozen=True)
class SegmentRows:
    """One segment's rows. ``segment`` is not set in them, and ``end`` counts from its first."""

    made: RowArray
    updates: RowArray
    finished: str | None  # why the run is over, if the segment says so
    damage: str | None = None  # what could not be read after these rows


@dataclass(frozen=True)
class Columns:
    """A journal's versions and updates, oldest first."""

    segments: tuple[str, ...]  # file names
    made: RowArray
    updates: RowArray
    reasons: tuple[str, ...]
    finished: str | None
    damage: tuple[str, ...]

    @cached_property
    def numbers(self) -> npt.NDArray[np.int64]:
        """The versions' numbers, ascending, each once."""
        return self.made["version"][self.places]

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """The row of each of the numbers; the newest counts if a version was made again."""
        versions = self.made["version"]
        if (versions[1:] > versions[:-1]).all():  # in any journal but of a run that was adopted
            return np.arange(len(versions))
        _, last = np.unique(versions[::-1], return_index=True)
        found: npt.NDArray[np.int64] = len(versions) - 1 - last
        return found

    def _place(self, version: int) -> int:
        """A version's row. Raises KeyError."""
        if not self.has(version):
            raise KeyError(version)
        return int(self.places[np.searchsorted(self.numbers, version)])

    @cached_property
    def contained(self) -> npt.NDArray[np.int64]:
        """For each update the version that contains it, or NONE."""
        found = np.full(len(self.updates), NONE, np.int64)
        if len(self.updates):
            row = np.searchsorted(self.made["end"], np.arange(len(self.updates)), side="right")
            there = row < len(self.made)
            row = np.minimum(row, len(self.made) - 1)
            there &= self.used & ~self.made["begins"][row]
            found[there] = self.made["version"][row[there]]
        return found

    @cached_property
    def used(self) -> npt.NDArray[np.bool_]:
        """For each update whether it went into a model, or waits to."""
        return np.isin(self.updates["outcome"], _USED)

    def row(self, version: int) -> Any:
        """A version's row. Raises KeyError."""
        return self.made[self._place(version)]

    def has(self, version: int) -> bool:
        """Whether the journal has the version."""
        at = int(np.searchsorted(self.numbers, version))
        return at < len(self.numbers) and int(self.numbers[at]) == version

    def at(self, update: int) -> tuple[str, int]:
        """The segment's name and the offset of an update's record."""
        row = self.updates[update]
        return self.segments[int(row["segment"])], int(row["offset"])

    def since_previous(self, version: int) -> tuple[int, int]:
        """The numbers of the updates that were decided after the version before this one.

        From the first to just after the last; they are the used ones in it and those refused
        meanwhile. Raises KeyError.
        """
        place = self._place(version)
        end = int(self.made["end"][place])
        if self.made["begins"][place]:
            return end, end
        return (int(self.made["end"][place - 1]) if place else 0), end

    def until(self, version: int) -> Columns:
        """What there was when a version was made. Raises KeyError."""
        place = self._place(version)
        end = int(self.made["end"][place])
        return replace(self, made=self.made[: place + 1], updates=self.updates[:end])

    def continues(self, before: Columns) -> bool:
        """Whether this has all that an earlier look found, and then perhaps more."""
        return (
            self.segments[: len(before.segments)] == before.segments
            and self.made[: len(before.made)].tobytes() == before.made.tobytes()
        )

    def nearest(self, version: int) -> int:
        """The version that the journal has, nearest to a number."""
        place = int(np.searchsorted(self.numbers, version))
        around = self.numbers[max(0, place - 1) : place + 1]
        return int(min(around, key=lambda one: abs(int(one) - version)))


def joined(
    segments: Sequence[str], parts: Sequence[SegmentRows], reasons: Sequence[str]
) -> Columns:
    """The parts of all segments as one."""
    return Columns(
        tuple(segments),
        _numbered([part.made for part in parts], MADE, [len(part.updates) for part in parts]),
        _numbered([part.updates for part in parts], UPDATE),
        tuple(reasons),
        parts[-1].finished if parts else None,
        tuple(part.damage for part in parts if part.damage is not None),
    )


def _numbered(parts: Sequence[RowArray], of: Any, lengths: Sequence[int] = ()) -> RowArray:
    """Parts joined, with the numbers of their segments, and their ends counted from the first."""
    rows = np.concatenate([np.empty(0, of), *parts])
    rows["segment"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    if lengths:
        before = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        rows["end"] += before[rows["segment"]]
    return rows


def different(values: RowArray) -> RowArray:
    """The different ones of some numbers, ascending.

    Of numpy.unique this is the form that does not load numpy.ma, which takes 20 ms.
    """
    found, _ = np.unique(values, return_counts=True)
    return found


def each(rows: RowArray) -> Iterator[Any]:
    """RowArray one by one, with their fields as Python's numbers."""
    names = rows.dtype.names or ()
    for values in rows.tolist():
        yield dict(zip(names, values, strict=True))
