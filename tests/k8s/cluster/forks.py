"""Containers' services that load torch are forked from a process that has loaded it (`zygote.py`).

The first one of each role is an interpreter all the same, and so are services without torch: a fork
would begin with more memory than they may have.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fedstream.local import lives

_ROLES = ("trainer", "updater", "evaluator")  # those that load torch
_SERVER = "tests.k8s.zygote"
FOLDER, WRITABLE = "ZYGOTE_FOLDER", "ZYGOTE_WRITABLE"  # in a request's environment
_ROOT = Path(__file__).parents[3]


class Process(Protocol):
    """A container's process, as far as the kubelet needs it."""

    @property
    def pid(self) -> int:
        """Its id, and that of its group."""

    @property
    def returncode(self) -> int | None:
        """Its exit code, negative for a signal; None while it is alive."""

    async def wait(self) -> int:
        """Wait for its end."""

    def send_signal(self, number: int) -> None:
        """Send it a signal."""


@dataclass(frozen=True)
class Forked:
    """A process that a cluster's server has forked."""

    life: lives.Forked
    server: lives._Server

    @property
    def pid(self) -> int:
        return self.life.pid

    @property
    def returncode(self) -> int | None:
        return self.life.returncode

    async def wait(self) -> int:
        return await self.life.wait()

    def send_signal(self, number: int) -> None:
        self.server.signal(self.pid, number)


class _Itself:
    """A server that ends by itself, once its socket is closed."""

    def kill(self) -> None:
        pass

    def wait(self) -> None:
        pass


class Zygote:
    """The process that has loaded torch. It starts when it is first needed, and ends with us."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.begun: set[str] = set()  # roles of which there was an interpreter: the first is one

    def serve(self, cluster: socket.socket) -> None:
        """Have a server forked for a cluster."""
        if self._control is None:
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _SERVER, str(theirs.fileno())],
                    env=os.environ | {"PYTHONPATH": str(_ROOT)}, pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )  # fmt: skip
        files = array.array("i", [cluster.fileno()])
        self._control.sendmsg([b"!"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])

    def close(self) -> None:
        """End it."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait()


class Forks:
    """One cluster's server, begun when it is first needed."""

    def __init__(self, zygote: Zygote) -> None:
        self._zygote = zygote
        self._server: lives._Server | None = None

    def takes(self, words: Sequence[str]) -> bool:
        """Whether a container with this command is forked. The first of a role never is."""
        if words[0] != "fedstream" or words[1] not in _ROLES:
            return False
        known = words[1] in self._zygote.begun
        self._zygote.begun.add(words[1])
        return known

    async def start(
        self, words: Sequence[str], environment: Mapping[str, str], *,
        log: Path, folder: Path, writable: Sequence[Path] | None,
    ) -> Forked:  # fmt: skip
        """Start a container. ``writable``: the only folders to write in; None: all."""
        if self._server is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._zygote.serve(theirs)
            self._server = lives._Server(ours, _Itself())  # type: ignore[arg-type]
        told = {
            FOLDER: str(folder),
            WRITABLE: json.dumps(None if writable is None else list(map(str, writable))),
        }
        life = await self._server.start(
            {"start": words[1:], "environment": dict(environment) | told, "log": str(log)}
        )
        return Forked(life, self._server)

    def close(self) -> None:
        """End the server."""
        if self._server is not None and not self._server.ended:
            asyncio.get_running_loop().remove_reader(self._server._channel)
            self._server.close()
