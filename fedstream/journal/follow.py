"""Following a journal that is being written, from its newest segment on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fedstream.core.layout import Model
from fedstream.journal.chain import segments
from fedstream.journal.errors import JournalError
from fedstream.journal.rebuild import Rebuild
from fedstream.journal.records import SUFFIX, EntryRecord
from fedstream.journal.segment import Segment, SegmentEnd
from fedstream.journal.updates import update_of


class FollowedJournal:
    """The run according to a journal, up to the records that are there so far.

    The versions' digests are not compared: the journal's writer made them. Close it; one thread at
    a time may use it.
    """

    def __init__(self, folder: Path) -> None:
        """Begin with the newest segment. Raises JournalError if there is no journal."""
        self.folder = folder
        chain = segments(folder)
        if not chain:
            raise JournalError(f"{folder}: there is no journal")
        self._segment = chain[-1]
        self._end = self._segment.beginning
        self.rebuild = Rebuild(self._segment)

    @property
    def lineage(self) -> str:
        """The id of the run's line of versions."""
        return self._segment.head.lineage

    def close(self) -> None:
        """Close the file."""
        self._segment.close()

    def appended(self) -> Iterator[tuple[EntryRecord, Model | None]]:
        """Yield the records that were written since, each with its update; then stop.

        ``rebuild`` has the run after the record. An update is valid until the next record. Raises
        JournalError where the chain goes on otherwise: then begin anew.
        """
        while True:
            successor = self._successor()
            for record in self._segment.appended(self._end):
                update = None
                if record.payload_bytes:
                    update = update_of(self._segment, record, self.rebuild.spare())
                self.rebuild.take(record, update)
                self._end = SegmentEnd(self._segment.path, record.end, record.chain)
                yield record.entry, update
                if update is not None:
                    self.rebuild.free(update)
            if successor is None:
                return
            self._go_on(successor)

    def _successor(self) -> Segment | None:
        """The next segment, before which no record is added any more; None while there is none."""
        name = self._segment.path.name
        names = (path.name for path in self.folder.iterdir() if path.name.endswith(SUFFIX))
        if max(names, default=name) <= name:
            return None
        for one in segments(self.folder):
            if one.head.predecessor == name and one.standing.why == "continued":
                return one
        raise JournalError(f"{self.folder}: no segment continues {name}")

    def _go_on(self, successor: Segment) -> None:
        follows = successor.follows
        if follows is None or (follows.at, follows.chain) != (self._end.at, self._end.chain):
            raise JournalError(f"{successor.path}: does not follow what was read before it")
        self._segment.close()
        self._segment, self._end = successor, successor.beginning
        self.rebuild = Rebuild(successor)
