"""One device's line to the gateway: requests, counted and timed, on a link that may be slow.

Unlike :mod:`fedstream.device.connection` it holds next to no memory, and breaks on purpose.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedstream.broker.digest import Digester, algorithm_of
from fedstream.broker.errors import ConfigError, distrust
from fedstream.device.connection import Reply
from fedstream.load.answer import AnswerReader
from fedstream.load.connection import CutOff, LoadConnection, Untrusted, connect
from fedstream.protocol import headers as wire_headers
from fedstream.protocol.messages import BadBody, Problem
from fedstream.runtime.tls import TlsBuffers

if TYPE_CHECKING:
    import ssl

    from yarl import URL

    from fedstream.load.connection import Pieces
    from fedstream.load.tally import LoadTally

_ANSWER_S = 30.0  # for an answer's next bytes
_IDLE_S = 13.0  # of a kept connection: less than servers wait, so none is closed as it is used


class Lost(Exception):
    """There was no answer, or not all of it."""


@dataclass(frozen=True, slots=True)
class Break:
    """Where a device breaks a request off itself."""

    after: int | None = None  # bytes of the body
    after_s: float | None = None  # seconds of waiting for the answer


_WHOLE = Break()


@dataclass(frozen=True, slots=True)
class LoadReply(Reply):
    """An answer, read to its end."""

    digest: str = ""  # of a body that was not kept


class LoadedGateway:
    """How all devices reach the gateway."""

    def __init__(self, base: URL, tls: ssl.SSLContext) -> None:
        self.authority = base.host_port_subcomponent or ""
        self.common = (
            f"Host: {self.authority}\r\nUser-Agent: fedstream-load\r\nAccept: */*\r\n"
            "Accept-Encoding: identity\r\n"
        )
        self._host, self._port = base.host or "", base.port or 0
        self._tls = tls if base.scheme == "https" else None
        self._buffers = TlsBuffers()
        self._base = base
        self._has_worked = False

    async def connect(self, bytes_per_s: float | None) -> LoadConnection:
        """Raises OSError, and ConfigError if the certificate was never trusted.

        ``bytes_per_s``: of a slow link.
        """
        try:
            found = await connect(self._host, self._port, self._tls, self._buffers, bytes_per_s)
        except Untrusted as error:
            if self._has_worked:  # it may be renewed just now
                raise
            unsigned = "name the authority that signed it with --ca FILE"
            raise ConfigError(
                f"{self._base} is not trusted: {distrust(str(error), unsigned)}"
            ) from error
        self._has_worked = True
        return found


class DeviceLine:
    """A device's connection, opened whenever a request needs it."""

    __slots__ = ("_bytes_per_s", "_connection", "_gateway", "_tally")

    def __init__(self, gateway: LoadedGateway, tally: LoadTally, bytes_per_s: float | None) -> None:
        """``bytes_per_s``: of a slow link."""
        self._gateway = gateway
        self._tally = tally
        self._bytes_per_s = bytes_per_s
        self._connection: LoadConnection | None = None

    @property
    def authority(self) -> str:
        """The gateway's name, as requests are signed for it."""
        return self._gateway.authority

    async def ask(
        self,
        route: str,
        method: str,
        path: str,
        *,
        body: Pieces = (),
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        broken: Break = _WHOLE,
        digested: str = "",
    ) -> LoadReply:
        """Send one request and read its answer. Raises Lost.

        ``route``: its name in the tally. ``wait_s``: how much longer than usual the answer may
        take. ``broken``: where the device breaks it off. ``digested``: the body of an answer with
        status 200 is not kept, only its digest, made as this one was; '': it is kept.
        """
        began = time.monotonic()
        size = sum(map(len, body))
        head = self._head(method, path, size, headers or {})
        if broken.after is not None:
            body, size = _until(body, broken.after), broken.after
        self._tally.sent += size
        digest = Digester(algorithm_of(digested)) if digested else None
        answer = AnswerReader(is_head=method == "HEAD", digest=digest)
        cut = None
        try:
            connection = await self._opened()
            if broken.after_s is not None:
                loop = asyncio.get_running_loop()
                cut = loop.call_later(broken.after_s, connection.cut)
            await connection.exchange(
                head, body, answer, within_s=_ANSWER_S + wait_s, is_cut=broken.after is not None
            )
        except OSError as error:
            self._note(error)
            raise Lost(f"{method} {path}: {error or type(error).__name__}") from error
        finally:
            if cut is not None:
                cut.cancel()
            self._tally.received += answer.size
        self._tally.answered(route, answer.status, time.monotonic() - began)
        found = digest.digest() if digest is not None else ""
        reply = LoadReply(answer.status, answer.headers, answer.body, found)
        if answer.status >= 400 and method != "HEAD":  # which has no body to say why
            self._tally.refusals[_reason(reply)] += 1
        return reply

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def _opened(self) -> LoadConnection:
        kept = self._connection
        if kept is not None and kept.is_open and kept.idle_s() < _IDLE_S:
            return kept
        self.close()
        self._connection = await self._gateway.connect(self._bytes_per_s)
        return self._connection

    def _head(self, method: str, path: str, size: int, headers: Mapping[str, str]) -> bytes:
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        about = f"Content-Length: {size}\r\n" if size or method in ("POST", "PATCH") else ""
        if "Content-Type" not in headers and size:
            about += f"Content-Type: {wire_headers.CONTENT_TYPE}\r\n"
        common = self._gateway.common
        return f"{method} {path} HTTP/1.1\r\n{common}{lines}{about}\r\n".encode("latin-1")

    def _note(self, error: OSError) -> None:
        """Tell a break of our own from one that was not wanted."""
        if isinstance(error, CutOff):
            self._tally.events["requests cut off"] += 1
        elif isinstance(error, TimeoutError):
            self._tally.events["requests without an answer in time"] += 1
        else:
            self._tally.events["connections lost"] += 1


def _until(body: Pieces, end: int) -> Pieces:
    """The first so many bytes of a body."""
    found = []
    for part in body:
        found.append(part[: max(0, end)])
        end -= len(part)
    return found


def _reason(reply: Reply) -> str:
    try:
        return Problem.decode(reply.body).reason
    except BadBody:
        return f"status {reply.status}"
