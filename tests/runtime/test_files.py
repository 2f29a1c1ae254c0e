"""Only regular files are opened; and the limit of open files, in a process of its own."""

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
@pytest.mark.parametrize(
    ("wanted", "expected"), [(100, "100 100 128"), (1000, "128 128 128"), (10, "64 64 128")]
)
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
