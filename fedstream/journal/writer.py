"""Writing a segment: whole records in order, which are never removed again.

A successor may have counted any whole record. Only the incomplete part of a record that does not
fit on a full disk is cut off.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from fedstream.core.errors import Fenced
from fedstream.core.layout import PAGE, Model, Payload, vector_of
from fedstream.core.messages import Message
from fedstream.journal import unshared
from fedstream.journal.errors import JournalError, JournalFull
from fedstream.journal.frames import BEGINNING, LONGEST, file_page, filled, packed
from fedstream.journal.records import DeviceVector, SegmentHead, Standing, name_of
from fedstream.runtime.process import open_regular

if TYPE_CHECKING:
    from fedstream.strategies.vectors import DeviceVectors

FOLDER_MODE = 0o700  # the journal has every update: it is private
FILE_MODE = 0o600

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Writer:
    """A segment being written, by one thread at a time."""

    def __init__(
        self,
        folder: Path,
        head: SegmentHead,
        standing: Standing,
        *models: Model,
        vectors: DeviceVectors | None = None,
        cached: bool = False,
    ) -> None:
        """Create the segment, whole and on disk. Raises JournalError; Fenced if it exists.

        ``vectors``: those of the devices in the standing's field ``here`` are written too. The
        unshared values of the models' layout are written first, if the folder lacks them.
        ``cached``: write through the system's cache.
        """
        self.path = folder / name_of(head.epoch, head.number)
        self.head = head
        self._salt = secrets.randbits(64)  # so that no update can contain a record
        self._lock = Lock()  # between threads that sync
        self._page = mmap(-1, PAGE)  # page-aligned buffer for messages
        self.chain = BEGINNING  # the newest record's checksum
        # A unique name: if Redis was emptied twice, two updaters may begin the same epoch.
        aside = self.path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            made_folder(folder)
            if (frozen := models[0].layout.unshared) is not None:
                unshared.keep(folder, frozen)
                sync_folder(folder)
            self._file = _opened(aside, cached)
        except OSError as error:
            raise translated(aside, error) from error
        self.size = 0
        self._synced = 0
        self._lost = ""  # why a sync failed; later syncs can't be trusted
        try:
            self._write([self._paged(file_page(self._salt))])
            self.append(head)
            self.append(standing, *models)
            for device in standing.here:
                if vectors is None:
                    raise RuntimeError("a standing with vectors needs the vectors")
                # Copied, because rows of an array are not page-aligned.
                vector = vector_of(vectors[device]).copy()
                self.append(DeviceVector(device=device, digest=vector.digest()), vector)
            self.sync()
            _named(aside, self.path)
            sync_folder(folder)
        except BaseException as error:
            os.close(self._file)
            with suppress(OSError):
                aside.unlink()
            if isinstance(error, FileExistsError):
                raise Fenced(f"another updater has started {self.path}") from error
            if isinstance(error, FileNotFoundError) and folder.is_dir():
                raise Fenced(f"another updater took over and deleted {aside}") from error
            if isinstance(error, OSError):
                raise translated(aside, error) from error
            raise

    @property
    def unsynced(self) -> int:
        """Bytes that may not be on disk yet."""
        return self.size - self._synced

    def append(self, message: Message, *blocks: Payload) -> int:
        """Append a record; return the file's size after it.

        Raises JournalFull, leaving the file unchanged, or JournalError.
        """
        encoded = message.encode()
        if len(encoded) > LONGEST:
            raise JournalError(
                f"{self.path}: a message of {len(encoded)} bytes; the limit is {LONGEST}"
            )
        begin, checksum = packed(
            encoded,
            payload=sum(one.buffer.nbytes for one in blocks),
            synced=self._synced,
            offset=self.size,
            follows=self.chain,
            salt=self._salt,
        )
        # Only a standing has several models; they are joined without padding between them.
        alone = blocks[0].pages if len(blocks) == 1 else None
        block = _joined(blocks) if alone is None and blocks else alone
        self._write([self._paged(begin), *([block] if block else [])])
        self.chain = checksum
        return self.size

    def _paged(self, message: bytes) -> memoryview:
        """The message padded to whole pages."""
        size = filled(len(message))
        if size > len(self._page):
            self._page = mmap(-1, size)
        self._page[: len(message)] = message
        self._page[len(message) : size] = bytes(size - len(message))
        return memoryview(self._page)[:size]

    def _write(self, parts: list[memoryview]) -> None:
        at = self.size
        try:
            while parts:
                written = os.pwritev(self._file, parts, at)
                at += written
                while parts and written >= len(parts[0]):
                    written -= len(parts.pop(0))
                if written:
                    parts[0] = parts[0][written:]
        except OSError as error:
            if error.errno in _FULL:  # otherwise the record may be whole: leave it
                with suppress(OSError):  # the next record overwrites the rest
                    os.ftruncate(self._file, self.size)
            raise translated(self.path, error) from error
        self.size = at

    def sync(self) -> int:
        """Put everything appended before the call on disk; return the number of bytes on disk.

        May run concurrently with :meth:`append` in another thread. Raises JournalError; the state
        of the disk is then unknown, and the updater must restart from it: the next sync would
        succeed without writing the lost pages.
        """
        size = self.size
        if not self._lost:
            try:
                os.fdatasync(self._file)
            except OSError as error:
                self._lost = error.strerror or str(error)
        with self._lock:
            if self._lost:
                raise JournalError(f"{self.path}: not written to disk: {self._lost}")
            self._synced = max(self._synced, size)
            return self._synced

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def made_folder(folder: Path) -> None:
    """Create the folder if it is missing, and put its name on disk. Raises OSError."""
    if not folder.is_dir():
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        sync_folder(folder.parent)


def translated(path: Path, error: OSError) -> JournalError:
    """The JournalError for a file that cannot be written."""
    if error.errno in _FULL:
        return JournalFull(f"{path}: no space: {error.strerror}; make room")
    return JournalError(f"{path}: cannot be written: {error.strerror}")


def _named(aside: Path, path: Path) -> None:
    """Move ``aside`` to ``path``. Raises FileExistsError if there is a file.

    This makes a link, because a rename would replace another updater's file.
    """
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from error
        aside.rename(path)  # a file system without links
    else:
        aside.unlink()


def sync_and_drop_cache(path: Path) -> None:
    """Put a file's content on disk, and drop it from the cache. Raises JournalError.

    After a failed sync, Linux marks the unwritten pages as clean and keeps them in its cache:
    readers get them, and the next sync succeeds without writing them. So another process's file
    must be dropped from the cache before it is read.
    """
    try:
        file = open_regular(path)
        try:
            with suppress(OSError):  # an unreported failure before this sync
                os.fdatasync(file)
            os.fdatasync(file)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    except OSError as error:
        raise translated(path, error) from error


def sync_folder(folder: Path) -> None:
    """Put the names of a folder's files on disk. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _joined(blocks: Sequence[Payload]) -> memoryview:
    """Join the bytes of blocks, padded to whole pages."""
    joined = mmap(-1, max(PAGE, filled(sum(one.buffer.nbytes for one in blocks))))
    at = 0
    for one in blocks:
        joined[at : at + one.buffer.nbytes] = one.buffer.data
        at += one.buffer.nbytes
    return memoryview(joined)


def _opened(path: Path, cached: bool) -> int:
    """Create a file; unless it is to be ``cached``, bypass the system's cache if possible."""
    flags = os.O_CREAT | os.O_TRUNC | os.O_RDWR | os.O_CLOEXEC
    direct = 0 if cached else getattr(os, "O_DIRECT", 0)
    try:
        return os.open(path, flags | direct, FILE_MODE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, FILE_MODE)  # a file system that cannot bypass the cache
