"""What breaks around an updater, and how a test sees what came of it."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

from fedstream.broker.layout import PAGE
from fedstream.broker.messages import Upload
from fedstream.broker.scripts import Script
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
