"""Starting a local run's services: forked from one process where that is safe, else each as an
interpreter of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from fedstream.local import fork_server
from fedstream.runtime import process

_MODULE = ("-P", "-m")  # -P: a user's redis.py or random.py must not shadow ours
_SERVER = "fedstream.local.fork_server"


class ServiceProcess(Protocol):
    """A started process, with the interface of :class:`asyncio.subprocess.Process`."""

    @property
    def pid(self) -> int:
        """The process's id."""

    @property
    def returncode(self) -> int | None:
        """The process's exit code, negative for a signal; None while the process is alive."""

    async def wait(self) -> int:
        """Wait for the process's end; returns the exit code."""

    def terminate(self) -> None:
        """Send SIGTERM. May raise ProcessLookupError."""

    def kill(self) -> None:
        """Send SIGKILL. May raise ProcessLookupError."""


class Launcher(Protocol):
    """Starts services."""

    async def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> ServiceProcess:
        """Run ``fedstream WORDS`` with its output appended to ``log``. Raises OSError."""


class Interpreters:
    """Starts each service as a Python interpreter of its own."""

    async def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> ServiceProcess:
        """Start a process. Raises OSError."""
        with log.open("ab") as out:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *_MODULE,
                "fedstream",
                *words,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**environment, process.PARENT_VARIABLE: str(os.getpid())},
                # Its own session: Ctrl-C must reach only us, because we stop services in order.
                start_new_session=True,
            )


class Forked:
    """A service forked by the fork server."""

    def __init__(self, pid: int, server: _Server) -> None:
        self.pid = pid
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._server = server

    @property
    def returncode(self) -> int | None:
        """The service's exit code; None while the service is alive."""
        return self.code.result() if self.code.done() else None

    async def wait(self) -> int:
        """Wait for the service's end."""
        return await asyncio.shield(self.code)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._server.signal(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._server.signal(self.pid, signal.SIGKILL)


def _executed() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """A fork server as an interpreter of its own: our end of its socket, and its process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return ours, subprocess.Popen(  # noqa: S603  (ourselves)
            [sys.executable, *_MODULE, _SERVER, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={name: os.environ[name] for name in os.environ if name != process.PARENT_VARIABLE},
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )


class _Server:
    """A fork server's process, and the services that it has started."""

    def __init__(
        self, channel: socket.socket, process: fork_server.ForkedServer | subprocess.Popen[bytes]
    ) -> None:
        self._channel, self._process = channel, process
        self._channel.setblocking(False)
        self._asked: deque[asyncio.Future[Forked]] = deque()
        self._alive: dict[int, Forked] = {}
        self._turn = asyncio.Lock()
        self._reading = False
        self.ended = False

    async def start(self, request: Mapping[str, object]) -> Forked:
        """Request a service's start. Raises OSError."""
        loop = asyncio.get_running_loop()
        if not self._reading:
            self._reading = True
            loop.add_reader(self._channel, self._read)
        # One at a time: while the server imports, the socket has no room for many requests.
        async with self._turn:
            self._channel.send(json.dumps(request).encode())
            asked: asyncio.Future[Forked] = loop.create_future()
            self._asked.append(asked)
            return await asked

    def signal(self, pid: int, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if pid in self._alive:
            with suppress(OSError):  # the server is gone, and its services with it
                self._channel.send(json.dumps({"signal": number, "pid": pid}).encode())

    def _read(self) -> None:
        try:
            message = self._channel.recv(fork_server.MOST)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self.lost()
            return
        match json.loads(message):
            case {"pid": int(pid), "code": int(code)}:
                self._alive.pop(pid).code.set_result(code)
            case {"pid": int(pid)}:
                self._alive[pid] = found = Forked(pid, self)
                asked = self._asked.popleft()
                if asked.done():  # no longer awaited
                    found.kill()
                else:
                    asked.set_result(found)
            case {"error": str(why)}:
                asked = self._asked.popleft()
                if not asked.done():
                    asked.set_exception(OSError(why))

    def lost(self) -> None:
        """Note that the server and its services have ended."""
        self.ended = True
        asyncio.get_running_loop().remove_reader(self._channel)
        for pid, life in self._alive.items():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            life.code.set_result(-signal.SIGKILL)
        self._alive.clear()
        for asked in self._asked:
            if not asked.done():
                asked.set_exception(OSError("the process that forks services has ended"))
        self._asked.clear()
        self.close()

    def close(self) -> None:
        """End the server."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


class ForkServer:
    """Starts services by forking, which loads torch once for all of them.

    If the server dies, its services die too, and the next start begins a new server as an
    interpreter of its own, because by then this process has state that forks must not inherit.
    """

    def __init__(self) -> None:
        begun = fork_server.fork() if fork_server.may_fork() else _executed()
        self._server = _Server(*begun)

    async def start(
        self, words: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> ServiceProcess:
        """Fork a service. Raises OSError."""
        if self._server.ended:
            self._server = _Server(*_executed())
        return await self._server.start(
            {"start": words, "environment": dict(environment), "log": str(log)}
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._server.ended:
            self._server.close()


def new_launcher() -> AbstractContextManager[Launcher]:
    """The launcher for this system. Except on Linux, forking is impossible or unsafe with
    torch's libraries."""
    return ForkServer() if sys.platform == "linux" else nullcontext(Interpreters())
