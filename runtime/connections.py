"""Connections of a port: how aiohttp's are counted, bounded and kept, and who gets their requests.

A reader that takes nothing is cut off. While aiohttp has nothing to do, plain requests go to their
quick routes.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from aiohttp import web

from fedstream.runtime.crowd import Crowd, TooMany
from fedstream.runtime.plain import PlainReader, response
from fedstream.runtime.problems import problem
from fedstream.runtime.quick import READ_S, Idle, IncomingBody, QuickRoutes
from fedstream.runtime.tls import TlsBuffers, TlsConnection, TlsFailure

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from prometheus_client import Counter
    from structlog.typing import FilteringBoundLogger

    from fedstream.runtime.http import HttpSettings
    from fedstream.runtime.plain import PlainRequest

SLICE = 1 << 18  # bytes of a long body to write at once, and so held up by a slow reader
_LINGER_S = 2.0  # for the unread rest of a request's body
_AHEAD = 1 << 13  # bytes behind a request that a quick route has taken; then no more are read
_HELD = 1 << 17  # bytes of a body that a quick route has not read; then no more are taken
_NO_BODY = memoryview(b"")
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


class _Ending(NamedTuple):
    """What comes after an answer of a quick route."""

    is_last: bool  # the connection ends
    then: Callable[[], None] | None


class _Refused(asyncio.Protocol):
    """A connection over the limit: it gets a 503, and its input is ignored."""


class ServedConnection(web.RequestHandler):
    """A connection that is aborted when its reader takes nothing for ``write_s`` seconds.

    While aiohttp has nothing to do, plain requests go to their quick routes.
    """

    __slots__ = (
        "_answered", "_behind", "_cut", "_ending", "_entrance", "_http", "_idle", "_incoming",
        "_is_taken", "_log", "_plain", "_quick", "_refused", "_wire",
    )  # fmt: skip

    def __init__(
        self,
        server: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        http: HttpSettings,
        entrance: Entrance | None,
        quick: QuickRoutes,
        idle: Idle,
        log: FilteringBoundLogger,
        refused: Counter | None,
    ) -> None:
        """``entrance``: None if the connection has come through it, with TLS. ``idle``: the
        connections whose last request a quick route answered.
        """
        super().__init__(
            server, loop=loop, keepalive_timeout=http.idle_s, lingering_time=_LINGER_S,
            max_headers=_HEADERS, auto_decompress=False,
            access_log=cast("Any", None),  # probes and scrapes would be most of the lines
        )  # fmt: skip
        self._http = http
        self._entrance = entrance
        self._quick = quick
        self._idle = idle
        self._plain = PlainReader()
        self._is_taken = False  # a request, by a quick route
        self._incoming: IncomingBody | None = None  # its body, until all of that has come
        self._behind = b""  # what has come behind it
        self._ending: _Ending | None = None  # of an answer that was written
        self._answered: asyncio.Future[None] | None = None  # set if the end waits for it
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

    # quick routes

    def data_received(self, data: bytes) -> None:
        if self._is_taken:
            if behind := self._into_body(data):
                self._behind += behind
                # Who is not read is not seen to go away, either.
                if len(self._behind) > _AHEAD and self._wire is not None:
                    self._wire.pause_reading()
            self._end()
            return
        if not (data and self._quick):  # aiohttp itself calls with nothing, to read on
            super().data_received(data)
            return
        request = self._plain.take(data)
        if request is not None and self._waits():
            self._is_taken = True
            if self._takes(request):
                self.keep_alive(True)  # ends aiohttp's timer
                if self._is_taken:  # not answered yet
                    self._idle.end(self)
                return
            self._is_taken = False
        super().data_received(data)
        if not self._waits():
            self._idle.end(self)  # aiohttp counts again, from its answer on

    def _takes(self, request: PlainRequest) -> bool:
        """Whether a quick route has taken the request. Its failure is answered as a handler's is,
        and closes the connection.
        """
        try:
            return self._quick.take(request, self)
        except Exception as error:
            text, reason = self._failed(request.target, error)
            if not self._is_taken or self._ending is not None:  # it was answered before that
                self.force_close()
                return True
            about = {"Content-Type": "application/json; charset=utf-8", "Connection": "close"}
            body = json.dumps({"error": text, "reason": reason}).encode()
            self.answer(response(500, about, body), is_last=True)
            return True

    def _waits(self) -> bool:
        """Whether aiohttp waits for a request."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def remote(self) -> str:
        """The address of who asks."""
        return str(self.peername[0]) if self.peername else ""

    @property
    def is_open(self) -> bool:
        """Whether who asked is still there."""
        return self.transport is not None

    def incoming(self, request: PlainRequest) -> IncomingBody:
        """The body of the request that a quick route takes."""
        wire = self._wire
        assert wire is not None  # noqa: S101  (it has sent the request)
        incoming = IncomingBody(len(request.body) + request.missing, wire.resume_reading)
        if request.body:
            incoming.feed(request.body)
        self._incoming = incoming if incoming.missing else None
        return incoming

    def _into_body(self, data: bytes) -> bytes:
        """Pass on what belongs to the body of the request that was taken; return the rest."""
        incoming = self._incoming
        if incoming is None:
            return data
        body, rest = data[: incoming.missing], data[incoming.missing :]
        self._plain.skip(len(body))
        incoming.feed(body)
        if not incoming.missing:
            self._incoming = None
        if self._ending is not None:  # nobody reads it any more
            incoming.drop()
        elif incoming.missing and incoming.size > _HELD and self._wire is not None:
            self._wire.pause_reading()
        return rest

    def answer(
        self,
        response: bytes,
        body: memoryview = _NO_BODY,
        *,
        is_last: bool = False,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Answer the request that a quick route has taken."""
        self._ending = _Ending(is_last, then)
        if self._wire is None or self.transport is None:
            self._forget()
            return
        self._wire.writelines((response, body))
        if self._incoming is not None:
            self._incoming.drop()
            self._loop.call_later(_LINGER_S, self._leave, self._incoming)
        self._end()

    def _end(self) -> None:
        """Be ready for another request, once an answer was taken and its request has ended."""
        ending = self._ending
        if ending is None or self._cut is not None or self._incoming is not None:
            return
        self._forget()
        self._is_taken = bool(self._behind)
        if ending.is_last:
            self.force_close()
            return
        self._idle.begin(self)
        if self._behind:
            self._loop.call_soon(self._go_on)

    def _forget(self) -> None:
        """Note that an answer has ended, whatever became of it."""
        ending, self._ending, self._is_taken = self._ending, None, False
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(None)
        if ending is not None and ending.then is not None:
            ending.then()

    def _leave(self, incoming: IncomingBody) -> None:
        """Close the connection if a request that was answered still has not ended."""
        if self._incoming is incoming:
            self.force_close()

    def _go_on(self) -> None:
        """Take what has come behind a request that is answered now."""
        self._is_taken = False
        if self._wire is not None:
            behind, self._behind = self._behind, b""
            self._wire.resume_reading()
            self.data_received(behind)

    def _process_keepalive(self) -> None:
        """Look, as aiohttp does, whether the connection is idle. A busy loop comes late, and may
        not have read yet what has come in time.
        """
        self._keepalive_handle = self._loop.call_later(READ_S, super()._process_keepalive)

    def expire(self) -> None:
        """Close the connection if aiohttp would, had it answered the last request."""
        if self._waits():
            self.force_close()

    def close(self) -> None:
        """Take no more requests. What a quick route has taken is answered first."""
        if not self._is_taken:
            super().close()

    async def shutdown(self, timeout: float | None = 15.0) -> None:
        """End the connection; what was begun has ``timeout`` seconds to be answered and taken."""
        if self._is_taken:
            self._answered = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._answered
            super().close()
        await super().shutdown(timeout)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._wire is not None:
            self._cut = self._loop.call_later(self._http.write_s, self._wire.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep()
        self._end()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._keep()
        self._wire = None
        self._behind = b""
        if self._incoming is not None:
            self._incoming.fail(ConnectionResetError("the client went away"))
            self._incoming = None
        self._forget()
        self._idle.end(self)
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
            self._count(reason)
        else:
            text, reason = self._failed(request.path, exc)
        if begun:
            raise ConnectionError("the response was already partly sent")
        response = problem(status, text, reason=reason)
        response.force_close()
        return response

    def _failed(self, path: str, error: BaseException | None) -> tuple[str, str]:
        """Log and count that a request can't be answered; the text and reason for the client."""
        self._log.error("request failed", path=path, exc_info=error)
        self._count("internal")
        return "internal error: see the service's log", "internal"

    def _count(self, reason: str) -> None:
        if self._refused is not None:
            self._refused.labels(reason).inc()
