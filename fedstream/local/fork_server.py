"""The process that a local run's services are forked from, so that torch is imported once.

:func:`fork` forks it from the calling process. Where that is impossible (:func:`may_fork`),
``python -P -m fedstream.local.fork_server FD`` starts it. It imports the modules that services
share, and forks a service for each request on its Unix socket (SOCK_SEQPACKET, file descriptor FD).
All messages are JSON:

    {"start": ["trainer", "--name", "trainer-1"], "environment": {...}, "log": "/run/logs/t.log"}
        answered by {"pid": 123}, or by {"error": "..."}; then by {"pid": 123, "code": 0} at its end
    {"signal": 15, "pid": 123}
        not answered; without effect once the process has ended

The server computes nothing, and its only threads are OpenBLAS's, which numpy starts and which are
made anew after a fork. So a forked service is as good as a new interpreter. The server ends with
its socket, and the services end with the server (:mod:`fedstream.runtime.process`).
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from runpy import run_module
from typing import NoReturn

from setproctitle import setproctitle

from fedstream.runtime import plugins, process
from fedstream.runtime.process import BOTH

MOST = 1 << 20  # bytes of a message
# Modules that are slow to import. None of a user's modules, which may start threads.
_MODULES = (
    "torch",
    "fedstream.cli.app",
    "fedstream.cli.services",
    "fedstream.settings.services",
    "fedstream.trainer.images",
    "fedstream.trainer.learner",
    "fedstream.trainer.texts",
)
_CANNOT = 71  # exit code of a fork that could not become a service


class _Forks:
    """The server's side of the socket."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._pids: set[int] = set()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)

    def serve(self) -> None:
        """Fork services until the other side closes the socket."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # so that it wakes the selector
        signal.set_wakeup_fd(self._wake.fileno())
        with selectors.DefaultSelector() as selector:
            for one in (self._channel, self._woken):
                selector.register(one, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    self._woken.recv(4096)
                    self._reap()
                if self._channel in ready:
                    message = self._channel.recv(MOST)
                    if not message:
                        return
                    self._obey(json.loads(message))

    def _tell(self, **answer: object) -> None:
        self._channel.send(json.dumps(answer).encode())

    def _reap(self) -> None:
        for pid in [*self._pids]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self._pids.remove(pid)
                self._tell(pid=pid, code=os.waitstatus_to_exitcode(status))

    def _obey(self, request: Mapping[str, object]) -> None:
        match request:
            case {"signal": int(number), "pid": int(pid)}:
                if pid in self._pids:
                    os.kill(pid, number)
            case {"start": [*words], "environment": dict(environment), "log": str(log)}:
                try:
                    pid = os.fork()
                except OSError as error:
                    self._tell(error=str(error))
                    return
                if pid == 0:
                    self._become([str(word) for word in words], environment, log)
                self._pids.add(pid)
                self._tell(pid=pid)
            case _:
                raise ValueError(f"unknown request: {request}")

    def _become(self, words: Sequence[str], environment: Mapping[str, str], log: str) -> NoReturn:
        """Turn the forked process into a service."""
        try:
            # Its own session: Ctrl-C must reach only `fedstream run`, which stops them in order.
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (self._channel, self._woken, self._wake):
                one.close()
            file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.dup2(file, 1)
            os.dup2(file, 2)
            os.close(file)
            os.environ.clear()
            os.environ.update(environment)
            os.environ[process.PARENT_VARIABLE] = str(os.getppid())
            setproctitle(" ".join(["fedstream", *words]))  # for `ps`
            sys.argv = ["fedstream", *words]
            sys.modules.pop("fedstream.__main__", None)  # the module of this process's ancestor
            run_module("fedstream", run_name="__main__", alter_sys=True)  # never returns
        except BaseException:
            with suppress(BaseException):
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
        finally:
            os._exit(_CANNOT)


class ForkedServer:
    """A process that was forked from this one."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def kill(self) -> None:
        """Send SIGKILL."""
        os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for the process's end, once."""
        os.waitpid(self._pid, 0)


def may_fork() -> bool:
    """Whether a fork of this process is as good as a new process: it has one thread, and has
    imported no foreign program.

    A restarted service must also import the user's program anew, with any changes.
    """
    return process.is_own() and threading.active_count() == 1 and not plugins.anything_imported()


def fork() -> tuple[socket.socket, ForkedServer]:
    """Fork the server from this process; return our end of its socket, and the server.

    Also imports the services' modules in this process.
    """
    _load()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Until it has a session of its own, a signal of Ctrl-C must wait.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BOTH)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _serve_in_fork(theirs.detach(), before)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()
    return ours, ForkedServer(pid)


def _serve_in_fork(channel: int, mask: set[signal.Signals | int]) -> NoReturn:
    """Turn the forked process into the server."""
    try:
        os.setsid()
        for one in BOTH:
            signal.signal(one, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.dup2(channel, 3)
        for number in [int(file.name) for file in Path("/proc/self/fd").iterdir()]:
            if number > 3:
                with suppress(OSError):  # the listing itself was one of them
                    os.close(number)
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1):
            os.dup2(nothing, number)
        if nothing > 2:  # else one of the standard files was closed
            os.close(nothing)
        if not sys.flags.safe_path:
            del sys.path[0]  # a user's redis.py must not shadow ours
        os.environ.pop(process.PARENT_VARIABLE, None)
        _serve(socket.socket(fileno=3))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(0)


def _load() -> None:
    with process.importing():
        for module in _MODULES:
            importlib.import_module(module)


def _serve(channel: socket.socket) -> None:
    process.take()
    setproctitle("fedstream (forks the services)")  # allocates its memory before any fork
    _load()
    _Forks(channel).serve()


def main() -> None:
    """The program."""
    _serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
