"""A device's line to a gateway that says, byte by byte, what a test wants."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trustme
from yarl import URL

from fedstream.broker.digest import digest_of
from fedstream.broker.errors import ConfigError
from fedstream.load import connection as connections
from fedstream.load import line as lines
from fedstream.load.line import Break, DeviceLine, LoadedGateway, Lost
from fedstream.load.tally import LoadTally
from tests.support import wait_until

NOTHING = b"HTTP/1.1 204 No Content\r\nRetry-After: 3\r\n\r\n"
CLOSING = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
BODY = bytes(range(256)) * 4096  # 1 MiB: more than is written at once
AUTHORITY = trustme.CA()


class Script:
    """A server that answers requests by a script, and what it was asked."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = [*answers]
        self.asked: list[bytes] = []  # heads
        self.bodies: list[bytes] = []  # as far as they came
        self.connections = 0
        self.ended = 0  # of them
        self.is_hasty = False  # answers before the body has come
        self.url = ""
        self.lines: list[DeviceLine] = []  # to it

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.asked.append(head)
                found = re.search(rb"Content-Length: (\d+)", head)
                size = int(found[1]) if found else 0
                body = bytearray()
                while not self.is_hasty and len(body) < size:
                    piece = await reader.read(size - len(body))
                    if not piece:
                        break
                    body += piece
                self.bodies.append(bytes(body))
                if len(body) < size and not self.is_hasty:
                    return
                if not self.answers:  # it hangs until the device goes away
                    await reader.read()
                    return
                writer.write(self.answers.pop(0))
                await writer.drain()
                if self.is_hasty:
                    await reader.read()
                    return
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.ended += 1
            writer.close()


@asynccontextmanager
async def scripted(*answers: bytes, tls: ssl.SSLContext | None) -> AsyncIterator[Script]:
    its = Script(*answers)
    server = await asyncio.start_server(its.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    its.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    async with server:
        yield its
        for line in its.lines:
            line.close()
        await wait_until(lambda: its.ended == its.connections)


def server_tls(name: str = "127.0.0.1") -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert(name).configure_cert(context)
    return context


def trusting(authority: trustme.CA = AUTHORITY) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def line_to(
    its: Script, tally: LoadTally, *, tls: ssl.SSLContext | None = None, rate: float | None = None
) -> DeviceLine:
    its.lines.append(DeviceLine(LoadedGateway(URL(its.url), tls or trusting()), tally, rate))
    return its.lines[-1]


@pytest.fixture(params=["http", "https"])
def tls(request: pytest.FixtureRequest) -> ssl.SSLContext | None:
    return server_tls() if request.param == "https" else None


@pytest.fixture
def tally() -> LoadTally:
    return LoadTally()


async def test_requests_are_http_and_share_a_connection(
    tls: ssl.SSLContext | None, tally: LoadTally
) -> None:
    async with scripted(NOTHING, NOTHING, NOTHING, tls=tls) as its:
        line = line_to(its, tally)
        reply = await line.ask(
            "check-in", "POST", "/v1/check-in", body=(b"{}",), headers={"Authorization": "Bearer x"}
        )
        await line.ask("model", "GET", "/v1/models/abc")
        await line.ask("upload", "PATCH", "/v1/up", headers={"Content-Type": "application/x"})
    assert (reply.status, reply.headers["retry-after"], reply.body) == (204, "3", b"")
    common = (
        f"Host: {URL(its.url).host_port_subcomponent}\r\nUser-Agent: fedstream-load\r\n"
        "Accept: */*\r\nAccept-Encoding: identity\r\n"
    ).encode()
    assert its.asked == [
        b"POST /v1/check-in HTTP/1.1\r\n" + common + b"Authorization: Bearer x\r\n"
        b"Content-Length: 2\r\nContent-Type: application/json\r\n\r\n",
        b"GET /v1/models/abc HTTP/1.1\r\n" + common + b"\r\n",
        b"PATCH /v1/up HTTP/1.1\r\n" + common + b"Content-Type: application/x\r\n"
        b"Content-Length: 0\r\n\r\n",
    ]
    assert its.connections == 1
    assert tally.answers == {("check-in", 204): 1, ("model", 204): 1, ("upload", 204): 1}
    assert (tally.sent, tally.received, tally.events) == (2, 0, {})


async def test_large_bodies_pass_both_ways(tls: ssl.SSLContext | None, tally: LoadTally) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
    async with scripted(NOTHING, answer, answer, tls=tls) as its:
        line = line_to(its, tally)
        await line.ask("upload", "POST", "/up", body=(memoryview(BODY)[:999], BODY[999:]))
        kept = await line.ask("model", "GET", "/model")
        digested = await line.ask("model", "GET", "/model", digested=digest_of(BODY, "blake3"))
    assert its.bodies[0] == BODY
    assert (kept.body, kept.digest) == (BODY, "")
    assert (digested.body, digested.digest) == (b"", digest_of(BODY, "blake3"))
    assert (tally.sent, tally.received) == (len(BODY), 2 * len(BODY))


async def test_connection_that_was_closed_or_idle_is_replaced(
    tls: ssl.SSLContext | None, tally: LoadTally, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scripted(CLOSING, NOTHING, NOTHING, tls=tls) as its:
        line = line_to(its, tally)
        assert (await line.ask("a", "GET", "/a")).body == b"ok"
        await line.ask("a", "GET", "/a")
        assert its.connections == 2
        monkeypatch.setattr(lines, "_IDLE_S", 0.0)  # no server waits that long
        await line.ask("a", "GET", "/a")
        assert its.connections == 3
        line.close()
        await wait_until(lambda: its.ended == 3)
    assert tally.events == {}


async def test_answer_before_the_body_has_gone_ends_it(
    tls: ssl.SSLContext | None, tally: LoadTally
) -> None:
    refusal = b'{"error": "too large", "reason": "size"}'
    answer = b"HTTP/1.1 413 No\r\nContent-Length: %d\r\n\r\n" % len(refusal) + refusal
    async with scripted(answer, tls=tls) as its:
        its.is_hasty = True
        line = line_to(its, tally)
        reply = await line.ask("upload", "POST", "/up", body=(BODY,) * 16)
        assert reply.status == 413
        await wait_until(lambda: its.ended == 1)
    assert tally.refusals == {"size": 1}


async def test_body_is_cut_where_it_is_to_be_cut(
    tls: ssl.SSLContext | None, tally: LoadTally
) -> None:
    async with scripted(NOTHING, tls=tls) as its:
        line = line_to(its, tally)
        await line.ask("a", "GET", "/a")  # takes what TLS says after the handshake
        with pytest.raises(Lost):
            await line.ask("up", "POST", "/up", body=(BODY, b"end"), broken=Break(after=300_000))
        await wait_until(lambda: its.ended == 1)
    assert [len(body) for body in its.bodies] == [0, 300_000]
    assert b"Content-Length: 1048579\r\n" in its.asked[1]
    assert tally.events == {"requests cut off": 1}
    assert tally.sent == 300_000


async def test_wait_is_cut_short(tls: ssl.SSLContext | None, tally: LoadTally) -> None:
    async with scripted(tls=tls) as its:
        line = line_to(its, tally)
        with pytest.raises(Lost):
            await line.ask("check-in", "POST", "/", broken=Break(after_s=0.01))
        await wait_until(lambda: its.ended == 1)
    assert tally.events == {"requests cut off": 1}


async def test_cancelled_request_closes_its_connection(
    tls: ssl.SSLContext | None, tally: LoadTally
) -> None:
    async with scripted(tls=tls) as its:
        asking = asyncio.create_task(line_to(its, tally).ask("check-in", "POST", "/"))
        await wait_until(lambda: bool(its.asked))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await wait_until(lambda: its.ended == 1)
    assert tally.events == {}


async def test_answer_that_does_not_come_is_given_up(
    tls: ssl.SSLContext | None, tally: LoadTally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_ANSWER_S", 0.05)
    async with scripted(tls=tls) as its:
        with pytest.raises(Lost, match=r"nothing for 0\.1 s"):
            await line_to(its, tally).ask("a", "GET", "/a", wait_s=0.05)
        await wait_until(lambda: its.ended == 1)
    assert tally.events == {"requests without an answer in time": 1}


@pytest.mark.parametrize("answer", [b"HTTP/1.1 200 OK\r\nContent-Le", b"what?\r\n\r\n"])
async def test_broken_answers_are_connections_lost(answer: bytes, tally: LoadTally) -> None:
    async with scripted(answer, tls=None) as its:
        its.is_hasty = True
        line = line_to(its, tally)
        asking = asyncio.create_task(line.ask("a", "GET", "/a"))
        await wait_until(lambda: bool(its.asked))
        if answer.startswith(b"HTTP"):  # the beginning of one
            await wait_until(lambda: line._connection is not None and line._connection.is_open)
            assert line._connection is not None
            line._connection._socket.write_eof()
        with pytest.raises(Lost):
            await asking
    assert tally.events == {"connections lost": 1}


async def test_nobody_there_is_a_connection_lost(tally: LoadTally) -> None:
    async with scripted(tls=None) as its:
        pass
    with pytest.raises(Lost):
        await line_to(its, tally).ask("a", "GET", "/a")
    assert tally.events == {"connections lost": 1}


@pytest.mark.parametrize(
    ("name", "client", "why"),
    [
        ("other.example", trusting(), "is not for 127.0.0.1: issue one that names 127.0.0.1"),
        ("127.0.0.1", trusting(trustme.CA()), "unable to get local issuer certificate.*--ca FILE"),
    ],
    ids=["another-name", "another-authority"],
)
async def test_gateways_that_are_not_trusted_get_no_request(
    name: str, client: ssl.SSLContext, why: str, tally: LoadTally
) -> None:
    async with scripted(NOTHING, tls=server_tls(name)) as its:
        said = rf"^{its.url} is not trusted: .*{why}$"
        with pytest.raises(ConfigError, match=said):
            await line_to(its, tally, tls=client).ask("a", "GET", "/a")
    assert its.asked == []


async def test_certificate_that_is_bad_for_a_while_is_a_connection_lost(tally: LoadTally) -> None:
    """As while it is renewed."""
    served = server_tls()
    async with scripted(CLOSING, NOTHING, tls=served) as its:
        line = line_to(its, tally)
        assert (await line.ask("a", "GET", "/a")).status == 200
        trustme.CA().issue_cert("127.0.0.1").configure_cert(served)
        with pytest.raises(Lost, match="local issuer"):
            await line.ask("a", "GET", "/a")
        assert tally.events["connections lost"] == 1


async def test_device_shows_its_certificate(tally: LoadTally) -> None:
    asking, client = server_tls(), trusting()
    asking.verify_mode = ssl.CERT_REQUIRED
    AUTHORITY.configure_trust(asking)
    AUTHORITY.issue_cert("device.example").configure_cert(client)
    async with scripted(NOTHING, tls=asking) as its:
        assert (await line_to(its, tally, tls=client).ask("a", "GET", "/a")).status == 204


async def test_gateway_that_never_agrees_on_tls_is_given_up(
    tally: LoadTally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_AGREE_S", 0.05)
    async with scripted(tls=None) as its:
        its.url = its.url.replace("http:", "https:")
        with pytest.raises(Lost, match=r"no agreement within 0\.05 s"):
            await line_to(its, tally).ask("a", "GET", "/a")


async def test_slow_link_delays_what_it_carries(
    tls: ssl.SSLContext | None, tally: LoadTally
) -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 40000\r\n\r\n" + bytes(40_000)
    async with scripted(answer, tls=tls) as its:
        line = line_to(its, tally, rate=200_000.0)
        reply = await line.ask("a", "POST", "/a", body=(bytes(40_000),))
    assert len(reply.body) == len(its.bodies[0]) == 40_000
    assert tally.latencies["a"].most_s >= 0.39  # a fifth of a second each way
