"""Redis servers that a test sets up in its own way: users, TLS, replicas, sentinels, clusters."""

from __future__ import annotations

import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path

from fedstream.ports import HeldPort
from fedstream.redis_server import death_with_parent, find_servers


@lru_cache
def redis_7() -> Path | None:
    """A server of version 7 or later; None if there is none."""
    for binary in find_servers():
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"v=(\d+)", said.stdout)
        if version and int(version[1]) >= 7:
            return binary
    return None


class Redis:
    """One process, on a port of its own. Killed at the latest with the test that started it."""

    def __init__(self, binary: Path, folder: Path, *arguments: str, tls: bool = False) -> None:
        self._held = HeldPort()
        self.port = self._held.number
        place = ("--port", "0", "--tls-port") if tls else ("--port",)
        folder.mkdir(exist_ok=True, parents=True)
        self._log = folder / "log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    str(binary), *arguments, *place, str(self.port),
                    "--dir", str(folder), "--bind", "127.0.0.1",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=death_with_parent(),  # noqa: PLW1509  (one prepared system call)
            )  # fmt: skip

    def listens(self) -> None:
        """Waits until somebody may connect."""
        until = time.monotonic() + 10
        while self._process.poll() is None and time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise AssertionError(self._log.read_text())

    def kill(self) -> None:
        """As a crash would."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """For good: others may have its port."""
        self.kill()
        self._held.close()


@contextmanager
def redis(
    folder: Path, *arguments: str, binary: Path | None = None, tls: bool = False
) -> Iterator[Redis]:
    """A server without persistence, that listens."""
    chosen = binary or redis_7()
    assert chosen is not None
    server = Redis(chosen, folder, "--save", "", *arguments, tls=tls)
    try:
        server.listens()
        yield server
    finally:
        server.end()


def said(port: int, *command: str) -> bytes:
    """The reply of redis-cli's kind to a command without a password, as it comes over the wire."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        parts = "".join(f"${len(part.encode())}\r\n{part}\r\n" for part in command)
        connection.sendall(f"*{len(command)}\r\n{parts}".encode())
        return connection.recv(1 << 16)


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits. AssertionError if it never holds."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, f"not within 20 s: {what}"
        time.sleep(0.02)


SLOTS = 1 << 14


@contextmanager
def cluster(folder: Path, masters: int = 3) -> Iterator[list[int]]:
    """A cluster of masters without replicas, of which each has its share of the slots: ports."""
    with ExitStack() as stack:
        ports = []
        buses = []
        for number in range(masters):
            buses.append(stack.enter_context(HeldPort()).number)
            server = redis(
                folder / str(number), "--cluster-enabled", "yes", "--cluster-node-timeout", "2000",
                "--cluster-port", str(buses[-1]),
            )  # fmt: skip
            ports.append(stack.enter_context(server).port)
        for number, port in enumerate(ports):
            first, last = SLOTS * number // masters, SLOTS * (number + 1) // masters - 1
            assert said(port, "CLUSTER", "SET-CONFIG-EPOCH", str(number + 1)) == b"+OK\r\n"
            assert said(port, "CLUSTER", "ADDSLOTSRANGE", str(first), str(last)) == b"+OK\r\n"
            meet = ("CLUSTER", "MEET", "127.0.0.1", str(ports[0]), str(buses[0]))
            assert number == 0 or said(port, *meet) == b"+OK\r\n"
        known = f"cluster_known_nodes:{masters}\r\n".encode()

        def agreed() -> bool:
            infos = [said(port, "CLUSTER", "INFO") for port in ports]
            return all(b"cluster_state:ok" in info and known in info for info in infos)

        until(agreed, "the cluster is whole")
        yield ports
