"""A disk that loses its power: what of a folder's files is surely there, and what may be.

A `Platter` notes what a process has synced. When the power fails, :func:`fail` makes of the folder
what a disk may have kept: all that was synced, and of the rest any of its pages, whole or torn, in
any order; of names that were made or removed since the folder was synced, any.

When a sync fails, the system takes the pages that it did not write for written: no later sync
writes them, and readers get them until the cache forgets them (:meth:`Platter.forget`).
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any

_PAGE = 4096
_SECTOR = 512
_NAMES = "names"
_LOST = "lost-"

# As they are without the seams, which replace them.
_fstat, _pread, _link = os.fstat, os.pread, os.link


class Platter:
    """What is on disk of the files in ``folder``, kept in ``place`` under their inodes' numbers."""

    def __init__(self, folder: Path, place: Path) -> None:
        self._folder = str(folder)
        self._place = place
        self._ours: dict[int, bool] = {}  # inode -> whether it lies in the folder
        self._low: dict[int, int] = {}  # inode -> from where on it was written since it was synced
        self._lock = Lock()
        place.mkdir(exist_ok=True)

    def is_inside(self, path: Any) -> bool:
        """Whether a path is one of a file in the folder."""
        return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(
            self._folder + "/"
        )

    def holds(self, file: int) -> bool:
        """Whether an open file lies in the folder, or is it."""
        try:
            about = _fstat(file)
        except OSError:
            return False
        if not (stat.S_ISREG(about.st_mode) or stat.S_ISDIR(about.st_mode)):
            return False
        if about.st_ino not in self._ours:
            with suppress(OSError):
                where = str(Path(f"/proc/self/fd/{file}").readlink())
                self._ours[about.st_ino] = where == self._folder or self.is_inside(where)
        return self._ours.get(about.st_ino, False)

    def wrote(self, file: int, at: int) -> None:
        """From ``at`` on the file is not what is on disk."""
        number = _fstat(file).st_ino
        with self._lock:
            self._low[number] = min(at, self._low.get(number, at))

    def keep(self, path: Any, *_more: Any) -> None:
        """A name goes: the file stays, for a disk that did not get to hear of it."""
        with suppress(OSError):
            _link(path, self._place / f"kept-{Path(path).stat().st_ino}")

    def syncing(self, file: int) -> Callable[[], None]:
        """A sync begins: what is there now will be on disk once what is returned is called."""
        about = _fstat(file)
        if stat.S_ISDIR(about.st_mode):
            names = names_of(Path(self._folder))
            return lambda: self._put_names(names)
        with self._lock:
            low = self._low.pop(about.st_ino, None)
        size = about.st_size

        def done() -> None:
            with _locked(self._place / str(about.st_ino)) as there:
                kept = {page: _pread(there, _PAGE, page) for page in self._lost(about.st_ino)}
                # Of what another process wrote since, nobody here knows where it begins.
                at = 0 if low is None else min(low, os.fstat(there).st_size)
                while at < size and (data := _copied(file, at, size)):
                    os.lseek(there, at, os.SEEK_SET)
                    with os.fdopen(os.dup(there), "wb") as out:
                        out.write(data)
                    at += len(data)
                for page, data in kept.items():  # what a failed sync did not write, none will
                    os.lseek(there, page, os.SEEK_SET)
                    with os.fdopen(os.dup(there), "wb") as out:
                        out.write(data.ljust(_PAGE, b"\0"))
                if low is not None or os.fstat(there).st_size > size:
                    os.truncate(there, size)

        return done

    def failed(self, file: int) -> int:
        """A sync fails: what is there and not on disk will not be; how many pages that are."""
        about = _fstat(file)
        if not stat.S_ISREG(about.st_mode):
            return 0
        with self._lock:
            self._low.pop(about.st_ino, None)
        with _locked(self._place / str(about.st_ino)) as there:
            lost = {
                page
                for page in range(0, about.st_size, _PAGE)
                if _pread(there, _PAGE, page) != _copied(file, page, page + _PAGE)
            }
            known = self._lost(about.st_ino) | lost
            (self._place / f"{_LOST}{about.st_ino}").write_text(json.dumps([*known]))
        return len(lost)

    def _lost(self, number: int) -> set[int]:
        """The pages that failed syncs of a file did not write, by their offsets."""
        with suppress(FileNotFoundError):
            return {*json.loads((self._place / f"{_LOST}{number}").read_text())}
        return set()

    def forget(self, path: Path) -> None:
        """The cache forgets a file: readers get what is on disk."""
        number = path.stat().st_ino
        lost = self._lost(number)
        if not lost:
            return
        with _locked(self._place / str(number)) as there, path.open("r+b") as file:
            size = path.stat().st_size
            for page in lost:
                file.seek(page)
                file.write(_pread(there, _PAGE, page).ljust(_PAGE, b"\0")[: size - page])
            (self._place / f"{_LOST}{number}").unlink(missing_ok=True)

    def _put_names(self, names: dict[str, int]) -> None:
        aside = self._place / f"{_NAMES}.{os.getpid()}"
        aside.write_text(json.dumps(names))
        Path.rename(aside, self._place / _NAMES)


def _copied(file: int, at: int, size: int) -> bytes:
    """Bytes of a file that may be open for writing only, or past the system's cache."""
    with open(f"/proc/self/fd/{file}", "rb") as again:  # noqa: PTH123  (a path of the kernel's)
        again.seek(at)
        return again.read(min(size - at, 1 << 20))


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)


def names_of(folder: Path) -> dict[str, int]:
    """The files of a folder and their inodes' numbers."""
    with os.scandir(folder) as entries:
        return {entry.name: entry.inode() for entry in entries if entry.is_file()}


def holds(place: Path, number: int, size: int) -> bool:
    """Whether so much of the file with this inode's number is on disk."""
    file = place / str(number)
    return file.exists() and file.stat().st_size >= size


def fail(folder: Path, place: Path, rng: random.Random) -> int:
    """The power fails while nobody has the folder open: how many pages are not what they were.

    The disk is then as the folder is.
    """
    there = names_of(folder)
    noted = place / _NAMES
    synced: dict[str, int] = json.loads(noted.read_text()) if noted.exists() else {}
    survives = rng.choice((0.0, 0.5, 0.9))  # of what was on its way
    image: dict[str, bytes] = {}
    lost = 0
    contents: dict[int, bytes] = {}
    for name in sorted(there.keys() | synced.keys()):
        now, then = there.get(name), synced.get(name)
        number = now if now == then or rng.random() < survives else then
        if number is None:
            continue
        if number not in contents:
            path = folder / name if number == now else place / f"kept-{number}"
            latest = path.read_bytes() if path.exists() else b""
            on_disk = place / str(number)
            before = on_disk.read_bytes() if on_disk.exists() else b""
            contents[number] = _survived(before, latest, survives, rng)
            lost += _different(contents[number], latest)
        image[name] = contents[number]
    shutil.rmtree(place)
    place.mkdir()
    for name in there:
        (folder / name).unlink()
    for name, data in image.items():
        (folder / name).write_bytes(data)
        (place / str((folder / name).stat().st_ino)).write_bytes(data)
    (place / _NAMES).write_text(json.dumps(names_of(folder)))
    return lost


def _survived(before: bytes, latest: bytes, survives: float, rng: random.Random) -> bytes:
    """What was on disk, with some of the pages that were on their way."""
    data = bytearray(before)
    for at in range(0, max(len(before), len(latest)), _PAGE):
        new, old = latest[at : at + _PAGE], before[at : at + _PAGE]
        if new == old or rng.random() >= survives:
            continue
        if rng.random() < 0.2:  # torn
            sectors = rng.randrange(0, _PAGE, _SECTOR)
            new = new[:sectors] + old[sectors:]
        if len(data) < at + len(new):
            data += bytes(at + len(new) - len(data))
        data[at : at + len(new)] = new
    return bytes(data)


def _different(one: bytes, other: bytes) -> int:
    pages = range(0, max(len(one), len(other)), _PAGE)
    return sum(one[at : at + _PAGE] != other[at : at + _PAGE] for at in pages)


def flip(path: Path, at: int) -> None:
    """Changes a byte; once more, and it is as it was."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x41]))


def unflip(path: Path, place: Path, at: int) -> None:
    """Undo :func:`flip` in a file, and on disk, where a sync may have copied the wrong byte."""
    flip(path, at)
    right = path.read_bytes()[at : at + 1]
    with _locked(place / str(path.stat().st_ino)) as there:
        if os.pread(there, 1, at) not in (b"", right):
            os.pwrite(there, right, at)
