"""Connections of a port: counted, bounded in number, and cut off if their reader takes nothing."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

from aiohttp import web

from fedstream.runtime.crowd import Crowd, TooMany
from fedstream.runtime.problems import problem
from fedstream.runtime.tls import TlsBuffers, TlsConnection, TlsFailure

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from prometheus_client import Counter
    from structlog.typing import FilteringBoundLogger

    from fedstream.runtime.http import HttpSettings

SLICE = 1 << 18  # bytes of a long body to write at once, and so held up by a slow reader
_LINGER_S = 2.0  # for the unread rest of a request's body
_READ_S = 0.002  # after a timer, to read what came in time: with 0, uvloop would read nothing
_HEADERS = 64  # of a request, each of at most 8 KiB
_TOO_MANY: dict[TooMany, str] = {
    "busy": "too many connections: try again later",
    "address": "too many connections from this address",
    "arrivals": "too many new connections from this address: slow down",
}


class Entrance:
    """Where connections of a port are counted, and refused if there are too many."""

    def __init__(self, crowd: Crowd, log: FilteringBoundLogger, refused: Counter | None) -> None:
        self._crowd = crowd
        self._log = log
        self._refused = refused

    def enter(self, who: object, wire: asyncio.BaseTransport) -> TooMany | None:
        """Count a connection that was accepted; if it is one too many, only that it was refused."""
        peer = wire.get_extra_info("peername")
        now = asyncio.get_running_loop().time()
        reason = self._crowd.enter(who, str(peer[0]) if peer else "", now)
        if reason is not None:
            crowd = self._crowd
            limits = {"busy": crowd.most, "address": crowd.of_address, "arrivals": crowd.arrivals}
            most = limits[reason]
            self._log.warning("connection refused: too many", reason=reason, most=most)
            if self._refused is not None:
                self._refused.labels(reason).inc()
        return reason

    def leave(self, who: object) -> None:
        """Count a connection no more, if it was."""
        self._crowd.leave(who)

    def failed(self, reason: TlsFailure, said: str, peer: object) -> None:
        """Count a connection that ended because of TLS."""
        # Anybody can cause any number of these: no warnings.
        self._log.debug("TLS failed", reason=reason, said=said, remote=peer)
        if self._refused is not None:
            self._refused.labels(reason).inc()


class SecuredConnection(TlsConnection):
    """A connection that is to agree on TLS; one too many is closed without a word."""

    __slots__ = ("_entrance",)

    def __init__(
        self, make: Callable[[], asyncio.Protocol], context: ssl.SSLContext, buffers: TlsBuffers,
        entrance: Entrance, *, within_s: float,
    ) -> None:  # fmt: skip
        super().__init__(make, context, buffers, within_s=within_s)
        self._entrance = entrance

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._entrance.enter(self, transport) is None:
            super().connection_made(transport)
        else:
            cast("asyncio.Transport", transport).abort()

    def failed(self, reason: TlsFailure, said: str) -> None:
        self._entrance.failed(reason, said, self.get_extra_info("peername"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._entrance.leave(self)
        super().connection_lost(exc)


def _refusal(reason: TooMany) -> bytes:
    body = json.dumps({"error": _TOO_MANY[reason], "reason": reason})
    return (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
        f"Retry-After: 1\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


class _Refused(asyncio.Protocol):
    """A connection over the limit: it gets a 503, and its input is ignored."""


class ServedConnection(web.RequestHandler):
    """A connection that is aborted when its reader takes nothing for ``write_s`` seconds."""

    __slots__ = ("_cut", "_entrance", "_http", "_log", "_refused", "_wire")

    def __init__(
        self,
        server: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        http: HttpSettings,
        entrance: Entrance | None,
        log: FilteringBoundLogger,
        refused: Counter | None,
    ) -> None:
        """``entrance``: None if the connection has come through it, with TLS."""
        super().__init__(
            server, loop=loop, keepalive_timeout=http.idle_s, lingering_time=_LINGER_S,
            max_headers=_HEADERS, auto_decompress=False,
            access_log=cast("Any", None),  # probes and scrapes would be most of the lines
        )  # fmt: skip
        self._http = http
        self._entrance = entrance
        self._log = log
        self._refused = refused
        self._wire: asyncio.Transport | None = None
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast("asyncio.Transport", transport)
        if self._entrance is not None:
            reason = self._entrance.enter(self, wire)
            if reason is not None:
                wire.set_protocol(_Refused())
                wire.write(_refusal(reason))
                wire.close()
                return
        # All bytes that the kernel has not yet taken count as unread, including the end of a
        # response: closing a connection would wait for them for ever.
        wire.set_write_buffer_limits(high=0)
        self._wire = wire
        super().connection_made(transport)

    def _process_keepalive(self) -> None:
        """Close the connection if it is idle, as aiohttp does, but read first what came in time: a
        busy loop runs timers late, and before it reads.
        """
        asyncio.get_running_loop().call_later(_READ_S, super()._process_keepalive)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._wire is not None:
            self._cut = asyncio.get_running_loop().call_later(self._http.write_s, self._wire.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._keep()
        self._wire = None
        if self._entrance is not None:
            self._entrance.leave(self)
        super().connection_lost(exc)

    def _keep(self) -> None:
        if self._cut is not None:
            self._cut.cancel()
            self._cut = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer an unreadable request or a handler's failure, and close the connection."""
        begun = request.writer.output_size > 0
        if isinstance(exc, ConnectionError) and (begun or request.transport is None):
            raise exc  # the client went away, or was cut off
        if isinstance(exc, UnicodeEncodeError) and not request.headers.get("Expect", "").isascii():
            # aiohttp's own answer fails, where there is no route that could have another.
            status, message = 417, "only Expect: 100-continue is met"
        if status < 500:
            said = " ".join((message or str(exc)).split())
            text = f"malformed request: {said}"[:200]
            reason = "malformed"
            self._log.warning("bad request", remote=request.remote, reason=text)
        else:
            self._log.error("request failed", path=request.path, exc_info=exc)
            text, reason = "internal error: see the service's log", "internal"
        if self._refused is not None:
            self._refused.labels(reason).inc()
        if begun:
            raise ConnectionError("the response was already partly sent")
        response = problem(status, text, reason=reason)
        response.force_close()
        return response
