"""Redis servers that a test sets up in its own way: users, TLS, replicas, sentinels, clusters."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fedstream.local.redis_server import find_servers
from fedstream.local.supervisor import HeldPort
from fedstream.runtime.process import death_with_parent


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
                    str(binary),
                    *arguments,
                    *place,
                    str(self.port),
                    "--dir",
                    str(folder),
                    "--bind",
                    "127.0.0.1",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=death_with_parent(),  # noqa: PLW1509  (one prepared system call)
            )

    def listens(self) -> None:
        """Waits until somebody may connect."""
        until = time.monotonic() + 60
        while self._process.poll() is None and time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
            except OSError:
                time.sleep(0.01)
            else:
                return
        raise AssertionError(self._log.read_text())

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def is_alive(self) -> bool:
        """Whether nobody has killed it."""
        return self._process.poll() is None

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


def said(port: int, *command: str, tls: ssl.SSLContext | None = None) -> bytes:
    """The reply of redis-cli's kind to a command without a password, as it comes over the wire."""
    with ExitStack() as stack:
        connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        if tls is not None:
            wrapped = tls.wrap_socket(connection, server_hostname="127.0.0.1")
            connection = stack.enter_context(wrapped)
        parts = "".join(f"${len(part.encode())}\r\n{part}\r\n" for part in command)
        connection.sendall(f"*{len(command)}\r\n{parts}".encode())
        return connection.recv(1 << 16)


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits. AssertionError if it never holds."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, f"not within 60 s: {what}"
        time.sleep(0.02)


SLOTS = 1 << 14


# A node that is only slow, on a machine that is busy, is not thought to be down.
PATIENT_MS = 60_000


@dataclass(frozen=True)
class Shards:
    """Masters, of which each has its share of the slots, and the replica of each, if there are."""

    masters: list[Redis]
    replicas: list[Redis]  # in the order of their masters
    tls: ssl.SSLContext | None = None

    @property
    def ports(self) -> list[int]:
        """The masters'."""
        return [one.port for one in self.masters]

    def wait(self, milliseconds: int) -> None:
        """From now on a node that is silent for so long is thought to be down, by those alive."""
        asked = ("CONFIG", "SET", "cluster-node-timeout", str(milliseconds))
        for one in (*self.masters, *self.replicas):
            if one.is_alive:
                assert said(one.port, *asked, tls=self.tls) == b"+OK\r\n"


@contextmanager
def cluster(
    folder: Path,
    *arguments: str,
    masters: int = 3,
    replicas: bool = False,
    tls: ssl.SSLContext | None = None,
) -> Iterator[Shards]:
    """A cluster that is whole, and patient with nodes that are silent: see :meth:`Shards.wait`.

    ``tls``: to talk to it, if the ``arguments`` make its nodes speak that.
    """
    with ExitStack() as stack:
        buses: dict[Redis, int] = {}

        def node(name: str) -> Redis:
            bus = stack.enter_context(HeldPort()).number
            server = stack.enter_context(
                redis(
                    folder / name,
                    "--cluster-enabled",
                    "yes",
                    "--cluster-node-timeout",
                    "2000",
                    "--cluster-port",
                    str(bus),
                    "--repl-diskless-sync-delay",
                    "0",
                    *arguments,
                    tls=tls is not None,
                )
            )
            buses[server] = bus
            return server

        def ask(server: Redis, *command: str) -> bytes:
            return said(server.port, "CLUSTER", *command, tls=tls)

        made = Shards(
            [node(f"master-{n}") for n in range(masters)],
            [node(f"replica-{n}") for n in range(masters if replicas else 0)],
            tls,
        )
        everyone = [*made.masters, *made.replicas]
        for number, one in enumerate(made.masters):
            first, last = SLOTS * number // masters, SLOTS * (number + 1) // masters - 1
            assert ask(one, "SET-CONFIG-EPOCH", str(number + 1)) == b"+OK\r\n"
            assert ask(one, "ADDSLOTSRANGE", str(first), str(last)) == b"+OK\r\n"
        there = made.masters[0]
        for one in everyone[1:]:
            meet = ("MEET", "127.0.0.1", str(there.port), str(buses[there]))
            assert ask(one, *meet) == b"+OK\r\n"
        for master, replica in zip(made.masters, made.replicas, strict=False):
            follow = ("REPLICATE", ask(master, "MYID").split(b"\r\n")[1].decode())
            until(lambda: ask(replica, *follow) == b"+OK\r\n", "a replica knows its master")  # noqa: B023
        known = f"cluster_known_nodes:{len(everyone)}\r\n".encode()

        def agreed() -> bool:
            infos = [ask(one, "INFO") for one in everyone]
            return all(b"cluster_state:ok" in info and known in info for info in infos)

        def follows(replica: Redis) -> bool:
            return b"master_link_status:up" in said(replica.port, "INFO", "replication", tls=tls)

        until(agreed, "the cluster is whole")
        until(lambda: all(map(follows, made.replicas)), "replicas that follow")
        made.wait(PATIENT_MS)  # not before: they would also take longer to agree
        yield made
