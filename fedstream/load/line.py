"""One device's connections to the gateway: requests, counted and timed, on a link that may be slow.

Unlike :mod:`fedstream.device.connection` it holds next to no memory, and breaks on purpose.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp

from fedstream.device.connection import Reply
from fedstream.protocol import headers as wire_headers
from fedstream.protocol.messages import BadBody, Problem

if TYPE_CHECKING:
    import ssl

    from yarl import URL

    from fedstream.load.tally import LoadTally

_CONNECT_S = 15.0
_ANSWER_S = 30.0  # for an answer's next bytes
_PIECE_S = 0.1  # between two pieces on a slow link
_PIECE = 1 << 16  # bytes
_LARGE = 1 << 20  # from here on, aiohttp wants a file


class Lost(Exception):
    """There was no answer, or not all of it."""


class _CutOff(Exception):
    """The end of a body that the device cuts off itself."""


@dataclass(frozen=True, slots=True)
class Break:
    """Where a device breaks a request off itself."""

    after: int | None = None  # bytes of the body
    after_s: float | None = None  # seconds of waiting for the answer


_WHOLE = Break()


class DeviceLine:
    """Connections of one device."""

    __slots__ = ("_base", "_bytes_per_s", "_session", "_tally", "_tls")

    def __init__(
        self, base: URL, tls: ssl.SSLContext | bool, tally: LoadTally, bytes_per_s: float | None
    ) -> None:
        """``tls``: shared by all devices. ``bytes_per_s``: of a slow link."""
        self._base = base
        self._tls = tls
        self._tally = tally
        self._bytes_per_s = bytes_per_s
        self._session: aiohttp.ClientSession | None = None

    @property
    def authority(self) -> str:
        """The gateway's name, as requests are signed for it."""
        return self._base.host_port_subcomponent or ""

    async def ask(
        self,
        route: str,
        method: str,
        path: str,
        *,
        body: bytes | memoryview = b"",
        headers: Mapping[str, str] | None = None,
        wait_s: float = 0.0,
        broken: Break = _WHOLE,
    ) -> Reply:
        """Send one request and read its answer. Raises Lost.

        ``route``: its name in the tally. ``wait_s``: how much longer than usual the answer may
        take. ``broken``: where the device breaks it off.
        """
        began = time.monotonic()
        times = aiohttp.ClientTimeout(
            total=broken.after_s, sock_connect=_CONNECT_S, sock_read=_ANSWER_S + wait_s
        )
        about = {"Content-Type": wire_headers.CONTENT_TYPE, **(headers or {})}
        try:
            async with self._opened().request(
                method, self._base.with_path(path), data=self._data(body, broken.after, about),
                headers=about, timeout=times, allow_redirects=False,
            ) as response:  # fmt: skip
                data = await self._read(response)
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            self._note(broken, error)
            raise Lost(f"{method} {path}: {error or type(error).__name__}") from error
        found = {name.lower(): value for name, value in response.headers.items()}
        self._tally.answered(route, response.status, time.monotonic() - began)
        reply = Reply(response.status, found, data)
        if response.status >= 400 and method != "HEAD":  # which has no body to say why
            self._tally.refusals[_reason(reply)] += 1
        return reply

    async def close(self) -> None:
        """Close the connections; the next request opens another."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # A heartbeat may pass an upload.
                connector=aiohttp.TCPConnector(ssl=self._tls, limit=2, ttl_dns_cache=None),
                cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
                headers={"User-Agent": "fedstream-load", "Accept-Encoding": "identity"},
            )  # fmt: skip
        return self._session

    def _data(
        self, body: bytes | memoryview, cut_at: int | None, headers: dict[str, str]
    ) -> io.BytesIO | bytes | AsyncIterator[bytes] | None:
        """The body as aiohttp takes it; in pieces if the link is slow or breaks in between."""
        if not len(body):
            return None
        if cut_at is None and self._bytes_per_s is None:
            self._tally.sent += len(body)
            return bytes(body) if len(body) < _LARGE else io.BytesIO(body)
        headers["Content-Length"] = str(len(body))  # else it would be chunked
        return self._pieces(memoryview(body), cut_at)

    async def _pieces(self, body: memoryview, cut_at: int | None) -> AsyncIterator[bytes]:
        rate = self._bytes_per_s
        size = _PIECE if rate is None else max(1, round(rate * _PIECE_S))
        end = len(body) if cut_at is None else cut_at
        for at in range(0, end, size):
            piece = bytes(body[at : min(end, at + size)])
            self._tally.sent += len(piece)
            yield piece
            if rate is not None:
                await asyncio.sleep(len(piece) / rate)
        if cut_at is not None:
            raise _CutOff

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        rate = self._bytes_per_s
        data, size = bytearray(), _PIECE if rate is None else max(1, round(rate * _PIECE_S))
        async for piece in response.content.iter_chunked(size):
            self._tally.received += len(piece)
            data += piece
            if rate is not None:
                await asyncio.sleep(len(piece) / rate)
        return bytes(data)

    def _note(self, broken: Break, error: Exception) -> None:
        """Tell a break of our own from one that was not wanted."""
        ours = isinstance(error.__cause__, _CutOff) or (
            broken.after_s is not None and isinstance(error, TimeoutError)
        )
        if ours:
            self._tally.events["requests cut off"] += 1
        elif isinstance(error, TimeoutError):
            self._tally.events["requests without an answer in time"] += 1
        else:
            self._tally.events["connections lost"] += 1


def _reason(reply: Reply) -> str:
    try:
        return Problem.decode(reply.body).reason
    except BadBody:
        return f"status {reply.status}"
