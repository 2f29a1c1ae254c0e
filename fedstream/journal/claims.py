"""Claims to a journal: files that decide which updater may continue it.

Redis names the leader, but may forget the leader when Redis is emptied, falls back or is split. The
folder does not forget. So

    a successor writes its claim to disk before it reads what its predecessors wrote;
    a leader writes a record, then looks for a newer claim, and only then commits.

In either order, nothing is lost. If the leader saw no newer claim, its record was written before
any successor began to read, so the successor counts the record. If there was a newer claim, the
leader does not commit. This needs no clock, and no deadline for a leader to stop. Claims are
ordered by epoch, with which the names of claims and segments begin. A claim is made only once, and
an updater that finds a newer claim than its own stops. So every committed record is in the chain of
the newest segment.

The file system must make a file's name and bytes visible everywhere as soon as they are written:
any local one does, and so does any that is mounted on one machine at a time. For NFS, see
``docs/architecture.md``.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from pathlib import Path

from fedstream.core.errors import Fenced
from fedstream.journal.errors import JournalError
from fedstream.journal.writer import FILE_MODE, made_folder, sync_folder, translated

_NAMES = re.compile(r"([0-9]{8})(-[0-9]{6}\.journal|\.claim)")
_STEP_S = 2.5  # longer than the time resolution of any file system (FAT: 2 s)


def newest_epoch(folder: Path, *, besides: Claim | None = None) -> int:
    """The newest epoch with a segment or a claim; -1 if there is none.

    ``besides``: our own claim, which does not count. Raises JournalError.
    """
    names = _listed(folder) if folder.exists() else []
    return max(
        (_epoch(name) for name in names if besides is None or name != besides.name), default=-1
    )


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
    """An epoch's claim to a journal's folder."""

    def __init__(self, folder: Path, epoch: int) -> None:
        """Write the claim to disk. Raises Fenced if this epoch or a newer one is taken.

        Raises JournalError if it can't be written.
        """
        self.epoch = epoch
        self.name = f"{epoch:08d}.claim"
        self._folder = folder
        self._path = folder / self.name
        self._place = (-1, -1)  # the folder's device and inode
        self._changed = -1  # last seen mtime of the folder,
        self._since = 0.0  # and first at this time (monotonic)
        self._known = False  # whether a listing since then covers all changes
        try:
            made_folder(folder)
            self._place = _place(folder.stat())
            flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            file = os.open(self._path, flags, FILE_MODE)
        except FileExistsError as error:
            raise Fenced(f"another updater has claimed the journal: {self._path}") from error
        except OSError as error:
            raise translated(self._path, error) from error
        try:
            try:
                # Only the name matters; the content is for operators.
                about = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
                os.write(file, json.dumps(about).encode() + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
            sync_folder(folder)
        except OSError as error:
            self.withdraw()  # the claim may not be on disk
            raise translated(self._path, error) from error
        newer = newest_epoch(folder, besides=self)
        if newer >= epoch:
            self.withdraw()
            raise Fenced(f"another updater has since claimed {folder}, for epoch {newer}")

    def check(self, segment: Path | None = None) -> None:
        """Raise Fenced if there is a newer claim; usually needs only the folder's mtime.

        ``segment``: the segment being written. Raises JournalError if it was deleted or the folder
        was replaced.
        """
        now = time.monotonic()
        try:
            about = self._folder.stat()
        except OSError as error:
            raise JournalError(f"{self._folder}: cannot be read: {error.strerror}") from error
        if _place(about) != self._place:
            raise JournalError(f"{self._folder}: was replaced while being written: start again")
        changed = about.st_mtime_ns
        if changed != self._changed:
            self._changed, self._since, self._known = changed, time.monotonic(), False
        if self._known:
            return  # with many segments, a listing takes as long as a record
        names = _listed(self._folder)
        newer = max((name for name in names if _epoch(name) > self.epoch), default=None)
        if newer is not None:
            raise Fenced(f"another updater has taken over: {self._folder / newer}")
        if segment is not None and segment.name not in names:
            raise JournalError(f"{segment}: was deleted while being written: restore it")
        # File times have a coarse resolution, so a recent change may hide a second one. Measure the
        # age by a monotonic clock, as the file system's clock may be behind ours.
        self._known = now - self._since > _STEP_S

    def settle(self) -> None:
        """Delete this and older claims, once a segment of the epoch replaces them."""
        for name in _listed(self._folder):
            if name.endswith(".claim") and -1 < _epoch(name) <= self.epoch:
                _delete(self._folder / name)

    def withdraw(self) -> None:
        """Delete a claim without a segment."""
        _delete(self._path)


def _place(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise JournalError(f"{path}: cannot be deleted: {error.strerror}") from error
