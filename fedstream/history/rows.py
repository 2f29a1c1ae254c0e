"""Reading a segment's rows: what its records say of versions and updates.

Messages of one shape are read at once. A segment in which anything is not as it should be is read
record by record, which tells what is wrong, and where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import nan
from typing import Any

import numpy as np

from fedstream.broker.messages import OUTCOMES
from fedstream.history.columns import MADE, NONE, UPDATE, Reasons, RowArray, SegmentRows
from fedstream.journal import (
    Cut,
    EntryRecord,
    JournalDamaged,
    JournalError,
    Segment,
    Standing,
    Taken,
    entries,
)
from fedstream.journal.alike import Alike, Path, alike
from fedstream.journal.records import is_used

_HIGHEST = 2**63 - 1  # that a column holds

_NUMBERS: dict[str, Path] = {
    "version": ("version",), "time": ("time",), "device": ("upload", "device"),
    "tau": ("upload", "tau"), "staleness": ("staleness",), "bytes": ("upload", "size"),
    "samples": ("upload", "samples"), "steps": ("upload", "steps"), "loss": ("upload", "loss"),
    "seconds": ("upload", "seconds"),
}  # fmt: skip
"""Where a row's numbers are in an update's message."""
_OF_USED: dict[str, Path] = {
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
    """Read a segment. ``first``: the journal begins with it. ``read`` is told of bytes passed.

    A damaged record ends the part. Raises JournalError if the file can't be read.
    """
    said = segment.standing
    begun = [(said.version, said.time, 0, True, 0, NONE)] if begins(said, first=first) else []
    rows = np.array(begun, MADE)
    try:
        return _together(segment, cut, reasons, rows, read)
    except JournalError:  # damage, or a torn tail
        return _one_by_one(segment, cut, reasons, rows)


def begins(said: Standing, *, first: bool) -> bool:
    """Whether a segment's checkpoint is a version that no earlier segment made."""
    return first or said.why != "continued"


# together


def _together(
    segment: Segment,
    cut: Cut | None,
    reasons: Reasons,
    begun: RowArray,
    read: Callable[[int], object],
) -> SegmentRows:
    """All rows. Raises JournalError if there is anything that is not as it should be."""
    made, updates, finished = [begun], [np.empty(0, UPDATE)], segment.standing.finished
    passed = before = 0
    for batch in segment.messages(cut):
        count = len(batch.messages)
        rows, taken = np.empty(count, UPDATE), np.zeros(count, bool)
        makes, over = np.zeros(count, bool), (-1, finished)
        for group in alike(batch.messages):
            entry, places = group.sample, group.places
            taken[places], makes[places] = isinstance(entry, Taken), entry.digest is not None
            _fill(rows, group, reasons)
            if entry.finished:
                over = max(over, (int(places[-1]), entry.finished), key=lambda one: one[0])
        rows["segment"], rows["offset"] = 0, batch.offsets
        new = np.zeros(int(makes.sum()), MADE)
        for name in ("version", "time", "offset"):
            new[name] = rows[name][makes]
        new["end"] = before + np.cumsum(taken)[makes]
        made.append(new)
        updates.append(rows[taken])
        before, finished = before + len(updates[-1]), over[1]
        read(batch.end - passed)
        passed = batch.end
    return SegmentRows(np.concatenate(made), np.concatenate(updates), finished)


def _fill(rows: RowArray, group: Alike, reasons: Reasons) -> None:
    """Fill in a group's rows. Of what is no update, only version and time are known."""
    entry, places = group.sample, group.places
    names = _NUMBERS
    if isinstance(entry, Taken):
        rows[places] = _update(entry, reasons, 0)
        names = _NUMBERS | _OF_USED if is_used(entry) else _NUMBERS
    else:
        rows["version"][places], rows["time"][places] = _whole(entry.version), entry.time
    for name, path in names.items():
        if path in group.numbers:
            values = group.numbers[path]
            rows[name][places] = np.minimum(values, _HIGHEST) if values.dtype == ">u8" else values
    if isinstance(entry, Taken) and ("received",) in group.numbers:
        waited = rows["time"][places] - group.numbers["received",]
        rows["waited"][places] = np.maximum(waited, 0.0)


# one by one


def _one_by_one(
    segment: Segment, cut: Cut | None, reasons: Reasons, begun: RowArray
) -> SegmentRows:
    made: list[tuple[Any, ...]] = []
    updates: list[tuple[Any, ...]] = []
    finished, damage = segment.standing.finished, None
    try:
        for offset, entry in _entries(segment, cut):
            if isinstance(entry, Taken):
                updates.append(_update(entry, reasons, offset))
            if entry.digest is not None:
                made.append((_whole(entry.version), entry.time, len(updates), False, 0, offset))
            finished = entry.finished or finished
    except JournalDamaged as error:
        damage = str(error)
    rows = np.concatenate([begun, np.array(made, MADE)])
    return SegmentRows(rows, np.array(updates, UPDATE), finished, damage)


def _entries(segment: Segment, cut: Cut | None) -> Iterator[tuple[int, EntryRecord]]:
    for record, entry in entries(segment, cut):
        yield record.place.offset, entry


def _update(entry: Taken, reasons: Reasons, offset: int) -> tuple[Any, ...]:
    upload = entry.upload
    return (
        _whole(entry.version), entry.time, _whole(upload.device), _whole(upload.tau),
        _whole(entry.staleness), entry.weight if is_used(entry) else nan,
        OUTCOMES.index(entry.outcome), reasons.number(entry.reason), _whole(upload.size),
        _whole(upload.samples), _whole(upload.steps),
        nan if upload.loss is None else upload.loss,
        entry.sizes[0] if is_used(entry) and entry.sizes else nan,
        upload.seconds, max(0.0, entry.time - entry.received), 0, offset,
    )  # fmt: skip


def _whole(number: int) -> int:
    """A count as it fits an array; a foreign journal may hold any."""
    return min(number, _HIGHEST)
