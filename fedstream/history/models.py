"""The models of a journal's versions, rebuilt on demand from checkpoints and cached copies.

A version is rebuilt from the nearest copy or checkpoint before it, at most a segment away. Rebuilds
leave copies behind for later requests; :meth:`fill` adds copies throughout the run while there are
no requests.

Only copied models are compared with their digests. This also checks all updates before, since any
other update would have made another model. If a digest differs, the rebuild is repeated with a
check of each record, which finds the damaged one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedstream.core.layout import Layout, Model
from fedstream.journal import (
    JournalError,
    NotRecorded,
    Record,
    Segment,
    Standing,
    Taken,
    cuts,
    entries,
    opened,
)
from fedstream.journal.inspection import Move, moves
from fedstream.journal.rebuild import Rebuild, rule_of
from fedstream.journal.updates import update_of

MEMORY = 256 << 20  # bytes of models that are kept
_BESIDES = 8 << 10  # bytes that a copy takes besides its models
_STRIDE = 64  # versions between two copies, if there is memory for all
_SEGMENT = 4000  # versions that the newest segment usually has in the end
FILLED = 10 << 30  # bytes of the journal that are read for copies that nobody asked for


class Unwanted(Exception):
    """The request was abandoned: its client has left."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """The state of a rebuild after a version."""

    segment: str  # file name
    record: Record
    rebuild: Rebuild

    @property
    def version(self) -> int:
        return self.rebuild.progress.state.version


class JournalModels:
    """Rebuilds models of a journal's versions. Close it; one thread at a time may use it."""

    def __init__(self, journal: Path, *, memory: int = MEMORY) -> None:
        """Open a journal's folder, or one segment. Raises JournalError."""
        with ExitStack() as stack:
            chain = stack.enter_context(opened(journal))
            self._closing = stack.pop_all()
        self.journal = journal
        self.memory = memory
        self._chain = list(cuts(chain))
        self.head = chain[-1].head
        self.layout: Layout = chain[-1].layout
        models = 2 + len(rule_of(chain[-1]).vector_names)  # of a copy: the model, the sum, vectors
        fit = memory // (models * self.layout.nbytes + _BESIDES)
        self._most = fit if fit > 1 else 0
        versions = chain[-1].standing.version + _SEGMENT - chain[0].standing.version
        # Some of the copies that fit are near the version at which a reader looks.
        self._stride = max(_STRIDE, -(-versions // max(1, fit * 3 // 4)))
        self._copies: OrderedDict[int, _Copy] = OrderedDict()  # by version, least used first
        self._origin: Model | None = None
        self._filled: dict[str, int] = {}  # segment -> version up to which copies were left
        self._full: set[str] = set()  # segments in which they were left to the end
        self._filling = 0  # bytes that were read for them
        self._room = Model(self.layout)  # for one update at a time

    def reopened(self) -> JournalModels:
        """The journal opened anew, with appended records and the copies so far; closes this object.

        The earlier records must be the same. Raises JournalError.
        """
        self.close()
        other = JournalModels(self.journal, memory=self.memory)
        newest = self._name(len(self._chain) - 1)
        other._copies, other._origin = self._copies, self._origin
        other._filled, other._full = self._filled, self._full - {newest}
        other._filling = self._filling
        return other

    def _name(self, number: int) -> str:
        return self._chain[number][0].path.name

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
        """The digest of a record's version; ``offset`` None: of the segment's checkpoint.

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
        """Yield the moves from a version on, beginning with the move that made the version.

        The first move has no update. Raises JournalError; NotRecorded where weights are missing;
        Unwanted once ``is_wanted()`` is false.
        """
        first = self._nearest(version)
        copy, begun = self._near(version, first, is_wanted), False
        if copy is not None:
            rebuild = copy.rebuild.copy()
            model = rebuild.progress.state.model
            yield Move(copy.record, copy.record.entry, None, None, model)
            yield from self._moves(first, copy.record, rebuild, is_wanted)
            first, begun = first + 1, True
        for number in range(first, len(self._chain)):
            rebuild = Rebuild(self._chain[number][0])
            for move in self._moves(number, None, rebuild, is_wanted):
                if isinstance(move.message, Standing) and begun and move.message.why == "continued":
                    continue
                if begun:
                    yield move
                elif move.is_made and move.message.version == version:
                    begun = True
                    yield Move(move.record, move.message, move.before, None, move.after)
        if not begun:
            raise JournalError(f"{self.journal}: version {version} is not in the journal")

    def _moves(
        self, number: int, after: Record | None, rebuild: Rebuild, is_wanted: Callable[[], bool]
    ) -> Iterator[Move]:
        """Yield a segment's moves, each with its models, all checked."""
        segment, cut = self._chain[number]
        try:
            for move in moves(segment, cut, rebuild=rebuild, after=after):
                if not is_wanted():
                    raise Unwanted
                if move.after is None:
                    raise NotRecorded(
                        f"{move.record.place.where}: models after version "
                        f"{segment.standing.version} cannot be rebuilt: updates were recorded "
                        "without their weights (journal.weights = false)"
                    )
                yield move
        finally:
            segment.close()

    def _nearest(self, version: int) -> int:
        """The number of the newest segment that begins at or before a version."""
        for number in range(len(self._chain) - 1, -1, -1):
            if self._chain[number][0].standing.version <= version:
                return number
        oldest = self._chain[0][0].standing.version
        raise JournalError(
            f"{self.journal}: version {version} is no longer kept; the oldest is {oldest}"
        )

    # copies

    def fill(self, version: int, is_wanted: Callable[[], bool], most: int = FILLED) -> None:
        """Add copies throughout the run, first near a version. Raises JournalError, Unwanted.

        Stops once there are copies of all segments, or ``most`` bytes were read for copies.
        """
        here = self._nearest(version)
        for number in sorted(range(len(self._chain)), key=lambda one: abs(one - here)):
            if not self._most or self._filling >= most:
                return
            name, (segment, _) = self._name(number), self._chain[number]
            if name in self._full:
                continue
            begin = self._known(self._filled.get(name, segment.standing.version), number)
            at = segment.beginning.at if begin is None else begin.record.end
            for passed in self._steps(number, begin, None, is_wanted):
                self._filling += passed.record.end - at
                self._filled[name], at = passed.version, passed.record.end
            self._full.add(name)

    def _near(self, version: int, number: int, is_wanted: Callable[[], bool]) -> _Copy | None:
        """A copy of a version; None for a segment's first version, which needs none.

        None also if copies take too much memory, or a record is damaged.
        """
        found = self._known(version, number)
        begin = self._chain[number][0].standing.version
        if not self._most or (found is None and version == begin):
            return None
        try:
            if found is None or found.version < version:
                for passed in self._steps(number, found, version, is_wanted):
                    found = passed
        except JournalError:  # the way that checks each record tells where
            return None
        return found if found is not None and found.version == version else None

    def _known(self, version: int, number: int) -> _Copy | None:
        """The nearest copy in a segment, at or before a version."""
        name = self._name(number)
        there = [at for at, one in self._copies.items() if at <= version and one.segment == name]
        if not there:
            return None
        self._copies.move_to_end(max(there))
        return self._copies[max(there)]

    def _steps(
        self, number: int, begin: _Copy | None, until: int | None, is_wanted: Callable[[], bool]
    ) -> Iterator[_Copy]:
        """Continue a rebuild in a segment, from a copy or the checkpoint; yield each added copy.

        Stops with a copy of version ``until``. Raises JournalError, Unwanted.
        """
        segment, cut = self._chain[number]
        rebuild = begin.rebuild.copy() if begin is not None else Rebuild(segment)
        if rebuild.strategy.remembered is not None:
            return  # vectors of devices would take too much memory
        try:
            for record, entry in entries(segment, cut, begin.record if begin else None):
                if not is_wanted():
                    raise Unwanted
                update = None
                if record.payload_bytes:
                    update = update_of(segment, record, self._room)
                step = rebuild.take(record, update)
                if entry.digest is None or (
                    entry.version % self._stride and entry.version != until
                ):
                    continue
                rebuild.check(record, step)
                yield self._left(number, record, rebuild)
                if entry.version == until:
                    return
        finally:
            segment.close()

    def _left(self, number: int, record: Record, rebuild: Rebuild) -> _Copy:
        """Add a copy to the cache."""
        version = record.entry.version
        self._copies[version] = _Copy(self._name(number), record, rebuild.copy())
        self._copies.move_to_end(version)
        while len(self._copies) > self._most:
            passing = (at for at in self._copies if at % self._stride)  # near versions read once
            del self._copies[next(passing, next(iter(self._copies)))]
        return self._copies[version]
