"""An index of the ends of older tasks, beside the journal.

When Redis falls back, tasks that ended long ago come again, but a task may have only one record.
The journal has all ends; the index (SQLite, ``ended.sqlite``) finds one without reading the
journal. Ends that leave memory are written to the index before the segment whose standing first
omits them. A missing, damaged or outdated index is rebuilt from the journal. The index is never
ahead of the journal: a task whose record was lost in a power cut has not ended.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

import msgpack

from fedstream.core.records import End
from fedstream.journal.chain import cuts
from fedstream.journal.errors import JournalError, JournalFull
from fedstream.journal.rebuild import end_of
from fedstream.journal.records import Taken
from fedstream.journal.segment import Segment
from fedstream.journal.writer import FILE_MODE, made_folder

NAME = "ended.sqlite"

_WAITING = 10_000  # ends held in memory before they are written to the file
_TABLES = """
CREATE TABLE IF NOT EXISTS ended (task TEXT PRIMARY KEY, version INTEGER, about BLOB) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_version ON ended (version);
CREATE TABLE IF NOT EXISTS journal (lineage TEXT, through TEXT);
"""


class EndedTasks:
    """Ends by task, for as long as the journal has their records."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self.forgotten = 0  # tasks that ended before this version may be missing
        self._database: sqlite3.Connection | None = None
        self._using = Lock()  # the working thread may outlive the awaiting task
        self._opening: object | None = None  # the newest call of open(); None: closed since
        self._waiting: dict[str, End] = {}
        self._greatest = ""  # greatest task id in the index
        self._begins: dict[str, int] = {}  # segment -> its first version, oldest first

    def open(self, lineage: str, chain: Sequence[Segment]) -> list[str]:
        """Open a journal's index, or rebuild it; return the unreadable parts of the journal.

        Raises JournalError.
        """
        self.close()
        self._opening = opening = object()
        self._begins = {segment.path.name: segment.standing.version for segment in chain}
        through = chain[-1].path.name if chain else ""
        try:
            if not self._connect(opening, lineage, through):
                self.path.unlink(missing_ok=True)
                self._connect(opening, lineage, "")
                return self._made_of(chain, lineage)
        except (sqlite3.Error, OSError) as error:
            raise self._failed(error) from error
        return []

    def _connect(self, opening: object, lineage: str, through: str) -> bool:
        """Connect; False if the file is damaged, of another lineage, or behind ``through``."""
        made_folder(self.path.parent)
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, FILE_MODE))
        database = sqlite3.connect(self.path, check_same_thread=False)
        try:
            database.executescript(_TABLES)
            row = database.execute("SELECT lineage, through FROM journal").fetchone()
            [greatest] = database.execute("SELECT max(task) FROM ended").fetchone()
            [found] = database.execute("PRAGMA quick_check(1)").fetchone()  # reads every page
        except sqlite3.DatabaseError as error:
            found = str(error)
        if found != "ok":  # damaged, but the journal has everything
            database.close()
            return False
        if through and (row is None or row[0] != lineage or row[1] < through):
            database.close()
            return False
        with self._using:
            if self._opening is not opening:  # a newer call has replaced this one
                database.close()
                return True
            self._database, self._greatest = database, greatest or ""
        return True

    def _made_of(self, chain: Sequence[Segment], lineage: str) -> list[str]:
        """Rebuild the index from a journal; return the journal's unreadable parts.

        Leaves out the newest segment's records, whose ends recovery keeps in memory after checking
        the payloads.
        """
        unread = []
        for row in chain[0].done() if chain else ():
            self.add(End(*row))
        for number, (segment, cut) in enumerate(list(cuts(chain))[:-1]):
            try:
                for record in segment.records(cut):
                    if isinstance(record.message, Taken):
                        self.add(end_of(record.message))
            except JournalError as error:
                self.forgotten = chain[number + 1].standing.version
                unread.append(str(error))
        if chain:
            self._write(lineage, chain[-1].path.name)
        return unread

    def add(self, end: End) -> None:
        """Add the end of a task. Raises JournalError."""
        self._waiting[end.task] = end
        self._greatest = max(self._greatest, end.task)
        if len(self._waiting) >= _WAITING:
            self._write()

    def get(self, task: str) -> End | None:
        """The end of a task, or None if it isn't in the index. Raises JournalError."""
        if task > self._greatest:  # a new task: ids are ordered by time
            return None
        if task in self._waiting:
            return self._waiting[task]
        if self._database is None:
            return None
        try:
            with self._using:
                asked = self._database.execute("SELECT about FROM ended WHERE task = ?", (task,))
                row = asked.fetchone()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return End(*msgpack.unpackb(row[0])) if row else None

    def write(self, lineage: str, segment: str, version: int) -> None:
        """Write the ends that the standing of ``segment``, about to begin at ``version``, omits.

        Deletes ends from before the oldest segment. Raises JournalError, JournalFull.
        """
        folder = self.path.parent
        self._begins = {
            name: begins for name, begins in self._begins.items() if (folder / name).exists()
        }
        oldest = next(iter(self._begins.values()), version)
        if self._write(lineage, segment, oldest):
            self.forgotten = max(self.forgotten, oldest)
        self._begins[segment] = version

    def _write(self, lineage: str = "", segment: str = "", oldest: int = 0) -> int:
        """Write the waiting ends; delete those before version ``oldest``, and return how many."""
        try:
            with self._using:
                if self._database is None:
                    return 0  # closed meanwhile: the journal has the ends
                rows = [
                    (end.task, end.version or 0, msgpack.packb(tuple(vars(end).values())))
                    for end in self._waiting.values()
                ]
                with self._database as database:
                    database.executemany("INSERT OR REPLACE INTO ended VALUES (?, ?, ?)", rows)
                    if segment:
                        database.execute("DELETE FROM journal")
                        database.execute("INSERT INTO journal VALUES (?, ?)", (lineage, segment))
                    gone = database.execute("DELETE FROM ended WHERE version < ?", (oldest,))
                self._waiting.clear()
        except sqlite3.Error as error:
            raise self._failed(error) from error
        return gone.rowcount

    def close(self) -> None:
        """Close the file, dropping unwritten ends, which the journal has."""
        with self._using:
            if self._database is not None:
                self._database.close()
            self._database = self._opening = None
            self._waiting.clear()
            self._greatest = ""

    def _failed(self, error: Exception) -> JournalError:
        if "full" in str(error):
            return JournalFull(f"{self.path}: {error}")
        # Damage that opening the file did not show, or cached pages that never reached the disk.
        if type(error) is sqlite3.DatabaseError or "disk I/O" in str(error):
            with suppress(OSError):
                self.path.unlink()
            return JournalError(
                f"{self.path}: {error}; the next start rebuilds it from the journal"
            )
        return JournalError(
            f"{self.path}: {error}; delete it, and the next start rebuilds it from the journal"
        )
