"""Forks containers' services that load torch, from a process that has loaded it.

    python -P -m tests.k8s.zygote FD

Each message through FD, a Unix socket, brings another one: a cluster's, for which the process forks
a server of its own. That server is the one of `fedstream run`, but what it forks is confined as a
container before any of the service's own code runs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from runpy import run_module
from typing import NoReturn

from fedstream.local import fork_server
from tests.k8s.cluster import sandbox
from tests.k8s.cluster.forks import FOLDER, WRITABLE

ROOT = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CANNOT = 71  # exit code


class _Containers(fork_server._Forks):
    """The server's side."""

    def _become(self, words: Sequence[str], environment: Mapping[str, str], log: str) -> NoReturn:
        try:
            prctl = ctypes.CDLL(None).prctl
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, file in ((0, os.devnull), (1, log), (2, log)):
                opened = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
                os.dup2(opened, number)
            os.closerange(3, 256)
            given = dict(environment)
            folder, writable = given.pop(FOLDER), json.loads(given.pop(WRITABLE))
            os.environ.clear()
            os.environ.update(given)
            os.chdir(folder)
            sys.path.remove(str(ROOT))
            sys.argv = ["fedstream", *words]
            with ExitStack() as stack:
                if writable is not None:
                    only = stack.enter_context(sandbox.read_only_but(list(map(Path, writable))))
                    only()
            run_module("fedstream", run_name="__main__", alter_sys=True)  # never returns
        except BaseException:
            with suppress(BaseException):
                traceback.print_exc()
        finally:
            os._exit(_CANNOT)


def main() -> NoReturn:
    """Fork a server for each cluster, until the other side is gone."""
    control = socket.socket(fileno=int(sys.argv[1]))
    fork_server._load()
    importlib.import_module("uvloop")
    while True:
        message, files, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            with suppress(ChildProcessError):
                while True:
                    os.wait()  # so that our processor time has theirs
            os._exit(0)  # tearing torch down takes a second
        if os.fork() == 0:
            control.close()
            try:
                _Containers(socket.socket(fileno=files[0])).serve()
            finally:
                os._exit(0)
        os.close(files[0])


if __name__ == "__main__":
    main()
