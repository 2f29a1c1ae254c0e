"""HTTP from a bare socket: requests that are too many, too slow or malformed."""

from __future__ import annotations

import asyncio
import json
import os
import select
import socket
import ssl
import time
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
import trustme
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter
from structlog.testing import capture_logs

from fedstream.runtime.health import Health
from fedstream.runtime.health import routes as health_routes
from fedstream.runtime.http import REFUSED, HttpSettings, problem, serving
from fedstream.runtime.process import allow_files
from fedstream.runtime.tls import CurrentTls
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SLICE = 1 << 16
LONG = 1 << 24  # bytes of an answer that fits into no socket
_SOMAXCONN = Path("/proc/sys/net/core/somaxconn")
QUEUED = int(_SOMAXCONN.read_text()) if _SOMAXCONN.exists() else 0  # that this system allows
CROWD = 1500


class Site:
    """A service's two ports, and what its log said."""

    def __init__(self) -> None:
        self.stopping = False
        self.released = asyncio.Event()  # which a handler waits for
        self.waiting: web.Request | None = None  # its request
        self.sent = 0  # slices of the long answer that a connection took
        self.ports: dict[str, int] = {}
        self.registry = CollectorRegistry()
        self.counter = Counter("refused", "By reason.", ["reason"], registry=self.registry)

    def refused(self) -> dict[str, int]:
        """How many were refused, by reason."""
        found = {
            reason: self.registry.get_sample_value("refused_total", {"reason": reason})
            for reason in REFUSED
        }
        return {reason: int(count) for reason, count in found.items() if count}

    def routes(self) -> list[web.RouteDef]:
        """A short answer, one as long as anybody reads, and one that fails."""

        async def short(_request: web.Request) -> web.Response:
            return web.json_response({"well": True})

        async def endless(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(bytes(SLICE))
                self.sent += 1

        async def last(request: web.Request) -> web.Response:
            # More than the kernel takes here, less than transports keep without a word.
            assert request.transport is not None
            wire = request.transport.get_extra_info("socket")
            wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
            self.sent += 1
            return web.Response(body=bytes(40_000))

        async def broken(_request: web.Request) -> web.Response:
            raise ZeroDivisionError("a bug")

        async def reading(request: web.Request) -> web.Response:
            self.sent += 1
            try:
                return web.json_response({"read": len(await request.read())})
            finally:
                self.sent += 1

        async def waiting(request: web.Request) -> web.Response:
            self.sent += 1
            self.waiting = request
            await self.released.wait()
            return web.json_response({"waited": True})

        async def long(_request: web.Request) -> web.Response:
            self.sent += 1
            return web.Response(body=bytes(LONG))

        async def full(_request: web.Request) -> web.Response:
            return problem(503, "full", retry_after_s=7)

        return [
            web.get("/short", short),
            web.get("/endless", endless),
            web.get("/broken", broken),
            web.get("/full", full),
            web.get("/last", last),
            web.get("/reading", reading),
            web.get("/waiting", waiting),
            web.get("/long", long),
        ]

    async def connected(self, port: str = "port") -> tuple[asyncio.StreamReader, Any]:
        """A connection."""
        return await asyncio.open_connection("127.0.0.1", self.ports[port])

    async def said(self, request: bytes, port: str = "port") -> tuple[int, dict[str, str], Any]:
        """The answer to what is sent as it is: status, headers in small letters, JSON."""
        reader, writer = await self.connected(port)
        try:
            writer.write(request)
            return await answer(reader)
        finally:
            writer.close()


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)).decode().splitlines()
    pairs = (line.split(": ", 1) for line in head[1:] if line)
    headers = {name.lower(): value for name, value in pairs}
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), 30)
    return int(head[0].split()[1]), headers, json.loads(body)


def get(path: str, *more: str) -> bytes:
    lines = (f"GET {path} HTTP/1.1", "Host: localhost", *more)
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


@asynccontextmanager
async def site(tls: ssl.SSLContext | None = None, **settings: Any) -> AsyncIterator[Site]:
    """A service that listens."""
    made = Site()
    health = health_routes(Health(), CollectorRegistry())
    http = HttpSettings(**settings)
    with capture_logs() as lines:
        log = structlog.get_logger()
        current = None if tls is None else CurrentTls(tls)
        at = serving(made.routes(), health, http, lambda: made.stopping, log, current, made.counter)
        async with at:
            [line] = [line for line in lines if line["event"] == "serving"]
            made.ports = {name: line[name] for name in ("port", "health_port")}
            yield made


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Whether the other end has closed the connection, however it did that."""
    try:
        return await asyncio.wait_for(reader.read(), 30) is not None
    except ConnectionError:
        return True


# who says nothing, little, or takes nothing


@pytest.mark.parametrize("begun", [b"", get("/short")[:-2]])
async def test_incomplete_request_is_cut_off(begun: bytes) -> None:
    async with site(idle_s=0.2) as http:
        reader, writer = await http.connected()
        writer.write(begun)
        assert await is_closed(reader)
        writer.close()


@pytest.mark.skipif(QUEUED <= CROWD, reason="this system queues fewer")
async def test_crowd_that_comes_at_once_is_queued() -> None:
    """Whoever finds the queue full tries again after a second, then two, then four."""
    files = allow_files(3 * CROWD)
    if files is not None and files < 3 * CROWD:
        pytest.skip(f"this process may open only {files} files")
    async with site(connections=2 * CROWD) as http:
        with ExitStack() as stack:
            poll = select.poll()
            for _ in range(CROWD):  # within one step of the loop, so nobody is accepted meanwhile
                one = stack.enter_context(socket.socket())
                one.setblocking(False)
                one.connect_ex(("127.0.0.1", http.ports["port"]))
                poll.register(one, select.POLLOUT)
            assert len(poll.poll(0)) == CROWD


async def test_trickling_client_is_cut_off() -> None:
    async with site(idle_s=0.3) as http:
        reader, writer = await http.connected()

        async def trickle() -> None:
            with suppress(ConnectionError):
                for byte in get("/short", "X: " + "y" * 5000):
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert await is_closed(reader)
        trickling.cancel()
        await asyncio.wait({trickling})
        writer.close()


async def test_stalled_reader_is_cut_off_and_uses_little_memory() -> None:
    async with site(write_s=0.3) as http, AsyncExitStack() as stack:
        slow = stack.enter_context(socket.socket())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", http.ports["port"]))
        await loop.sock_sendall(slow, get("/endless"))
        await wait_until(lambda: http.sent > 0)

        async def cut() -> bool:
            try:
                return await asyncio.wait_for(loop.sock_recv(slow, 1 << 20), 30) == b""
            except ConnectionError:
                return True

        await asyncio.sleep(1.0)  # without reading: it is cut meanwhile
        taken = http.sent
        while not await cut():  # what was on its way
            pass
        assert http.sent == taken


async def test_unread_end_of_a_response_does_not_block_forever() -> None:
    """The handler is done and the connection to be closed; the reader takes nothing."""
    async with site(write_s=0.3, connections=1) as http, AsyncExitStack() as stack:
        slow = stack.enter_context(socket.socket())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", http.ports["port"]))
        await loop.sock_sendall(slow, get("/last", "Connection: close"))
        await wait_until(lambda: http.sent == 1)

        async def is_free() -> bool:
            return (await http.said(get("/short")))[0] == 200

        await wait_until(is_free)


async def test_unexpected_request_body_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.runtime.http._LINGER_S", 0.2)
    async with site() as http:
        reader, writer = await http.connected()
        writer.write(get("/short", "Content-Length: 1000000000"))
        assert (await answer(reader))[0] == 200
        assert await is_closed(reader)
        writer.close()


# who comes in numbers


async def test_excess_connection_gets_503_and_freed_slot_is_reused() -> None:
    async with site(connections=3) as http, AsyncExitStack() as stack:
        held = []
        for _ in range(3):
            reader, writer = await http.connected()
            stack.callback(writer.close)
            writer.write(get("/short"))
            assert (await answer(reader))[0] == 200
            held.append(writer)
        status, headers, body = await http.said(b"")
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        assert "too many connections" in body["error"]
        held.pop().close()

        async def is_free() -> bool:
            return (await http.said(get("/short")))[0] == 200

        await wait_until(is_free)


def contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A service's TLS, and that of clients who trust it."""
    authority = trustme.CA()
    context, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(context)
    authority.configure_trust(trusting)
    return context, trusting


def test_tls_that_fails_is_counted_and_told_to_who_debugs() -> None:
    context, trusting = contexts()
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    old = ssl.create_default_context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2

    async def fail() -> None:
        async with site(tls=context, idle_s=0.5) as made:
            port = made.ports["port"]
            with capture_logs() as lines:
                reader, writer = await made.connected()
                writer.write(get("/short"))  # without TLS
                assert await is_closed(reader)
                writer.close()
                for strange in (old, ssl.create_default_context()):  # this one trusts others
                    with pytest.raises((ssl.SSLError, ConnectionError)):
                        await asyncio.open_connection("127.0.0.1", port, ssl=strange)
                await wait_until(lambda: made.refused() == {"tls": 3})
                assert (await made.said(get("/livez"), "health_port"))[0] == 200  # without TLS
                (await made.connected())[1].close()  # looks whether the port is open
                silent, other = await made.connected()
                assert await is_closed(silent)
                other.close()
                assert made.refused() == {"tls": 3, "timeout": 1}
            said = {line["said"]: line["reason"] for line in lines}
            assert said == {
                "HTTP_REQUEST": "tls",
                "UNSUPPORTED_PROTOCOL": "tls",
                "the client went away": "tls",
                "no agreement within 0.5 s": "timeout",
            }
            assert {(line["log_level"], line["remote"][0]) for line in lines} == {
                ("debug", "127.0.0.1")
            }
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.write(get("/short"))
            assert (await answer(reader))[0] == 200
            writer.close()
            assert made.refused() == {"tls": 3, "timeout": 1}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(fail())


def test_readers_over_tls_get_long_answers_whole_and_may_pause_between_requests() -> None:
    """Such a transport calls an empty buffer full if its limit is 0, and may never take it back."""
    context, trusting = contexts()

    async def read() -> None:
        async with site(tls=context, write_s=0.3) as made:
            port = made.ports["port"]
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            for _ in range(3):
                writer.write(get("/short"))
                assert (await answer(reader))[0] == 200
                await asyncio.sleep(0.5)
            writer.write(get("/endless"))
            await reader.readexactly(100 * SLICE)
            writer.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(read())


async def test_who_has_yet_to_agree_on_tls_counts_as_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, trusting = contexts()
    wrapped: list[object] = []

    def wrap_bio(*given: Any, **options: Any) -> ssl.SSLObject:
        wrapped.append(given)
        return ssl.SSLContext.wrap_bio(context, *given, **options)

    monkeypatch.setattr(context, "wrap_bio", wrap_bio)
    async with site(tls=context, idle_s=1.0, connections=2) as made:
        ends = [await made.connected() for _ in range(3)]  # nobody says a word
        assert await is_closed(ends[2][0])
        assert not ends[0][0].at_eof()
        assert made.refused() == {"busy": 1}
        assert len(wrapped) == 2  # who is refused costs no TLS
        ends[0][1].close()

        async def is_free() -> bool:
            with suppress(ConnectionError, ssl.SSLError):
                reader, writer = await asyncio.open_connection(
                    "127.0.0.1", made.ports["port"], ssl=trusting
                )
                writer.write(get("/short"))
                status = (await answer(reader))[0]
                writer.close()
                return status == 200
            return False

        await wait_until(is_free)
        for _, writer in ends:
            writer.close()


async def test_one_address_leaves_places_for_others() -> None:
    async with site(connections=8, address_connections=1) as made:
        reader, writer = await made.connected()
        writer.write(get("/short"))
        assert (await answer(reader))[0] == 200
        status, _, body = await made.said(b"")
        assert (status, body["reason"]) == (503, "address")
        writer.close()


async def test_who_connects_again_and_again_is_closed_before_tls() -> None:
    """As many at once as may be there, and a few later."""
    context, trusting = contexts()
    async with site(tls=context, connections=3, address_arrivals=0.001) as made:
        port = made.ports["port"]
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
            writer.close()
            await writer.wait_closed()
        reader, writer = await made.connected()
        assert await is_closed(reader)
        writer.close()
        assert made.refused() == {"arrivals": 1}


def test_agreement_on_tls_that_is_late_by_our_own_delay_is_not_cut_off() -> None:
    """What the client has said meanwhile is read first. uvloop looks at timers before sockets."""
    context, trusting = contexts()

    async def late() -> None:
        async with site(tls=context, idle_s=0.4) as made:
            agreeing = asyncio.create_task(asyncio.to_thread(agree, trusting, made.ports["port"]))
            await asyncio.sleep(0.05)  # it is accepted, and has said something perhaps
            for _ in range(2):
                time.sleep(0.5)  # noqa: ASYNC251  (nobody is served)
                await asyncio.sleep(0)
            assert await agreeing
            assert made.refused() == {}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(late())


def agree(trusting: ssl.SSLContext, port: int) -> bool:
    """A client in a thread agrees on TLS, after a while."""
    with socket.create_connection(("127.0.0.1", port)) as plain:
        time.sleep(0.2)
        with trusting.wrap_socket(plain, server_hostname="127.0.0.1") as secured:
            return secured.version() is not None


async def test_stalled_reader_over_tls_is_cut_off() -> None:
    context, trusting = contexts()
    async with site(tls=context, write_s=0.3) as made:
        port = made.ports["port"]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, limit=SLICE)
        writer.write(get("/endless"))
        await wait_until(lambda: made.sent > 0)
        await asyncio.sleep(1.0)  # without reading: it is cut meanwhile
        taken = made.sent
        with suppress(ConnectionError, ssl.SSLError):
            while await asyncio.wait_for(reader.read(SLICE), 30):  # what was on its way
                pass
        assert made.sent == taken
        writer.close()


async def test_probes_are_only_on_their_own_port() -> None:
    async with site() as http:
        for path in ("/livez", "/readyz", "/metrics"):
            assert (await http.said(get(path)))[0] == 404
        assert (await http.said(get("/short"), "health_port"))[0] == 404


# who says what is no request


BAD = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    get("/short", "no colon"),
    get("/short", "Content-Length: 1", "Transfer-Encoding: chunked"),
    get("/" + "x" * 10_000),
    get("/short", "X: " + "x" * 10_000),
]


@pytest.mark.parametrize("request_", BAD, ids=range(len(BAD)))
async def test_malformed_request_is_logged_and_answered_in_json(request_: bytes) -> None:
    async with site() as http:
        with capture_logs() as lines:
            reader, writer = await http.connected()
            writer.write(request_)
            status, _, body = await answer(reader)
            assert await is_closed(reader)
            writer.close()
        assert status == 400
        assert body["error"].startswith("malformed request: ")
        assert body["reason"] == "malformed"
        [line] = lines
        assert (line["event"], line["log_level"]) == ("bad request", "warning")
        assert "exc_info" not in line
        assert "\n" not in line["reason"]


@pytest.mark.parametrize(("port", "path"), [("port", "/short"), ("health_port", "/v2/nothing")])
async def test_http_before_1_1_is_refused_on_every_port(port: str, path: str) -> None:
    async with site() as http:
        reader, writer = await http.connected(port)
        writer.write(get(path, "Connection: keep-alive").replace(b"HTTP/1.1", b"HTTP/1.0") * 2)
        status, _, body = await answer(reader)
        assert (status, body["reason"]) == (505, "malformed")
        assert await is_closed(reader)
        writer.close()


async def test_failing_handler_is_logged_and_answered_in_json() -> None:
    async with site() as http:
        with capture_logs() as lines:
            status, _, body = await http.said(get("/broken"))
        assert status == 500
        assert body == {"error": "internal error: see the service's log", "reason": "internal"}
        [line] = lines
        assert line["log_level"] == "error"
        assert isinstance(line["exc_info"], ZeroDivisionError)


async def test_client_that_leaves_amid_its_request_is_no_failure() -> None:
    async with site() as http:
        with capture_logs() as lines:
            _, writer = await http.connected()
            writer.write(get("/reading", "Content-Length: 9") + b"half")
            await wait_until(lambda: http.sent == 1)
            writer.close()
            await wait_until(lambda: http.sent == 2)
            assert (await http.said(get("/short")))[0] == 200
        assert lines == []


@pytest.mark.parametrize("port", ["port", "health_port"])
async def test_unknown_route_is_answered_in_json(port: str) -> None:
    known = {"port": "/short", "health_port": "/livez"}[port]
    async with site() as http:
        status, _, body = await http.said(get("/v2/nothing"), port)
        assert status == 404
        assert "no route '/v2/nothing'; routes: " in body["error"]
        assert known in body["error"]
        posted = get(known).replace(b"GET", b"POST")
        status, headers, body = await http.said(posted, port)
        assert (status, headers["allow"]) == (405, "GET,HEAD")
        assert body["error"] == "POST is not allowed here; allowed: GET, HEAD"


@pytest.mark.parametrize("target", ["CONNECT elsewhere:443", "GET /nowhere"])
async def test_unknown_route_that_is_to_expect_something_unreadable_is_no_failure(
    target: str,
) -> None:
    """aiohttp's own answer can't be written. Found by ``tests.fuzz.raw_requests``."""
    async with site() as its:
        request = f"{target} HTTP/1.1\r\nHost: x\r\nExpect: \xe9\r\n\r\n".encode("latin-1")
        status, _, body = await its.said(request)
        assert (status, body["reason"]) == (417, "malformed")
        assert its.refused() == {"malformed": 1}


async def test_stopping_service_closes_connections_with_its_responses() -> None:
    """Else a request that is sent on one just as it is cut is lost."""
    paths = {"/short": "port", "/nothing": "port", "/livez": "health_port"}
    async with site() as http:
        for path, port in paths.items():
            assert "connection" not in (await http.said(get(path), port))[1]
        http.stopping = True
        for path, port in paths.items():
            assert (await http.said(get(path), port))[1]["connection"] == "close"


@pytest.mark.parametrize("behind", [b"x", get("/short")])
async def test_client_that_sends_on_behind_a_request_is_not_read(behind: bytes) -> None:
    async with site() as http:
        _, writer = await http.connected()
        writer.write(get("/waiting"))
        await wait_until(lambda: http.sent == 1)
        writer.write(behind * ((1 << 26) // len(behind)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(writer.drain(), 0.5)
        writer.transport.abort()
        http.released.set()


@pytest.mark.parametrize("behind", [b"", get("/short")])
async def test_client_that_goes_away_while_it_waits_is_noticed(behind: bytes) -> None:
    async with site() as http:
        _, writer = await http.connected()
        writer.write(get("/waiting"))
        await wait_until(lambda: http.sent == 1)
        writer.write(behind)
        writer.close()
        await wait_until(lambda: http.waiting is not None and http.waiting.transport is None)
        http.released.set()


async def test_request_in_hand_is_answered_before_the_end() -> None:
    async with site() as http:
        reader, writer = await http.connected()
        writer.write(get("/waiting"))
        await wait_until(lambda: http.sent == 1)
        asyncio.get_running_loop().call_later(0.2, http.released.set)  # the service is ending then
    assert (await answer(reader))[2] == {"waited": True}
    assert await is_closed(reader)
    writer.close()


async def test_end_does_not_wait_for_ever_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.runtime.http._CLOSE_S", 0.2)
    async with asyncio.timeout(30):
        async with site() as http:
            reader, writer = await http.connected()
            writer.write(get("/waiting"))
            await wait_until(lambda: http.sent == 1)
        assert await is_closed(reader)
    writer.close()


async def test_answer_that_is_being_read_is_read_before_the_end() -> None:
    async with site() as http:
        reader, writer = await http.connected()
        writer.write(get("/long"))
        await wait_until(lambda: http.sent == 1)
        taken = asyncio.create_task(reader.read())
    assert len(await taken) > LONG
    writer.close()


def test_connection_is_not_idle_by_our_own_delay() -> None:
    """uvloop runs timers before it reads what has come while it was busy."""

    async def busy() -> None:
        async with site(idle_s=0.2) as http:
            reader, writer = await http.connected()
            wire = socket.socket(fileno=os.dup(writer.get_extra_info("socket").fileno()))

            def block() -> None:
                loop.remove_reader(another)
                wire.send(get("/short"))  # in time
                time.sleep(0.5)

            loop = asyncio.get_running_loop()
            one, another = socket.socketpair()
            loop.add_reader(another, block)
            one.send(b"x")
            assert (await answer(reader))[0] == 200
            for each in (writer, wire, one, another):
                each.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(busy())
