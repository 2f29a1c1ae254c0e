"""Forks a process for each client: `python -P server.py SOCKET PYTHON`, until its input ends."""

from __future__ import annotations

import atexit
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

PRELOADED = (
    "PIL.BmpImagePlugin",
    "PIL.GifImagePlugin",
    "PIL.JpegImagePlugin",
    "PIL.PpmImagePlugin",
    "encodings.idna",
    "fedstream.api.parameters",
    "fedstream.cli.app",
    "fedstream.cli.operations",
    "fedstream.cli.services",
    "fedstream.cli.training",
    "fedstream.coordinator",
    "fedstream.doctor",
    "fedstream.local.run",
    "fedstream.history",
    "fedstream.journal.replay",
    "fedstream.history.pictures",
    "fedstream.operate",
    "fedstream.history.live.service",
    "fedstream.history.measuring",
    "fedstream.history.replay",
    "fedstream.settings.config",
    "fedstream.settings.services",
    "fedstream.simulation.run",
    "fedstream.sinks.service",
    "fedstream.trainer.descent",
    "fedstream.trainer.images",
    "fedstream.trainer.learner",
    "fedstream.trainer.loading",
    "fedstream.trainer.texts",
    "fedstream.trainer.vector",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "safetensors.torch",
    "sklearn.datasets",
    "torch",
    "torch._dynamo",
    "torch.onnx",
    "torch.utils.data",
    "uvloop",
)
IF_INSTALLED = ("flwr.client", "flwr.clientapp", "typer._adapters")  # or new enough


class Server:
    """One thread, so that a fork has everything."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.forked = Path(address).with_name("forked")
        self.listener.listen(64)
        self.children: dict[int, socket.socket] = {}  # by process id
        self.clients: dict[int, int] = {}  # their process ids
        self.waking, self.woken = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(self.woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> tuple[list[str], str, dict[bytes, bytes], list[int]] | None:
        """None when it is over; in a forked process, what that is to do."""
        while True:
            clients = {connection.fileno(): pid for pid, connection in self.children.items()}
            readable, _, _ = select.select(
                [0, self.listener.fileno(), self.waking, *clients], [], []
            )
            if self.waking in readable:
                os.read(self.waking, 4096)
                self.reap()
            for number in clients.keys() & set(readable):
                self.heard(clients[number])
            if self.listener.fileno() in readable and (wanted := self.asked()):
                return wanted
            if 0 in readable:
                for pid in self.children:
                    os.kill(pid, signal.SIGKILL)
                return None

    def reap(self) -> None:
        """Tells clients how their processes ended."""
        while self.children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection = self.children.pop(pid)
            (self.forked / str(self.clients.pop(pid))).unlink(missing_ok=True)
            code = os.waitstatus_to_exitcode(status)
            with suppress(OSError):  # killed meanwhile
                connection.sendall(code.to_bytes(2, "big", signed=True))
            connection.close()

    def heard(self, pid: int) -> None:
        """Passes on signals; a client that is gone was killed."""
        if pid not in self.children:
            return
        try:
            signals = self.children[pid].recv(64)
        except ConnectionResetError:
            signals = b""
        for number in signals or [signal.SIGKILL]:
            os.kill(pid, number)

    def asked(self) -> tuple[list[str], str, dict[bytes, bytes], list[int]] | None:
        """Forks for a new client; in the new process, what it is to do."""
        connection, _ = self.listener.accept()
        head, files, _, _ = socket.recv_fds(connection, 4, 4)
        text = b""
        while len(text) < int.from_bytes(head, "big"):
            text += connection.recv(1 << 16)
        *wanted, client = marshal.loads(text)  # noqa: S302  (from a test)
        if pid := os.fork():
            self.children[pid], self.clients[pid] = connection, client
            for number in files:
                os.close(number)
            return None
        (self.forked / str(client)).write_text(str(os.getpid()))
        return (*wanted, files)


def become(
    arguments: list[str], folder: str, environ: dict[bytes, bytes], files: list[int]
) -> None:
    """A process that has just started, as far as `fedstream` can tell."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.closerange(len(files), 256)
    os.chdir(folder)
    os.environ.clear()
    os.environb.update(environ)
    tempfile.tempdir = None  # TMPDIR may be another
    if "FEDSTREAM_PARENT" in os.environ:  # the client looks after the real one
        os.environ["FEDSTREAM_PARENT"] = str(os.getppid())
    sys.argv = ["fedstream", *arguments]
    if len(files) > 3:
        sys.argv = ["fork_server", "3"]


def run_script(script: str) -> None:
    """Runs a program of the reader's."""
    del sys.argv[:2]  # "fedstream", "python"
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def main() -> None:
    """Imports, serves, and in a forked process runs the command line."""
    address, python = sys.argv[1:]
    server = Server(address)
    os.write(1, b"ready\n")
    select.select([0, server.listener.fileno()], [], [])  # perhaps nobody ever comes
    for name in PRELOADED:
        importlib.import_module(name)
    for name in IF_INSTALLED:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    from fedstream.__main__ import main as command
    from fedstream.api.__main__ import main as from_python
    from fedstream.local.fork_server import main as fork_server

    with suppress(ModuleNotFoundError):  # it is for Linux alone
        # Looks for our arguments, which it can't find once the environment has changed.
        importlib.import_module("setproctitle").getproctitle()
    gc.freeze()
    if (wanted := server.serve()) is not None:
        become(*wanted)
        sys.executable = python  # `fedstream run` starts its services with it
        code: object = 0
        try:
            match wanted[0]:
                case ["python", script, *_]:
                    run_script(script)
                case ["-m", "fedstream.api", *_]:
                    from_python()
                case ["-m", "fedstream.local.fork_server", *_]:
                    fork_server()
                case _:
                    command()
        except SystemExit as end:
            code = end.code
            if isinstance(code, str):  # as an interpreter does
                sys.stderr.write(f"{code}\n")
                code = 1
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 0)  # to clear up torch takes a second


if __name__ == "__main__":
    main()
