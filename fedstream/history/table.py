"""A recorded run as one table of columns: its versions, and its updates.

Reports, comparisons, pages and data frames take their figures from these rows; the live page has
rows of the same columns. No payload is read. Texts that few ask for (tasks, trainers, digests) stay
in the journal: a row knows where its record is, and :func:`texts` reads them all.

Messages of one shape are read at once. A segment with an irregular record is read record by record,
to find the damage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import nan
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.core.messages import OUTCOMES
from fedstream.journal import (
    Cut,
    EntryRecord,
    JournalDamaged,
    JournalError,
    RoundClosed,
    Segment,
    SumOpened,
    Taken,
    cuts,
    entries,
    opened,
)
from fedstream.journal.record_batches import Alike, alike
from fedstream.journal.record_batches import Path as Keys
from fedstream.journal.records import dropped_by, is_used

RowArray: TypeAlias = npt.NDArray[Any]
# Used updates that were dropped: the number of the first update after, and how many.
Drop: TypeAlias = tuple[int, int]

MADE = np.dtype(
    [
        ("version", "i8"),
        ("time", "f8"),  # seconds since 1970; of a simulation, since 0
        ("end", "i8"),  # of its updates: the number of the first that came after it
        ("begins", "?"),  # a checkpoint that no update made: the journal's first, or one adopted
        ("adopted", "?"),  # from Redis
        ("before", "i8"),  # used updates before a checkpoint, with those that are no longer kept
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
        ("lr", "f8"),
        ("loss", "f8"),  # NaN: not known
        ("norm", "f8"),  # how far it alone would move the parameters; NaN: not known
        ("seconds", "f8"),  # that the device trained
        ("waited", "f8"),  # seconds from admission to decision
        ("segment", "i4"),
        ("offset", "i8"),  # of its record
    ]
)
NONE = -1  # in place of a version or an offset: there is none
HIGHEST = 2**63 - 1  # that a column holds
_USED = tuple(OUTCOMES.index(name) for name in ("applied", "buffered"))


def update_row(
    *,
    version: int | None,
    time: float,
    device: int | None,
    outcome: int,
    reason: int,
    staleness: int | None,
    weight: float | None,
    tau: int = NONE,
    size: int = NONE,
    samples: int = NONE,
    steps: int = NONE,
    lr: float = nan,
    loss: float | None = None,
    norm: float | None = None,
    seconds: float = nan,
    waited: float = nan,
    offset: int = NONE,
) -> tuple[Any, ...]:
    """A row of UPDATE. Unknown values are NONE or NaN."""
    return (
        whole(version),
        time,
        whole(device),
        whole(tau),
        whole(staleness),
        or_nan(weight),
        outcome,
        reason,
        whole(size),
        whole(samples),
        whole(steps),
        lr,
        or_nan(loss),
        or_nan(norm),
        seconds,
        waited,
        0,
        offset,
    )


def whole(number: int | None) -> int:
    """A count for a column, limited because a foreign message may hold any number; None: NONE."""
    return NONE if number is None else min(number, HIGHEST)


def or_nan(value: float | None) -> float:
    """A number for a column; None: NaN."""
    return nan if value is None else value


def is_used_row(rows: RowArray) -> npt.NDArray[np.bool_]:
    """A mask of the updates that are in a model or in a buffer."""
    return np.isin(rows["outcome"], _USED)


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
    """One segment's rows, with ``segment`` not yet set.

    ``end`` counts from the segment's first update.
    """

    made: RowArray
    updates: RowArray
    finished: str | None  # why the run is over, if the segment says so
    damage: str | None = None  # what could not be read after these rows
    drops: tuple[Drop, ...] = ()


@dataclass(frozen=True)
class Columns:
    """A journal's versions and updates, oldest first."""

    segments: tuple[str, ...]  # file names
    made: RowArray
    updates: RowArray
    reasons: tuple[str, ...]
    finished: str | None
    damage: tuple[str, ...]
    drops: tuple[Drop, ...] = ()

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
    def makers(self) -> npt.NDArray[np.int64]:
        """For each update the row of the version that contains it, or NONE."""
        row = np.searchsorted(self.made["end"], np.arange(len(self.updates)), side="right")
        there = self.used & (row < len(self.made))
        row = np.where(there, row, 0)
        if len(self.made):
            there &= ~self.made["begins"][row]
        used = np.flatnonzero(self.used) if self.drops else np.empty(0, np.int64)
        for drop, count in self.drops:
            end = int(np.searchsorted(used, drop))
            there[used[max(0, end - count) : end]] = False
        return np.where(there, row, NONE)

    @cached_property
    def contained(self) -> npt.NDArray[np.int64]:
        """For each update the version that contains it, or NONE."""
        found = np.full(len(self.updates), NONE, np.int64)
        there = self.makers != NONE
        found[there] = self.made["version"][self.makers[there]]
        return found

    @cached_property
    def used(self) -> npt.NDArray[np.bool_]:
        """A mask of the updates that are in a model or in a buffer."""
        return is_used_row(self.updates)

    def count(self) -> npt.NDArray[np.int64]:
        """How many updates each version has."""
        return np.bincount(self.makers[self.makers != NONE], minlength=len(self.made))

    def total(self) -> npt.NDArray[np.int64]:
        """The number of used updates up to each version, including updates no longer kept."""
        found = np.cumsum(self.count())
        for row in np.flatnonzero(self.made["begins"]).tolist():
            found[row:] += max(0, int(self.made["before"][row]) - int(found[row]))
        return found

    def sum(self, name: str) -> npt.NDArray[Any]:
        """The sum of a column over each version's updates."""
        there = self.makers != NONE
        found = np.zeros(len(self.made), self.updates.dtype[name])
        np.add.at(found, self.makers[there], self.updates[name][there])
        return found

    def mean(self, name: str) -> npt.NDArray[np.float64]:
        """The mean of a column over each version's updates; NaN where nothing is known."""
        there = (self.makers != NONE) & np.isfinite(self.updates[name])
        place, length = self.makers[there], len(self.made)
        total = np.bincount(place, self.updates[name][there], length)
        count = np.bincount(place, minlength=length)
        found = np.full(length, nan)
        np.divide(total, count, out=found, where=count > 0)
        return found

    def checked(self) -> Columns:
        """These columns. Raises JournalError if some of the journal could not be read."""
        if self.damage:
            raise JournalError(self.damage[0])
        return self

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
        """The range of the updates decided after the version before: the first, and the end.

        These are the updates used in the version, and those refused meanwhile. Raises KeyError.
        """
        place = self._place(version)
        end = int(self.made["end"][place])
        if self.made["begins"][place]:
            return end, end
        return (int(self.made["end"][place - 1]) if place else 0), end

    def until(self, version: int) -> Columns:
        """The columns up to a version. Raises KeyError."""
        place = self._place(version)
        end = int(self.made["end"][place])
        drops = tuple(one for one in self.drops if one[0] <= end)
        return replace(self, made=self.made[: place + 1], updates=self.updates[:end], drops=drops)

    def continues(self, before: Columns) -> bool:
        """Whether these columns begin with all rows of earlier ones."""
        return (
            self.segments[: len(before.segments)] == before.segments
            and self.made[: len(before.made)].tobytes() == before.made.tobytes()
        )

    def nearest(self, version: int) -> int:
        """The version in the journal that is nearest to a number."""
        place = int(np.searchsorted(self.numbers, version))
        around = self.numbers[max(0, place - 1) : place + 1]
        return int(min(around, key=lambda one: abs(int(one) - version)))


def joined(
    segments: Sequence[str], parts: Sequence[SegmentRows], reasons: Sequence[str]
) -> Columns:
    """The parts of all segments as one."""
    lengths = [len(part.updates) for part in parts]
    begins = np.cumsum([0, *lengths])[:-1].tolist()
    return Columns(
        tuple(segments),
        _numbered([part.made for part in parts], MADE, lengths),
        _numbered([part.updates for part in parts], UPDATE),
        tuple(reasons),
        parts[-1].finished if parts else None,
        tuple(part.damage for part in parts if part.damage is not None),
        tuple(
            (at + one, count)
            for at, part in zip(begins, parts, strict=True)
            for one, count in part.drops
        ),
    )


def _numbered(parts: Sequence[RowArray], of: Any, lengths: Sequence[int] = ()) -> RowArray:
    """The parts joined: ``segment`` is set, and ``end`` counts from the journal's first update."""
    rows = np.concatenate([np.empty(0, of), *parts])
    rows["segment"] = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    if lengths:
        before = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        rows["end"] += before[rows["segment"]]
    return rows


def different(values: RowArray) -> RowArray:
    """The distinct numbers, ascending.

    This form of numpy.unique does not load numpy.ma, which takes 20 ms.
    """
    found, _ = np.unique(values, return_counts=True)
    return found


def each(rows: RowArray) -> Iterator[Any]:
    """Yield each row as a dict by field, with its values as Python's numbers."""
    names = rows.dtype.names or ()
    for values in rows.tolist():
        yield dict(zip(names, values, strict=True))


# reading a segment

_NUMBERS: dict[str, Keys] = {
    "version": ("version",),
    "time": ("time",),
    "device": ("upload", "device"),
    "tau": ("upload", "tau"),
    "staleness": ("staleness",),
    "bytes": ("upload", "size"),
    "samples": ("upload", "samples"),
    "steps": ("upload", "steps"),
    "loss": ("upload", "loss"),
    "seconds": ("upload", "seconds"),
}
"""Where a row's numbers are in an update's message."""
_OF_USED: dict[str, Keys] = {
    "weight": ("weight",),
    "norm": ("sizes", 0),
}  # the same; others' count for nothing


def rows_of(
    segment: Segment,
    cut: Cut | None,
    reasons: Reasons,
    *,
    first: bool,
    read: Callable[[int], object] = lambda _bytes: None,
) -> SegmentRows:
    """Read a segment. ``first``: the journal begins with it. ``read``: called with byte counts.

    A damaged record ends the part. Raises JournalError if the file can't be read.
    """
    said = segment.standing
    counts = said.journalled
    before = counts.get("applied", 0) + counts.get("buffered", 0) - len(said.held)
    begun = (
        [(said.version, said.time, 0, True, said.why == "adopted", before, 0, NONE)]
        if first or said.why != "continued"  # otherwise an earlier segment made it
        else []
    )
    rows = np.array(begun, MADE)
    try:
        return _together(segment, cut, reasons, rows, read)
    except JournalError:  # damage, or a torn tail
        return _one_by_one(segment, cut, reasons, rows)


# together


def _together(
    segment: Segment,
    cut: Cut | None,
    reasons: Reasons,
    begun: RowArray,
    read: Callable[[int], object],
) -> SegmentRows:
    """All rows of a segment, read in groups. Raises JournalError for any irregular record."""
    made, updates, finished = [begun], [np.empty(0, UPDATE)], segment.standing.finished
    passed = before = 0
    drops: list[Drop] = []
    for batch in segment.messages(cut):
        count = len(batch.messages)
        rows, taken = np.empty(count, UPDATE), np.zeros(count, bool)
        makes, over, dropping = np.zeros(count, bool), (-1, finished), list[Drop]()
        for group in alike(batch.messages):
            entry, places = group.sample, group.places
            taken[places], makes[places] = isinstance(entry, Taken), entry.digest is not None
            _fill(rows, group, reasons)
            if isinstance(entry, RoundClosed) or (isinstance(entry, SumOpened) and entry.reason):
                name = "dropped" if isinstance(entry, RoundClosed) else "updates"
                numbers = group.numbers.get((name,), np.full(len(places), dropped_by(entry)))
                dropping += zip(places.tolist(), numbers.tolist(), strict=True)
            if entry.finished:
                over = max(over, (int(places[-1]), entry.finished), key=lambda one: one[0])
        rows["segment"], rows["offset"] = 0, batch.offsets
        new = np.zeros(int(makes.sum()), MADE)
        for name in ("version", "time", "offset"):
            new[name] = rows[name][makes]
        new["end"] = before + np.cumsum(taken)[makes]
        ends = (before + np.cumsum(taken)).tolist()
        drops += [(ends[place], number) for place, number in sorted(dropping) if number]
        made.append(new)
        updates.append(rows[taken])
        before, finished = before + len(updates[-1]), over[1]
        read(batch.end - passed)
        passed = batch.end
    found = np.concatenate(made), np.concatenate(updates)
    return SegmentRows(*found, finished, drops=tuple(drops))


def _fill(rows: RowArray, group: Alike, reasons: Reasons) -> None:
    """Fill in a group's rows. Records of other kinds have only version and time."""
    entry, places = group.sample, group.places
    names = _NUMBERS
    if isinstance(entry, Taken):
        rows[places] = _update(entry, reasons, 0)
        names = _NUMBERS | _OF_USED if is_used(entry) else _NUMBERS
    else:
        rows["version"][places], rows["time"][places] = whole(entry.version), entry.time
    for name, path in names.items():
        if path in group.numbers:
            values = group.numbers[path]
            rows[name][places] = np.minimum(values, HIGHEST) if values.dtype == ">u8" else values
    if isinstance(entry, Taken) and ("received",) in group.numbers:
        waited = rows["time"][places] - group.numbers["received",]
        rows["waited"][places] = np.maximum(waited, 0.0)


# one by one


def _one_by_one(
    segment: Segment, cut: Cut | None, reasons: Reasons, begun: RowArray
) -> SegmentRows:
    made: list[tuple[Any, ...]] = []
    updates: list[tuple[Any, ...]] = []
    drops: list[Drop] = []
    finished, damage = segment.standing.finished, None
    try:
        for offset, entry in _entries(segment, cut):
            if isinstance(entry, Taken):
                updates.append(_update(entry, reasons, offset))
            elif dropped := dropped_by(entry):
                drops.append((len(updates), dropped))
            if entry.digest is not None:
                version, end = whole(entry.version), len(updates)
                made.append((version, entry.time, end, False, False, 0, 0, offset))
            finished = entry.finished or finished
    except JournalDamaged as error:
        damage = str(error)
    rows = np.concatenate([begun, np.array(made, MADE)])
    return SegmentRows(rows, np.array(updates, UPDATE), finished, damage, tuple(drops))


def _entries(segment: Segment, cut: Cut | None) -> Iterator[tuple[int, EntryRecord]]:
    for record, entry in entries(segment, cut):
        yield record.place.offset, entry


def _update(entry: Taken, reasons: Reasons, offset: int) -> tuple[Any, ...]:
    upload, used = entry.upload, is_used(entry)
    return update_row(
        version=entry.version,
        time=entry.time,
        device=upload.device,
        tau=upload.tau,
        staleness=entry.staleness,
        weight=entry.weight if used else None,
        outcome=OUTCOMES.index(entry.outcome),
        reason=reasons.number(entry.reason),
        size=upload.size,
        samples=upload.samples,
        steps=upload.steps,
        lr=upload.lr,
        loss=upload.loss,
        norm=entry.sizes[0] if used and entry.sizes else None,
        seconds=upload.seconds,
        waited=max(0.0, entry.time - entry.received),
        offset=offset,
    )


# texts


class Texts(NamedTuple):
    """Texts of a journal's updates and versions, in the order of its rows."""

    tasks: list[str]
    trainers: list[str]
    sites: list[str]
    digests: list[str]  # of versions

    def of(self, columns: Columns) -> Texts:
        """The texts of the columns' rows, without those of rows that came later."""
        end = len(columns.updates)
        digests = self.digests[: len(columns.made)]
        return Texts(self.tasks[:end], self.trainers[:end], self.sites[:end], digests)


def texts(journal: Path) -> Texts:
    """Read the texts of all rows, record by record. Raises JournalError."""
    found = Texts([], [], [], [])
    with opened(journal) as chain:
        for segment, cut in cuts(chain):
            if segment is chain[0] or segment.standing.why != "continued":
                found.digests.append(segment.standing.digest)
            for _, entry in entries(segment, cut):
                if isinstance(entry, Taken):
                    found.tasks.append(entry.upload.task)
                    found.trainers.append(entry.upload.trainer)
                    found.sites.append(entry.upload.site)
                if entry.digest is not None:
                    found.digests.append(entry.digest)
    return found
