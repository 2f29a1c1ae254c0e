"""A process of ours: signals, garbage, open files, the end of its parent. Imports nothing slow.

SIGINT and SIGTERM, from a command's start to its end: at first, while modules are imported and no
work has begun, either signal ends the process at once (:func:`leave_at_once`). After that, a
read-only command is interrupted where it is (:func:`interrupt`); a service, or a command with work
to finish or undo, is notified (:class:`Stop`). A second signal always ends the process at once,
with exit code 128 + its number.
"""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

if TYPE_CHECKING:
    from types import FrameType

    Handler = Callable[[int, FrameType | None], None]

_own = False


def take() -> None:
    """Note that no other program runs in this process. Called once, at its beginning."""
    global _own  # noqa: PLW0603  (a process has one beginning)
    _own = True


def is_own() -> bool:
    """Whether no other program runs in this process."""
    return _own


@contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection, and exempt all objects that exist afterwards.

    Modules are a quarter of a million objects and no garbage. Searching them repeatedly takes a
    fifth of the import time, and copies pages that forks share. Does nothing in another program's
    process, which may contain garbage.
    """
    if not _own:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor; never wait, as opening a named pipe does.

    Raises OSError, also for a folder, pipe, socket or device.
    """
    strange = OSError(errno.EINVAL, "not a regular file", str(path))
    try:
        file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        # The error of a socket, or of a pipe without a reader.
        raise strange if error.errno == errno.ENXIO else error from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise strange
    return file


def read_regular(path: Path) -> bytes:
    """The content of a regular file. Raises OSError, like :func:`open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def allow_files(wanted: int) -> int | None:
    """Raise the limit of open files to ``wanted`` or the hard limit; never lower it.

    Returns the limit; None: unlimited.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return None
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


_ALL_S = 600.0  # between two searches of everything
_LOOK_S = 10.0  # between two counts of objects, which take 0.05 µs per object
_GROWN = 1.25  # growth since the last full search that causes the next one,
_MORE = 50_000  # if it is at least this many objects
# New objects before a search among them, so many that most objects of one request are gone.
_YOUNG = 10_000


@contextmanager
def short_pauses(clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Inside the block, search for garbage mostly among objects newer than the last full search.

    A full search takes 0.6 µs per object. A waiting device has 75 objects, so with ten thousand
    devices a full search stops all answers for half a second. A full search is repeated every ten
    minutes, or once objects have grown by a quarter, because closed connections leave cyclic
    garbage, and attackers can leave a megabyte a second.
    """
    searched = looked = clock()
    held, is_full = 0, True

    def is_due() -> bool:
        nonlocal looked
        now = clock()
        if now - searched >= _ALL_S:
            return True
        if now - looked < _LOOK_S:
            return False
        looked = now
        return gc.get_freeze_count() > _GROWN * held + _MORE

    def follow(phase: str, info: dict[str, Any]) -> None:
        nonlocal searched, held, is_full
        if info["generation"] < 2:
            return
        if phase == "start":
            is_full = is_full or is_due()
            if is_full:
                gc.unfreeze()
        else:
            gc.freeze()
            if is_full:
                searched, held, is_full = clock(), gc.get_freeze_count(), False

    thresholds = gc.get_threshold()
    gc.set_threshold(_YOUNG, *thresholds[1:])
    gc.callbacks.append(follow)
    try:
        yield
    finally:
        gc.callbacks.remove(follow)
        gc.set_threshold(*thresholds)
        gc.unfreeze()


INTERRUPTED = 130  # exit code of a command ended by its first signal
BOTH = (signal.SIGINT, signal.SIGTERM)


def _handle(handler: Handler) -> None:
    for number in BOTH:
        signal.signal(number, handler)


def _end(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


def end_at_once() -> None:
    """From now on, either signal ends this process at once, with 128 + its number."""
    _handle(_end)


def leave_at_once(code: int) -> None:
    """From now on, either signal ends this process with ``code`` after a line on stderr."""

    def leave(number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):  # stderr may be closed
            os.write(2, f"fedstream: {signal.Signals(number).name} during start-up\n".encode())
        os._exit(code)

    _handle(leave)


def interrupt() -> None:
    """From now on, the first signal raises KeyboardInterrupt, and a second ends the process.

    Python swallows an exception raised in a callback, for example of its import locks. A
    :class:`Stop` entered later still learns of the signal.
    """

    def first(number: int, _frame: FrameType | None) -> None:
        end_at_once()
        Stop.swallowed = signal.Signals(number).name
        raise KeyboardInterrupt

    Stop.swallowed = None
    _handle(first)


class Stop:
    """Inside the block, keep the first signal until there is a listener, and tell it the name.

    A second signal calls ``at_once``, interrupting whatever is running, and ends the process. These
    are plain handlers rather than the event loop's, so that they work even if the loop is stuck.
    """

    swallowed: ClassVar[str | None] = None  # a signal whose exception may be lost

    def __init__(self) -> None:
        self.name: str | None = None  # of the first signal
        self.at_once: Callable[[], object] = lambda: None
        self._told: Callable[[str], object] | None = None

    def listen(self, told: Callable[[str], object] | None) -> None:
        """Set the listener, called now if a signal has already arrived; None removes it."""
        self._told = told
        if told is not None and self.name is not None:
            told(self.name)

    def _came(self, number: int, frame: FrameType | None) -> None:
        if self.name is not None:
            try:
                self.at_once()
            finally:
                _end(number, frame)
        self.name = signal.Signals(number).name
        if self._told is not None:
            self._told(self.name)

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._came) for number in BOTH}
        self.name = self.name or Stop.swallowed
        return self

    def __exit__(self, *_error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


PARENT_VARIABLE = "FEDSTREAM_PARENT"  # environment variable: id of the process to end with
_PARENT_S = 1.0  # between two looks for the parent
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """If ``fedstream run`` started this process, send SIGTERM to it once the parent is gone.

    A thread polls: this works on every system, and also notices a parent that has already ended.
    """
    if parent := os.environ.get(PARENT_VARIABLE):
        threading.Thread(target=_watch, args=(int(parent),), name="parent", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_S)
    os.kill(os.getpid(), signal.SIGTERM)


def death_with_parent() -> Callable[[], None] | None:
    """A function that a child calls first so that it dies with us, even on SIGKILL.

    Returns None on systems other than Linux.
    """
    if sys.platform != "linux":
        return None
    import ctypes

    prctl = ctypes.CDLL(None).prctl  # looked up now: between fork and exec it would be unsafe
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
