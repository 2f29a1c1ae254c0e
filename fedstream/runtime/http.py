"""Serving HTTP with bounded connections, time and memory.

A service has two ports. Its own routes (only coordinators and gateways have any) are on
``http.port``. Probes and metrics are on ``http.health_port``, with a separate connection limit, so
that filling the first port can't get a service restarted. The first port may speak TLS, the second
never does.

aiohttp closes connections on which no complete request arrives in time, limits the size of lines
and headers, and applies back-pressure to clients that send too fast. aiohttp neither limits the
number of connections nor drops slow readers: :class:`ServedConnection` does both. Connections count
from their acceptance. A connection above the limit gets a 503; with TLS it is closed, as an answer
would take a handshake.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack, asynccontextmanager
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, cast

from aiohttp import HttpVersion11, web
from pydantic import AfterValidator, Field, SecretStr

from fedstream.broker.settings import in_lines
from fedstream.core.errors import FedstreamError
from fedstream.runtime.config import Section
from fedstream.runtime.limits import ConnectionLimit, TooMany
from fedstream.runtime.tls import CurrentTls, TlsBuffers, TlsConnection, TlsFailure

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from aiohttp.typedefs import Middleware
    from prometheus_client import Counter
    from structlog.typing import FilteringBoundLogger

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def problem(
    status: int, text: str, *, reason: str | None = None, retry_after_s: int | None = None
) -> web.Response:
    """An error response for people and programs.

    ``reason``: one word for programs. ``retry_after_s``: the header Retry-After.
    """
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    body = {"error": text} if reason is None else {"error": text, "reason": reason}
    return web.json_response(body, status=status, headers=headers)


SLICE = 1 << 18  # bytes written at once, which a slow reader holds in memory
_LINGER_S = 2.0  # for the unread rest of a request's body
_READ_S = 0.002  # to read input that arrived in time; with 0, uvloop would read nothing
_HEADERS = 64  # of a request, each of at most 8 KiB
_TOO_MANY: dict[TooMany, str] = {
    "busy": "too many connections: try again later",
    "address": "too many connections from this address",
    "arrivals": "too many new connections from this address: slow down",
}


class ConnectionCounter:
    """Counts the connections of a port, and refuses connections above the limit."""

    def __init__(
        self, connection_limit: ConnectionLimit, log: FilteringBoundLogger, refused: Counter | None
    ) -> None:
        self._connection_limit = connection_limit
        self._log = log
        self._refused = refused

    def enter(self, who: object, wire: asyncio.BaseTransport) -> TooMany | None:
        """Count an accepted connection, or its refusal if there are too many."""
        peer = wire.get_extra_info("peername")
        now = asyncio.get_running_loop().time()
        reason = self._connection_limit.enter(who, str(peer[0]) if peer else "", now)
        if reason is not None:
            connection_limit = self._connection_limit
            limits = {
                "busy": connection_limit.most,
                "address": connection_limit.of_address,
                "arrivals": connection_limit.arrivals,
            }
            most = limits[reason]
            self._log.warning("connection refused: too many", reason=reason, most=most)
            if self._refused is not None:
                self._refused.labels(reason).inc()
        return reason

    def leave(self, who: object) -> None:
        """Stop counting a connection."""
        self._connection_limit.leave(who)

    def failed(self, reason: TlsFailure, said: str, peer: object) -> None:
        """Count a failed TLS connection."""
        # No warnings, as clients can cause any number of these.
        self._log.debug("TLS failed", reason=reason, said=said, remote=peer)
        if self._refused is not None:
            self._refused.labels(reason).inc()


class SecuredConnection(TlsConnection):
    """A TLS connection before and after its handshake; above the limit, it is closed."""

    __slots__ = ("_connection_counter",)

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        buffers: TlsBuffers,
        connection_counter: ConnectionCounter,
        *,
        within_s: float,
    ) -> None:
        super().__init__(make, context, buffers, within_s=within_s)
        self._connection_counter = connection_counter

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._connection_counter.enter(self, transport) is None:
            super().connection_made(transport)
        else:
            cast("asyncio.Transport", transport).abort()

    def failed(self, reason: TlsFailure, said: str) -> None:
        self._connection_counter.failed(reason, said, self.get_extra_info("peername"))

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connection_counter.leave(self)
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

    __slots__ = ("_connection_counter", "_cut", "_http", "_log", "_refused", "_wire")

    def __init__(
        self,
        server: web.Server,
        *,
        loop: asyncio.AbstractEventLoop,
        http: HttpSettings,
        connection_counter: ConnectionCounter | None,
        log: FilteringBoundLogger,
        refused: Counter | None,
    ) -> None:
        """``connection_counter``: None if TLS has counted the connection already."""
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=http.idle_s,
            lingering_time=_LINGER_S,
            max_headers=_HEADERS,
            auto_decompress=False,
            access_log=cast("Any", None),  # probes and scrapes would be most of the lines
        )
        self._http = http
        self._connection_counter = connection_counter
        self._log = log
        self._refused = refused
        self._wire: asyncio.Transport | None = None
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        wire = cast("asyncio.Transport", transport)
        if self._connection_counter is not None:
            reason = self._connection_counter.enter(self, wire)
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
        """Close an idle connection like aiohttp, but first read input that arrived in time.

        A busy loop runs timers late, and before it reads from sockets.
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
        if self._connection_counter is not None:
            self._connection_counter.leave(self)
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
            raise exc  # the client disconnected or was cut off
        if isinstance(exc, UnicodeEncodeError) and not request.headers.get("Expect", "").isascii():
            # Replaces aiohttp's own answer, which fails here.
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


NOWHERE = "nowhere"  # name of the page for browsers at unknown routes
_CLOSE_S = 2.0  # for unfinished requests at the end of the service
_HEALTH_CONNECTIONS = 64
# Connections waiting for acceptance: after a restart, thousands of devices reconnect at once.
_BACKLOG = 4096
# Reasons of refusals outside of routes; `internal` is a bug.
REFUSED = (
    "malformed",
    "no such route",
    "method",
    "busy",
    "address",
    "arrivals",
    "tls",
    "timeout",
    "certificate",
    "host",
    "internal",
)
_HERE = ("127.0.0.1", "localhost", "[::1]")
_INSIDE = (".svc", ".svc.cluster.local")  # of a cluster: public DNS has no such names
_PORT = re.compile(r":\d*\Z")


def _host_name(host: str) -> str:
    """A host name in lower case. Raises ValueError for an invalid one."""
    if re.fullmatch(r"[^\s:/\[\]]+|\[[0-9a-fA-F:.]+\]", host) is None:
        raise ValueError("expected a name without scheme, port and path, as in 'runs.example.org'")
    return host.lower()


HostName: TypeAlias = Annotated[str, AfterValidator(_host_name)]


_LEAST_TOKEN: Final = 16  # characters


def tokens_in(secret: str) -> list[str]:
    """The tokens in a setting or a file, one a line. Raises ValueError if one is too short."""
    found = in_lines(secret)
    if not found or min(map(len, found)) < _LEAST_TOKEN:
        raise ValueError(f"expected tokens of at least {_LEAST_TOKEN} characters, one a line")
    return found


def _checked_tokens(secret: SecretStr) -> SecretStr:
    tokens_in(secret.get_secret_value())
    return secret


TokensSecret: TypeAlias = Annotated[
    Annotated[SecretStr, AfterValidator(_checked_tokens)] | None, Field(exclude=True)
]


class HttpSettings(Section):
    """The table ``[http]``: addresses, tokens, and limits on clients."""

    host: str = "127.0.0.1"
    # Names under which clients reach the service besides ``host``. None, any name, is no value for
    # a configuration, but set by services whose every request needs a secret, which a foreign web
    # page doesn't have.
    hosts: tuple[HostName, ...] | None = ()
    port: int = Field(default=0, ge=0, le=65535)  # of its own routes; 0: any free port
    health_port: int = Field(default=0, ge=0, le=65535)  # of probes and metrics; likewise
    token: TokensSecret = None
    token_file: str | None = None  # reread after a change; ``token`` takes precedence
    # PEM files of a TLS proxy in front, whose expiry metrics show.
    certificates: tuple[str, ...] = ()
    connections: Annotated[int, Field(ge=1)] = 256  # concurrent, on ``port``
    address_connections: Annotated[int, Field(ge=1)] | None = None  # of these, from one address
    # New connections per second from one address, after a burst.
    address_arrivals: Annotated[float, Field(gt=0)] | None = None
    idle_s: Annotated[float, Field(gt=0)] = 15.0  # until a connection without a request is closed
    write_s: Annotated[float, Field(gt=0)] = 15.0  # until a stalled reader is disconnected

    @property
    def has_token(self) -> bool:
        """Whether clients need a token."""
        return self.token is not None or self.token_file is not None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return self.host == "localhost" or _is_loopback(self.host)

    def is_named(self, host: str) -> bool:
        """Whether a ``Host`` header, perhaps with a port, names this server.

        This check protects against DNS rebinding, in which a web page's own name resolves to our
        address. Such a name is in public DNS. So if other machines can connect, addresses, names
        without a dot and names inside a cluster are accepted too.
        """
        if self.hosts is None:
            return True
        name = _PORT.sub("", host).lower()
        if name in {*_HERE, self.host.lower(), f"[{self.host}]".lower(), *self.hosts}:
            return True
        if self.is_local or not name:
            return _is_loopback(name.strip("[]"))
        return "." not in name or name.endswith(_INSIDE) or _is_address(name.strip("[]"))


def _is_loopback(host: str) -> bool:
    return _is_address(host) and ip_address(host).is_loopback


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def _for_us(http: HttpSettings, refused: Counter | None) -> Middleware:
    """Make a middleware that refuses requests for another server's name."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        host = request.headers.get("Host", "")
        if http.is_named(host):
            return await handler(request)
        if refused is not None:
            refused.labels("host").inc()
        text = f"this is not the host {host[:80]!r}; if it is, name it in http.hosts"
        response = problem(421, text, reason="host")
        response.force_close()  # the body is not read
        return response

    return answer


def _as_json(refused: Counter | None) -> Middleware:
    """Make a middleware that turns aiohttp's plain-text errors into JSON.

    For an unknown route, a browser gets the page :data:`NOWHERE`, if there is one.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            reason: str | None
            match error:
                case web.HTTPNotFound():
                    known = sorted(_paths(request.app))
                    text = f"no route {request.path[:80]!r}; routes: {', '.join(known)}"
                    reason = "no such route"
                case web.HTTPMethodNotAllowed():
                    allowed = ", ".join(sorted(error.allowed_methods))
                    text = f"{request.method[:20]} is not allowed here; allowed: {allowed}"
                    reason = "method"
                case _:
                    text, reason = error.reason, None
            if refused is not None and reason is not None:
                refused.labels(reason).inc()
            page = request.app.router.named_resources().get(NOWHERE)
            is_browser = "text/html" in request.headers.get("Accept", "")
            if isinstance(error, web.HTTPNotFound) and page is not None and is_browser:
                return await next(iter(page)).handler(request)
            response = problem(error.status, text, reason=reason)
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response

    return answer


def _refusing_old_versions(refused: Counter | None) -> Middleware:
    """Make a middleware that refuses HTTP/1.0, whose request bodies end ambiguously.

    aiohttp accepts chunked bodies in HTTP/1.0, but a proxy may not.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.version >= HttpVersion11:
            return await handler(request)
        if refused is not None:
            refused.labels("malformed").inc()
        text = "only HTTP/1.1 is served; for a proxy of nginx: proxy_http_version 1.1"
        response = problem(505, text, reason="malformed")
        response.force_close()
        return response

    return answer


def _expecting(refused: Counter | None) -> Callable[[web.Request], Awaitable[None]]:
    """Make a handler of ``Expect``, as aiohttp's fails on a value that is not UTF-8."""

    async def answer(request: web.Request) -> None:
        if request.version != HttpVersion11:
            return
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the response is still to come
            return
        if refused is not None:
            refused.labels("malformed").inc()
        text = json.dumps({"error": "only Expect: 100-continue is met", "reason": "malformed"})
        raise web.HTTPExpectationFailed(text=text, content_type="application/json")

    return answer


def _paths(app: web.Application) -> set[str]:
    return {resource.canonical for resource in app.router.resources()}


def application(
    routes: Sequence[web.AbstractRouteDef],
    is_stopping: Callable[[], bool],
    refused: Counter | None = None,
) -> web.Application:
    """Build an application with JSON errors. ``refused``: counts requests without a route.

    While ``is_stopping()``, every response has ``Connection: close``, so that clients reconnect to
    another replica and no request is cut at the end.
    """

    async def end_connection(_request: web.Request, response: web.StreamResponse) -> None:
        if is_stopping():
            response.force_close()
            response.headers["Connection"] = "close"

    app = web.Application(middlewares=[_as_json(refused)])
    expecting = {"expect_handler": _expecting(refused)}
    for route in routes:
        if isinstance(route, web.RouteDef):
            route = web.RouteDef(route.method, route.path, route.handler, expecting | route.kwargs)
        route.register(app.router)
    app.on_response_prepare.append(end_connection)
    return app


@asynccontextmanager
async def listening(
    app: web.Application,
    http: HttpSettings,
    port: int,
    connection_limit: ConnectionLimit,
    log: FilteringBoundLogger,
    tls: CurrentTls | None = None,
    refused: Counter | None = None,
) -> AsyncIterator[int]:
    """Serve the application inside the block, which gets the port. Raises FedstreamError.

    Requests for another server's name are refused. ``connection_limit``: counts and bounds the
    concurrent connections. ``refused``: counts refusals by reason, before any route is reached.
    """
    loop = asyncio.get_running_loop()
    app.middlewares[:0] = [_refusing_old_versions(refused), _for_us(http, refused)]
    runner = web.AppRunner(app, shutdown_timeout=_CLOSE_S)
    await runner.setup()

    connection_counter, buffers = ConnectionCounter(connection_limit, log, refused), TlsBuffers()

    def connection() -> ServedConnection:
        assert runner.server is not None  # noqa: S101  (it was set up)
        return ServedConnection(
            runner.server,
            loop=loop,
            http=http,
            connection_counter=connection_counter if tls is None else None,
            log=log,
            refused=refused,
        )

    def connected() -> ServedConnection | SecuredConnection:
        if tls is None:
            return connection()
        # A TLS handshake may take as long as a request.
        return SecuredConnection(
            connection, tls.context, buffers, connection_counter, within_s=http.idle_s
        )

    async with AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        try:
            server = await loop.create_server(connected, http.host, port, backlog=_BACKLOG)
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
            reason = getattr(error, "strerror", None) or error
            raise FedstreamError(
                f"cannot listen on host {http.host!r}, port {port}: {reason}"
            ) from error
        stack.callback(server.close)
        yield int(server.sockets[0].getsockname()[1])


@asynccontextmanager
async def serving(
    routes: Sequence[web.AbstractRouteDef],
    health: Sequence[web.AbstractRouteDef],
    http: HttpSettings,
    is_stopping: Callable[[], bool],
    log: FilteringBoundLogger,
    tls: CurrentTls | None = None,
    refused: Counter | None = None,
) -> AsyncIterator[None]:
    """Serve a service's routes, with ``tls`` if given, and its health inside the block.

    ``refused``: as :func:`listening` takes it. Raises FedstreamError.
    """
    async with AsyncExitStack() as stack:
        # Opened first and closed last, so that probes see the start and the drain.
        app = application(health, is_stopping, refused)
        named = http.model_copy(update={"hosts": http.hosts or ()})  # these need no secret
        at = listening(
            app, named, http.health_port, ConnectionLimit(_HEALTH_CONNECTIONS), log, refused=refused
        )
        ports = {"health_port": await stack.enter_async_context(at)}
        if routes:
            app = application(routes, is_stopping, refused)
            connection_limit = ConnectionLimit(
                http.connections, http.address_connections, http.address_arrivals
            )
            at = listening(app, http, http.port, connection_limit, log, tls, refused)
            ports["port"] = await stack.enter_async_context(at)
        log.info("serving", host=http.host, **ports)
        yield
