"""The network: an address for every pod and Service, and names that lead to them.

A pod has a loopback address of its own, so that all may listen on the same port. A Service has one
too, where connections are passed on to the pods that are ready, one after the other. Nothing here
answers DNS: names are replaced by addresses in what a pod is given.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

import aiohttp

from tests.k8s.cluster.manifests import Manifest

_LOCK_PORT = 9  # of the network's last address: whoever has it has the network
_UNPRIVILEGED = 1024  # a port below it may be root's alone
_RAISED = 8000  # so much higher is such a port of a Service here
_CHUNK = 1 << 16
_LAG_S = 3.0  # before a Service forgets a pod that is not ready, or to end


class Addresses:
    """A network 127.x.y.0/24 that no other process on this machine uses."""

    def __init__(self) -> None:
        self._lock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        for number in range(1 << 14):
            self._network = f"127.{64 + (number >> 8)}.{number & 255}"
            with suppress(OSError):
                self._lock.bind((f"{self._network}.255", _LOCK_PORT + _UNPRIVILEGED))
                break
        else:
            raise RuntimeError("every network of this machine is taken")
        self._last = 0
        self._known: dict[str, str] = {}

    def new(self) -> str:
        """An address that nobody had."""
        self._last += 1
        if self._last > 254:
            raise RuntimeError("a cluster of more than 254 addresses")
        return f"{self._network}.{self._last}"

    def of(self, name: str) -> str:
        """The address of a name that keeps it: a Service, a pod of a StatefulSet."""
        if name not in self._known:
            self._known[name] = self.new()
        return self._known[name]

    @property
    def every(self) -> list[str]:
        """All addresses that there may ever be: a certificate is for them."""
        return [f"{self._network}.{number}" for number in range(1, 255)]

    def close(self) -> None:
        """Gives the network back."""
        self._lock.close()


class Endpoint(Protocol):
    """What a Service needs to know of a pod."""

    @property
    def address(self) -> str:
        """Where it is."""

    def port(self, name: int | str) -> int | None:
        """The number of a port that one of its containers names."""


class Service:
    """One Service: connections to it go to whoever is ready, in turn; without anybody they end."""

    def __init__(self, manifest: Manifest, address: str) -> None:
        spec = manifest["spec"]
        self.selector: Mapping[str, Any] = spec["selector"]
        self.address = address
        self.unready_too = bool(spec.get("publishNotReadyAddresses"))
        self.ready: list[int] = []  # how many endpoints there were, each time that changed
        self._ports: Sequence[Mapping[str, Any]] = spec["ports"]
        self._endpoints: tuple[Endpoint, ...] = ()
        self._asked: list[Endpoint] = []  # these, and those that were so a moment ago
        self._turn = 0
        self._servers: list[asyncio.Server] = []
        self._passing: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        """Of HTTP at its first port."""
        return f"http://{self.address}:{raised(self._ports[0]['port'])}"

    def set(self, endpoints: Iterable[Endpoint]) -> None:
        """From now on these are the endpoints."""
        before, self._endpoints = self._endpoints, tuple(endpoints)
        if set(before) == set(self._endpoints):
            return
        self.ready.append(len(self._endpoints))
        self._asked += [one for one in self._endpoints if one not in self._asked]
        loop = asyncio.get_running_loop()
        for one in before:
            if one not in self._endpoints:
                loop.call_later(_LAG_S, self._drop, one)

    def _drop(self, endpoint: Endpoint) -> None:
        if endpoint not in self._endpoints and endpoint in self._asked:
            self._asked.remove(endpoint)

    async def __aenter__(self) -> Self:
        for port in self._ports:

            def accept(
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
                target: int | str = port["targetPort"],
            ) -> None:
                passing = asyncio.create_task(self._pass_on(reader, writer, target))
                self._passing.add(passing)
                passing.add_done_callback(self._passing.discard)

            server = await asyncio.start_server(accept, self.address, raised(port["port"]))
            self._servers.append(server)
        return self

    async def __aexit__(self, *_error: object) -> None:
        for server in self._servers:
            server.close()
        for passing in self._passing:
            passing.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    def _next(self, target: int | str) -> tuple[str, int] | None:
        self._turn += 1
        for n in range(len(self._asked)):
            pod = self._asked[(self._turn + n) % len(self._asked)]
            if port := pod.port(target):
                return pod.address, port
        return None

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int | str
    ) -> None:
        try:
            if endpoint := self._next(target):
                with suppress(OSError):  # it is not there (any more): neither is the connection
                    there, back = await asyncio.open_connection(*endpoint)
                    await asyncio.gather(_pass(reader, back), _pass(there, writer))
        finally:
            writer.close()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        with suppress(OSError):
            while data := await reader.read(_CHUNK):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()  # and so the other direction ends too


def client(timeout_s: float | None = None) -> aiohttp.ClientSession:
    """Who asks over HTTP: every question is a connection of its own, and is put once.

    aiohttp would put it again where the server went away, and nobody would see that it had.
    """
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(force_close=True), timeout=aiohttp.ClientTimeout(timeout_s)
    )
    session._retry_connection = False
    return session


def raised(port: int) -> int:
    """Where a Service's port is here: one that needs no root."""
    return port if port >= _UNPRIVILEGED else port + _RAISED


def translator(names: Mapping[str, str], namespace: str) -> Callable[[str], str]:
    """What puts addresses in place of names wherever a text means a host.

    That is behind ``//`` or ``@``, before ``:PORT``, or where a name has the namespace or its
    StatefulSet's Service in it. A word alone, as in ``[redis]`` or ``/etc/redis``, stays.
    """
    if not names:
        return str
    domain = rf"(?:\.{re.escape(namespace)}(?:\.svc(?:\.cluster\.local)?)?)"
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    host = re.compile(
        rf"(?P<before>(?P<scheme>\w+)://(?:[^\s/@\"']*@)?)?(?<![\w.-])(?<!(?<!/)/)"
        rf"(?P<name>{any_name})(?P<domain>{domain}?)(?:(?::)(?P<port>\d+))?(?![\w-]|\.\w|://)"
    )

    def replace(found: re.Match[str]) -> str:
        before, name, port = found["before"] or "", found["name"], found["port"]
        if not (before or port or found["domain"] or "." in name):
            return found[0]
        if port is None and found["scheme"] in ("http", "https"):
            port = "80" if found["scheme"] == "http" else "443"
        return before + names[name] + (f":{raised(int(port))}" if port else "")

    return lambda text: host.sub(replace, text)
