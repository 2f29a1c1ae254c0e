"""What breaks around an updater, and how a test sees what came of it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.scripts import Script
from fedstream.core.layout import PAGE
from fedstream.core.messages import Upload
from fedstream.journal import Taken
from tests.support import Hand, at_rest
from tests.updater.journalled import makes, records

LATE = {"sync": "interval", "sync_s": 3600.0}  # what is done stays in the queue until it is idle
COMMIT = Script("commit")._sha.encode()
CREATE = Script("create")._sha.encode()


class Disk:
    """A disk that can be full."""

    def __init__(self) -> None:
        self.full = False
        self.refused = 0
        self._real = os.pwritev

    def pwritev(self, file: int, parts: Any, at: int) -> int:
        """In place of the system's."""
        if not self.full:
            return self._real(file, parts, at)
        self.refused += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Ext4:
    """An ext4 that believes it has room while its disk has none: writing data back fails."""

    _IMAGE_BYTES = 64 << 20  # what ext4 believes to have
    _DISK_BYTES = 16 << 20

    def __init__(self, at: Path, disk: Path) -> None:
        self._at = at
        self._disk = disk
        self._image, self._filler = disk / "image", disk / "filler"
        self._image.touch()
        os.truncate(self._image, self._IMAGE_BYTES)
        # Metadata is on the disk from the beginning, and there is no log that could be aborted.
        options = ["-b", "4096", "-O", "^has_journal", "-E", "nodiscard,lazy_itable_init=0"]
        _called("mkfs.ext4", "-q", *options, str(self._image))
        _called("mount", "-o", "loop", str(self._image), str(at))

    def fill(self) -> None:
        """From now on the disk has no room: data that is new to it cannot be written back."""
        os.sync()
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):  # no more room
            while True:
                file.write(bytes(1 << 12))

    def make_room(self) -> None:
        """The disk has room again."""
        self._filler.unlink()

    def forget_the_cache(self) -> None:
        """Unmount and mount again: from now on its files are what is on the disk."""
        _called("umount", str(self._at))
        _called("mount", "-o", "loop", str(self._image), str(self._at))


@contextmanager
def ext4(at: Path, disk: Path) -> Iterator[Ext4]:
    """Mount an ext4 at a folder, on a small disk; skips where that is not possible."""
    at.mkdir()
    disk.mkdir()
    try:
        _called("mount", "-t", "tmpfs", "-o", f"size={Ext4._DISK_BYTES}", "tmpfs", str(disk))
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nothing can be mounted")
    try:
        try:
            file_system = Ext4(at, disk)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("no ext4 can be mounted")
        try:
            yield file_system
        finally:
            _called("umount", "--lazy", str(at))
    finally:
        _called("umount", "--lazy", str(disk))


def _called(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


class End:
    """The end of a journal, to be lost."""

    def __init__(self, folder: Path, aside: Path) -> None:
        self._folder = folder
        self._aside = aside

    def begins(self) -> None:
        """What is journalled from now on will be lost."""
        shutil.copytree(self._folder, self._aside)

    def is_lost(self) -> None:
        """The journal is as it was."""
        shutil.rmtree(self._folder)
        shutil.move(self._aside, self._folder)


async def loses_its_end(make: Any, hand: Hand, end: End, *lost: float) -> None:
    """A journal of version 1, where Redis has one more for each of the values ``lost``."""
    await makes(hand, make(), 4.0)
    end.begins()
    await makes(hand, make(name="updater-1"), *lost)
    end.is_lost()


async def makes_more(hand: Hand, *values: float) -> list[Upload]:
    """The updater that runs makes a version of each update: these."""
    await hand.join()
    uploads = []
    for value in values:
        version = await hand.version()
        uploads.append(await hand.admitted(value))
        await hand.reaches(version + 1)
    return uploads


def digests(folder: Path) -> dict[int, str]:
    """What the journal says of every version that it made."""
    return {record.version: record.digest for record in records(folder) if record.digest}


async def told(hand: Hand) -> dict[int, str]:
    """The digests of the versions that were published."""
    return {version.version: version.digest for version in await hand.published()}


async def floats(hand: Hand) -> list[float]:
    """What the newest version is made of."""
    found: list[float] = (await hand.model((await hand.published())[-1])).floats.tolist()
    return found


def tasks(folder: Path) -> list[str]:
    """Of the updates in the journal, in order."""
    return [record.upload.task for record in records(folder) if isinstance(record, Taken)]


async def limited(hand: Hand, room: int) -> None:
    """Redis takes so many bytes more than it has, or is over the limit by so many."""
    await hand.client.call("CONFIG", "SET", "maxmemory", await at_rest(hand) + room)


def zero(path: Path, at: int) -> None:
    """A page of a file is zeros: the file had grown when the machine died, and no more."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(bytes(PAGE))
