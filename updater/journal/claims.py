"""Who goes on with a journal: whoever claimed it last, by a file that nobody can overlook.

Redis says who leads, and may forget it: emptied, fallen back, split. The folder does not. So

    a successor makes its claim, on disk, before it looks at what its predecessors wrote;
    a leader writes a record, then looks for a newer claim, and only then commits.

Whichever of the two came first, nothing is lost. If the leader saw no newer claim, its record was
written before any successor began to read: the successor counts it, and the commit says only what
the successor knows too. If there was one, the leader does not commit. That is all it takes: no
clock, and no time in which a leader must stop. Claims are ordered by their epochs, which their
names begin with as segments' do; one is made only once, and whoever finds a newer one beside its
own does not go on. So every committed record is in the chain of the newest segment.

The file system must show a file's name and its bytes to everybody as soon as they are written: any
local one, and whatever is mounted on one machine at a time. What NFS needs is said in
``docs/architecture.md``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

from fedstream.broker.errors import Fenced
from fedstream.updater.journal.errors import JournalError
from fedstream.updater.journal.writing import FILE_MODE, made_folder, sync_folder, translated

_NAMES = re.compile(r"([0-9]{8})(-[0-9]{6}\.journal|\.claim)")
_STEP_NS = 1_000_000_000


def newest_epoch(folder: Path, *, besides: Claim | None = None) -> int:
    """The newest epoch of which there is a segment or a claim; -1: there is none.

    ``besides``: one's own claim does not count. Raises JournalError.
    """
    names = _listed(folder) if folder.exists() else []
    return max((_epoch(name) for name in names if besides is None or name != besides.name),
               default=-1)  # fmt: skip


def _epoch(name: str) -> int:
    """The epoch of a segment or claim; -1 for other files."""
    found = _NAMES.fullmatch(name)
    return int(found[1]) if found else -1


def _listed(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  (names alone, once in many appends)
    except OSError as error:
        raise JournalError(f"{folder}: cannot be read: {error.strerror}") from error


class Claim:
    """The claim of an epoch to a journal's folder."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """Makes it, on disk. Raises Fenced if there is a newer one, or JournalError."""
        self.epoch = epoch
        self.name = f"{epoch:08d}.claim"
        self._folder = folder
        self._path = folder / self.name
        self._looked_at = 0  # the folder's time of change when it was listed
        try:
            made_folder(folder)
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            file = os.open(self._path, flags, FILE_MODE)
        except FileExistsError as error:
            raise Fenced(f"another updater has claimed the journal: {self._path}") from error
        except OSError as error:
            raise translated(self._path, error) from error
        try:
            try:
                # The name says it all; the rest is for whoever finds it.
                about = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
                os.write(file, json.dumps(about).encode() + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
            sync_folder(folder)
        except OSError as error:
            self.withdraw()  # it may not be on disk: to be made again
            raise translated(self._path, error) from error
        newer = newest_epoch(folder, besides=self)
        if newer >= epoch:
            self.withdraw()
            raise Fenced(f"another updater has claimed {folder} meanwhile, for epoch {newer}")

    def check(self, segment: Path | None = None) -> None:
        """Raises Fenced if there is a newer claim; a look at the folder's time, mostly.

        ``segment``: the one that is written. JournalError if it was deleted.
        """
        try:
            changed = self._folder.stat().st_mtime_ns
        except OSError as error:
            raise JournalError(f"{self._folder}: cannot be read: {error.strerror}") from error
        if changed == self._looked_at:
            return  # a listing takes as long as a record, where there are many segments
        # A file system's clock has steps: a change this recent may hide another one.
        self._looked_at = changed if time.time_ns() - changed > _STEP_NS else 0
        names = _listed(self._folder)
        newer = max((name for name in names if _epoch(name) > self.epoch), default=None)
        if newer is not None:
            raise Fenced(f"another updater has taken over: {self._folder / newer}")
        if segment is not None and segment.name not in names:
            raise JournalError(f"{segment}: was deleted while it was written: put it back")

    def settle(self) -> None:
        """A segment of the epoch is there, and says the same: this and older claims can go."""
        for name in _listed(self._folder):
            if name.endswith(".claim") and -1 < _epoch(name) <= self.epoch:
                _delete(self._folder / name)

    def withdraw(self) -> None:
        """Nothing was begun, and nothing will be."""
        _delete(self._path)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise JournalError(f"{path}: cannot be deleted: {error.strerror}") from error
