"""The models of a journal's versions, made again on demand and never far from where one has been.

A version is made from the nearest checkpoint before it, which is at most a segment away. On the way
copies are left behind, so that the next look nearby begins there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedstream.broker.layout import Layout, Model
from fedstream.journal import (
    JournalError,
    NotRecorded,
    Record,
    Segment,
    Standing,
    Taken,
    cuts,
    opened,
)
from fedstream.journal.inspection import Move, moves
from fedstream.journal.rebuild import Rebuild

_MEMORY = 256 << 20  # bytes of models that are kept
_STRIDE = 16  # versions between two copies, if there is memory for all
_SEGMENT = 4000  # versions that a segment usually has


class Unwanted(Exception):
    """Whoever asked does not wait for the answer any more."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Where a rebuild stood after a version was made."""

    segment: int
    record: Record
    rebuild: Rebuild


class Past:
    """A journal's versions, to walk along. Close it; one thread at a time may use it."""

    def __init__(self, journal: Path, *, memory: int = _MEMORY) -> None:
        """Open a journal's folder, or one segment. Raises JournalError."""
        with ExitStack() as stack:
            chain = stack.enter_context(opened(journal))
            self._closing = stack.pop_all()
        self.journal = journal
        self._chain = list(cuts(chain))
        self.head = chain[-1].head
        self.layout: Layout = chain[-1].layout
        fit = memory // max(1, 2 * self.layout.nbytes)
        self._most = fit if fit > 1 else 0
        self._stride = max(_STRIDE, -(-_SEGMENT // fit)) if fit else 0
        self._copies: OrderedDict[int, _Copy] = OrderedDict()  # by version, least used first
        self._origin: Model | None = None

    def close(self) -> None:
        """Close the files."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    @property
    def origin(self) -> Model:
        """The model of the oldest version that was kept."""
        if self._origin is None:
            segment, _ = self._chain[0]
            self._origin = Rebuild(segment).progress.state.model
            segment.close()
        return self._origin

    def digest(self, segment: str, offset: int | None) -> str:
        """The digest of the version that a record made; None: that of a segment's checkpoint.

        Raises JournalError.
        """
        with self._segment(segment) as one:
            found = one.standing.digest if offset is None else one.at(offset).entry.digest
        return str(found)

    def taken(self, segment: str, offset: int) -> Taken:
        """The message of an update's record. Raises JournalError."""
        with self._segment(segment) as one:
            entry = one.at(offset).entry
        if not isinstance(entry, Taken):
            raise JournalError(f"{one.path}: no update at byte {offset}: the index is of another")
        return entry

    def _segment(self, name: str) -> Segment:
        for one, _ in self._chain:
            if one.path.name == name:
                return one
        raise JournalError(f"{self.journal}: {name} is gone")

    def model(self, version: int, is_wanted: Callable[[], bool] = lambda: True) -> Model:
        """A copy of a version's model. Raises JournalError, Unwanted."""
        move = next(self.walk(version, is_wanted))
        assert move.after is not None  # noqa: S101  (walk() yields no others)
        return move.after.copy()

    def walk(self, version: int, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[Move]:
        """What happened from a version on: first the move that made it, then all that followed.

        The first has no update. Raises JournalError; NotRecorded where weights are missing;
        Unwanted once ``is_wanted`` says no.
        """
        first = self._nearest(version)
        begun = False
        for number in range(first, len(self._chain)):
            segment, cut = self._chain[number]
            known = self._known(version, number) if number == first else None
            rebuild = known.rebuild.copy() if known else Rebuild(segment)
            if known is not None and known.rebuild.progress.state.version == version:
                begun, model = True, rebuild.progress.state.model
                yield Move(known.record, known.record.entry, None, None, model)
            try:
                after = known.record if known else None
                for move in moves(segment, cut, rebuild=rebuild, after=after):
                    if not is_wanted():
                        raise Unwanted
                    if move.after is None:
                        raise NotRecorded(
                            f"{move.record.place.where}: models after version "
                            f"{segment.standing.version} cannot be rebuilt: updates were recorded "
                            "without their weights (journal.weights = false)"
                        )
                    if isinstance(move.message, Standing):
                        if begun and move.message.why == "continued":
                            continue
                    else:
                        self._keep(number, move, rebuild)
                    if not begun and move.is_made and move.message.version == version:
                        begun = True
                        yield Move(move.record, move.message, move.before, None, move.after)
                    elif begun:
                        yield move
            finally:
                segment.close()
        if not begun:
            raise JournalError(f"{self.journal}: version {version} is not in the journal")

    def _nearest(self, version: int) -> int:
        """The number of the newest segment that begins at or before a version."""
        for number in range(len(self._chain) - 1, -1, -1):
            if self._chain[number][0].standing.version <= version:
                return number
        oldest = self._chain[0][0].standing.version
        raise JournalError(
            f"{self.journal}: version {version} is no longer kept; the oldest is {oldest}"
        )

    def _known(self, version: int, segment: int) -> _Copy | None:
        """The nearest copy in a segment, at or before a version."""
        there = [at for at, one in self._copies.items() if one.segment == segment and at <= version]
        if not there:
            return None
        self._copies.move_to_end(max(there))
        return self._copies[max(there)]

    def _keep(self, segment: int, move: Move, rebuild: Rebuild) -> None:
        """Leave a copy behind, now and then. Vectors of devices would take too much memory."""
        version = move.message.version
        if not (self._most and move.is_made and version % self._stride == 0):
            return
        if version in self._copies or rebuild.progress.state.memory.devices is not None:
            return
        self._copies[version] = _Copy(segment, move.record, rebuild.copy())
        while len(self._copies) > self._most:
            self._copies.popitem(last=False)
