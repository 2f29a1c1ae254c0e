"""What goes wrong around a service without anybody killing it: its clock, its disk, its release.

Installed in the process of a service before it begins, and steered from outside by a few numbers in
a file that both have in memory. Production code has no part in it: it calls `time` and `os`.
"""

from __future__ import annotations

import errno
import os
import struct
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path
from typing import Any

from fedstream.core import messages
from fedstream.core.messages import Message
from tests.chaos.disk import Platter
from tests.releases import earlier, later

CONTROL = "FEDSTREAM_CHAOS_CONTROL"  # in the environment: the file with the numbers
PLATTER = "FEDSTREAM_CHAOS_PLATTER"  # and where what is on disk is, of a service with a journal
RELEASE = "FEDSTREAM_CHAOS_RELEASE"  # and of which release its messages are
RELEASES = ("", "earlier", "later")
_NUMBERS = ("clock_s", "write", "sync", "read", "hold", "held", "room", "lost")
HELD_AT = ("", "read", "link")  # the journal, and a segment, which so begins
_PAGE = 4096
_NUMBER = struct.Struct("<d")


class Control:
    """The numbers. ``clock_s``: how far the clock is wrong. ``write``, ``sync``, ``read``: what the
    disk says (an errno; 0: done). ``hold``: the step of `HELD_AT` at which it waits until this is
    another; ``held``: 1 once it got there. ``room``: one more than the bytes by which files may
    still grow; 0: there is no end of it. ``lost``: pages that failed syncs did not write.
    """

    def __init__(self, path: Path) -> None:
        size = _NUMBER.size * len(_NUMBERS)
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, size)
            self._numbers = mmap(file, size)
        finally:
            os.close(file)

    def __getitem__(self, name: str) -> float:
        number: float = _NUMBER.unpack_from(self._numbers, _NUMBER.size * _NUMBERS.index(name))[0]
        return number

    def __setitem__(self, name: str, value: float) -> None:
        _NUMBER.pack_into(self._numbers, _NUMBER.size * _NUMBERS.index(name), value)


def install() -> None:
    """Puts the seams in, as far as the environment asks for them."""
    if CONTROL not in os.environ:
        return
    control = Control(Path(os.environ[CONTROL]))
    _wrong_clock(control)
    _other_release(os.environ.get(RELEASE, ""))
    if PLATTER in os.environ:
        journal = Path(os.environ["FEDSTREAM_JOURNAL__DIR"])
        _Disk(control, Platter(journal, Path(os.environ[PLATTER]))).install()


def _wrong_clock(control: Control) -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + control["clock_s"]
    time.time_ns = lambda: now_ns() + int(control["clock_s"] * 1e9)


def _other_release(release: str) -> None:
    """It writes what services say to each other as the release before or after this one would."""
    encode = Message.encode
    written = {"earlier": earlier, "later": later}

    def encoded(message: Message, **other: Any) -> bytes:
        is_said = type(message).__module__ == messages.__name__  # the journal's are not
        return written[release](encode(message, **other)) if is_said else encode(message, **other)

    if release:
        Message.encode = encoded  # type: ignore[assignment,method-assign]


class _Disk:
    """The calls by which a journal gets to disk and back, which may fail or be held up."""

    def __init__(self, control: Control, platter: Platter) -> None:
        self._control = control
        self._platter = platter

    def install(self) -> None:
        platter = self._platter
        self._bound_writes()
        self._wrap("pwritev", "write", before=lambda file, _, at: platter.wrote(file, at))
        self._wrap("pwrite", "write", before=lambda file, _, at: platter.wrote(file, at))
        self._wrap("write", "write", before=lambda file, _: platter.wrote(file, 0))
        self._wrap("ftruncate", "write", before=platter.wrote)
        self._wrap("fdatasync", "sync", around=platter.syncing)
        self._wrap("fsync", "sync", around=platter.syncing)
        self._wrap_advice()
        self._wrap("pread", "read")
        self._wrap("preadv", "read")
        for name in ("unlink", "remove", "rename", "replace", "link"):
            self._wrap_names(name)

    def _wrap_advice(self) -> None:
        call = os.posix_fadvise

        def wrapped(file: int, offset: int, length: int, advice: int) -> None:
            if advice == os.POSIX_FADV_DONTNEED and self._platter.holds(file):
                self._platter.forget(Path(f"/proc/self/fd/{file}").readlink())
            call(file, offset, length, advice)

        os.posix_fadvise = wrapped

    def _bound_writes(self) -> None:
        """A disk that has only so much room: a write ends at the last block that is free."""
        call = os.pwritev

        def bounded(file: int, parts: list[memoryview], at: int) -> int:
            room = int(self._control["room"])
            if not room or not self._platter.holds(file):
                return call(file, parts, at)
            wanted = sum(len(part) for part in parts)
            grows = max(0, at + wanted - os.fstat(file).st_size)
            free = (room - 1) // _PAGE * _PAGE
            if grows <= free:
                self._control["room"] = room - grows
                return call(file, parts, at)
            self._control["room"] = 1
            if free <= grows - wanted:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(file, [parts[0][: wanted - grows + free]], at)

        os.pwritev = bounded  # type: ignore[assignment]  # of what the journal uses of it

    def _fails(self, what: str) -> None:
        self._wait_at(what)
        if error := int(self._control[what]):
            raise OSError(error, os.strerror(error))

    def _wait_at(self, step: str) -> None:
        while step == HELD_AT[int(self._control["hold"])]:
            self._control["held"] = 1.0
            time.sleep(0.01)

    def _wrap(
        self,
        name: str,
        what: str,
        before: Callable[..., None] | None = None,
        around: Callable[[int], Callable[[], None]] | None = None,
    ) -> None:
        call = getattr(os, name)

        def wrapped(file: int, *more: Any) -> Any:
            if not self._platter.holds(file):
                return call(file, *more)
            try:
                self._fails(what)
            except OSError:
                if around is not None:
                    self._control["lost"] += self._platter.failed(file)
                raise
            if before is not None:
                before(file, *more)
            done = around(file) if around is not None else None
            result = call(file, *more)
            if done is not None:
                done()
            return result

        setattr(os, name, wrapped)

    def _wrap_names(self, name: str) -> None:
        call = getattr(os, name)

        def wrapped(path: Any, *more: Any, **options: Any) -> Any:
            if self._platter.is_inside(path):
                self._fails("write")
                self._wait_at(name)
                if name != "link":
                    self._platter.keep(path, *more)
            return call(path, *more, **options)

        setattr(os, name, wrapped)
