"""A process: which files it opens and how many, and what garbage collection looks through."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstream.runtime.process import open_regular, read_regular

LIMITED = """
import resource
from fedstream.runtime.process import allow_files
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 128))
print(allow_files({wanted}), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.process
@pytest.mark.parametrize(("wanted", "expected"), [(100, "100 100 128"), (1000, "128 128 128")])
def test_limit_is_raised_as_far_as_it_may_be(wanted: int, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED.format(wanted=wanted)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == expected


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("made", [_pipe, _socket, _device, Path.mkdir])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT])
def test_only_regular_files_are_opened(
    tmp_path: Path, made: Callable[[Path], None], flags: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"content")
    assert read_regular(path) == b"content"
    path.unlink()
    made(path)
    with pytest.raises(OSError, match=r"not a regular file|Is a directory"):
        open_regular(path, flags)


# garbage collection

SEARCHED = """
import gc, time, weakref
from fedstream.runtime.process import short_pauses

class Ring:
    def __init__(self):
        self.me = self

now = 0.0
before = gc.get_threshold()
with short_pauses(lambda: now):
    kept, gone = Ring(), weakref.ref(Ring())
    gc.collect()
    assert gone() is None            # garbage that is new is found
    assert gc.get_freeze_count()
    assert len(gc.get_objects()) < 1000  # what stays is not looked through again
    later = weakref.ref(kept)
    del kept
    now = 599.0
    gc.collect()
    assert later() is not None
    now = 601.0
    gc.collect()
    assert later() is None           # until ten minutes are over
    circles = [Ring() for _ in range(60_000)]
    later = weakref.ref(circles[0])
    gc.collect()
    del circles
    now = 608.0
    gc.collect()
    assert later() is not None
    now = 612.0
    gc.collect()
    assert later() is None           # or there is much more, which is looked at every ten seconds
gc.collect()
assert not gc.get_freeze_count()
assert gc.get_threshold() == before
"""


@pytest.mark.process
def test_what_stays_is_searched_every_ten_minutes_and_if_there_is_much_more() -> None:
    subprocess.run([sys.executable, "-c", SEARCHED], check=True)
