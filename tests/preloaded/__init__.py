"""`fedstream` in a tenth of the time: forked from a process that has imported everything.

A test that starts a run starts six processes, and each of them spends more than a second on
importing torch. :func:`programs` is a folder for PATH with a ``fedstream`` and a ``python`` whose
processes are forked from one server instead (``server.py``). What they do is the same; that the
real ones start is tested by ``tests/integration``. The server imports when it is first asked.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
FORKED = "forked"  # beside the programs: by a program's process id, that of what it stands for


class Preloaded:
    """The plugin: all workers of a test run share one server."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder: Path | None = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell a worker of xdist where the programs are."""
        if self._folder is None:
            self._folder = self._stack.enter_context(programs())
        node.workerinput["programs"] = str(self._folder)

    def pytest_unconfigure(self) -> None:
        self._stack.close()


def descendants(process: psutil.Process, programs: Path) -> list[psutil.Process]:
    """Its children and theirs, also where a program of the folder only stands for the process."""
    found = process.children()
    with suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
        # ValueError: it is just being written.
        pid = (programs.parent / FORKED / str(process.pid)).read_text()
        found.append(psutil.Process(int(pid)))
    for child in [*found]:
        with suppress(psutil.NoSuchProcess):
            found += descendants(child, programs)
    return found


@contextmanager
def programs() -> Iterator[Path]:
    """A folder of programs, which work as long as the block lasts."""
    private = Path(tempfile.mkdtemp(prefix="preloaded-"))  # short: a socket's path has 108 bytes
    address, folder = private / "socket", private / "bin"
    folder.mkdir()
    (private / FORKED).mkdir()
    for name in ("fedstream", "python"):
        client = (sys.executable, "-IS", HERE / "client.py", address, sys.executable, name)
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {shlex.join(map(str, client))} "$@"\n')
        program.chmod(0o755)
    kept = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
    server = subprocess.Popen(
        [sys.executable, "-P", HERE / "server.py", address, folder / "python"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=kept | {"OMP_NUM_THREADS": "1"},
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield folder
    finally:
        server.communicate()  # the end of its input is its end
        shutil.rmtree(private)
