"""Following a journal that is being written, from its newest segment on."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

from fedstream.journal.chain import segments
from fedstream.journal.errors import JournalError
from fedstream.journal.progress import Progress
from fedstream.journal.rebuild import Rebuild
from fedstream.journal.records import SUFFIX
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

    def made(self) -> Generator[Progress]:
        """Follow the records that were written since, and yield the run after each new version.

        ``rebuild`` has the run after the last record. Raises JournalError where the journal goes on
        otherwise, as after a fall-back to Redis's model: begin anew with another object.
        """
        while True:
            successor = self._successor()
            for record in self._segment.appended(self._end):
                update = None
                if record.payload_bytes:
                    update = update_of(self._segment, record, self.rebuild.spare())
                step = self.rebuild.take(record, update)
                if update is not None:
                    self.rebuild.free(update)
                self._end = SegmentEnd(self._segment.path, record.end, record.chain)
                if step.made is not None:
                    yield step.after
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
