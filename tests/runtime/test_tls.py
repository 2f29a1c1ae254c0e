"""TLS on real sockets: between a client of asyncio's own, and what is above the connection."""

from __future__ import annotations

import asyncio
import hashlib
import os
import socket
import ssl
import struct
import subprocess
import sys
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trustme
import uvloop

from fedstream.core.errors import ConfigError
from fedstream.runtime.tls import READ, RenewedFiles, TlsBuffers, TlsConnection, TlsFailure
from tests.support import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

MODEL = bytes(range(256)) * 1024  # 256 KiB, sent both ways


class Above(asyncio.Protocol):
    """Writes down what it hears; answers each byte 'm' with a model."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.read = hashlib.sha256()
        self.bytes = 0
        self.wire: Any = None

    def connection_made(self, transport: Any) -> None:
        self.heard.append("made")
        self.wire = transport

    def data_received(self, data: bytes) -> None:
        self.read.update(data)
        self.bytes += len(data)
        if data == b"m":
            self.wire.write(MODEL)

    def eof_received(self) -> None:
        self.heard.append("eof")

    def pause_writing(self) -> None:
        self.heard.append("pause")

    def resume_writing(self) -> None:
        self.heard.append("resume")

    def connection_lost(self, exc: BaseException | None) -> None:
        self.heard.append("lost")


class Server:
    """A port, the clients' side of TLS, and what is above each connection."""

    def __init__(self) -> None:
        self.made: list[Above] = []
        self.failures: list[TlsFailure] = []
        self.said: list[str] = []
        self.port = 0
        self.clients: list[asyncio.StreamWriter] = []
        authority = trustme.CA()
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.trusting = ssl.create_default_context()
        authority.issue_cert("127.0.0.1").configure_cert(self.context)
        authority.configure_trust(self.trusting)

    async def connected(self, **options: Any) -> tuple[asyncio.StreamReader, Any]:
        """A client that has agreed on TLS, as the other side may not yet have noticed."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.trusting, **options
        )
        self.clients.append(writer)
        await wait_until(lambda: len(self.made) == len(self.clients))
        return reader, writer


@asynccontextmanager
async def serving(within_s: float = 10.0) -> AsyncIterator[Server]:
    its, buffers = Server(), TlsBuffers()

    def make() -> Above:
        its.made.append(Above())
        return its.made[-1]

    class Telling(TlsConnection):
        def failed(self, reason: TlsFailure, said: str) -> None:
            its.failures.append(reason)
            its.said.append(said)

    def connect() -> TlsConnection:
        return Telling(make, its.context, buffers, within_s=within_s)

    listener = await asyncio.get_running_loop().create_server(connect, "127.0.0.1", 0)
    async with listener:
        its.port = listener.sockets[0].getsockname()[1]
        yield its
        for writer in its.clients:
            writer.transport.abort()
        await wait_until(lambda: all(one.heard[-1] == "lost" for one in its.made))


def on_uvloop(test: Callable[[], Awaitable[None]]) -> Any:
    """As services do; most tests run on asyncio's loop."""

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test())  # type: ignore[arg-type]

    run.__name__ = test.__name__
    return run


@on_uvloop
async def test_what_is_sent_arrives_whole_on_either_side() -> None:
    async with serving() as its:
        reader, writer = await its.connected()
        for _ in range(3):
            writer.write(b"m")
            assert await reader.readexactly(len(MODEL)) == MODEL
        [above] = its.made
        writer.write(2 * MODEL)
        await wait_until(lambda: above.bytes == 3 + 2 * len(MODEL))
        assert above.read.digest() == hashlib.sha256(b"mmm" + 2 * MODEL).digest()
        writer.close()
        await writer.wait_closed()
        await wait_until(lambda: above.heard == ["made", "eof", "lost"])
        assert its.failures == []


@on_uvloop
async def test_an_answer_is_sent_before_the_connection_closes() -> None:
    async with serving() as its:
        reader, _ = await its.connected()
        wire = its.made[0].wire
        wire.writelines([b"good", bytearray(b"-bye")])
        wire.close()
        wire.write(b"too late")
        assert wire.is_closing()
        assert await reader.read() == b"good-bye"  # and then TLS's own end: no truncation
        await wait_until(lambda: its.made[0].heard[-1] == "lost")


@on_uvloop
async def test_a_client_that_does_not_read_pauses_who_writes() -> None:
    async with serving() as its:
        reader, _ = await its.connected(limit=1024)
        above = its.made[0]
        above.wire.set_write_buffer_limits(high=0)
        sent = 0
        while "pause" not in above.heard:
            above.wire.write(MODEL)
            sent += len(MODEL)
            assert sent < 1 << 28
        assert above.wire.get_write_buffer_size() > 0
        await reader.readexactly(sent)
        await wait_until(lambda: above.heard[-1] == "resume")
        assert above.wire.get_write_buffer_size() == 0


@on_uvloop
async def test_whoever_does_not_take_bytes_gets_none() -> None:
    async with serving() as its:
        _, writer = await its.connected()
        above = its.made[0]
        above.wire.pause_reading()
        writer.write(64 * MODEL)
        await asyncio.sleep(0.2)
        assert above.bytes <= READ  # what had been read already, if anything
        above.wire.resume_reading()
        await wait_until(lambda: above.bytes == 64 * len(MODEL))


@pytest.mark.parametrize(
    ("said", "failure"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "tls"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", "timeout"),  # begins well
    ],
)
async def test_who_never_agrees_on_tls_is_never_heard_of(said: bytes, failure: str) -> None:
    async with serving(within_s=0.2) as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        writer.write(said)
        await asyncio.wait_for(reader.read(), 30)
        writer.close()
        assert (its.made, its.failures) == ([], [failure])


async def test_client_that_says_why_it_leaves_is_heard() -> None:
    async with serving() as its:
        reader, writer = await asyncio.open_connection("127.0.0.1", its.port)
        came, going = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = ssl.create_default_context().wrap_bio(came, going, server_hostname="127.0.0.1")
        with suppress(ssl.SSLCertVerificationError):
            while not reader.at_eof():
                with suppress(ssl.SSLWantReadError):
                    client.do_handshake()
                writer.write(going.read())
                came.write(await reader.read(READ))
        writer.write(going.read())
        await reader.read()
        writer.close()
        assert (its.made, its.said) == ([], ["TLSV1_ALERT_UNKNOWN_CA"])


async def test_bytes_that_are_changed_on_the_way_end_the_connection() -> None:
    async with serving() as its:
        _, writer = await its.connected()
        raw = writer.get_extra_info("socket").dup()
        raw.setblocking(True)
        raw.send(struct.pack("!BHH", 23, 0x0303, 64) + bytes(64))  # no record that we agreed on
        raw.close()
        await wait_until(lambda: its.made[0].heard[-1] == "lost")
        assert (its.made[0].bytes, its.failures) == (0, ["tls"])


async def test_what_tls_knows_is_told() -> None:
    async with serving() as its:
        await its.connected()
        wire = its.made[0].wire
        assert wire.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert wire.get_extra_info("sslcontext") is its.context
        assert wire.get_extra_info("peercert") is None  # nobody asked for one
        assert wire.get_extra_info("peername")[0] == "127.0.0.1"
        assert wire.get_extra_info("nonsense", 7) == 7


SERVER = """
import asyncio, resource, ssl, sys, uvloop
from fedstream.runtime.tls import TlsBuffers, TlsConnection

class Above(asyncio.Protocol):
    got = 0
    def connection_made(self, transport): self.wire = transport
    def data_received(self, data):
        self.got += len(data)
        if self.got == 1 << 18:
            self.wire.write(bytes(1 << 18))
            print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)

async def serve():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1])
    buffers = TlsBuffers()
    server = await asyncio.get_running_loop().create_server(
        lambda: TlsConnection(Above, context, buffers, within_s=60), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

uvloop.run(serve())
"""


@pytest.mark.process
def test_a_connection_that_moved_models_holds_little(tmp_path: Path) -> None:
    """uvloop's own TLS holds half a megabyte for each of these."""
    authority, trusting = trustme.CA(), ssl.create_default_context()
    authority.configure_trust(trusting)
    issued = tmp_path / "server.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(issued)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, issued], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process, ExitStack() as stack:
        stack.callback(process.kill)
        address = "127.0.0.1", int(process.stdout.readline())

        def moved() -> int:
            """The server's most memory in KiB, after one more connection took its models."""
            raw = stack.enter_context(socket.create_connection(address))
            wire = stack.enter_context(trusting.wrap_socket(raw, server_hostname="127.0.0.1"))
            wire.sendall(MODEL)
            left = len(MODEL)
            while left:
                left -= len(wire.recv(left))
            assert process.stdout is not None
            return int(process.stdout.readline())

        before, *_, after = (moved() for _ in range(101))
        assert after - before < 100 * 24


def test_value_is_that_of_the_files_unless_they_are_unusable(tmp_path: Path) -> None:
    """Each unusable content is reported once, and the value before it stays."""
    first, second = tmp_path / "first", tmp_path / "second"
    reports: list[str] = []

    def read() -> int:
        try:
            return int(first.read_text()) + int(second.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(type(error).__name__) from error

    def seen() -> int:
        return files.look(lambda error: reports.append(str(error)))

    with pytest.raises(ConfigError):
        RenewedFiles([first, second], read)
    for file in (first, second):
        file.write_text("1")
    files = RenewedFiles([first, second], read)
    assert seen() == files.value == 2
    second.write_text("20")
    assert seen() == files.value == 21
    for unusable in ("", "bad", None):
        if unusable is None:
            first.unlink()
        else:
            first.write_text(unusable)
        before = len(reports)
        assert (seen(), seen()) == (21, 21)
        assert len(reports) == before + 1
    assert reports == ["ValueError", "ValueError", "FileNotFoundError"]
    first.write_text("bad")
    assert seen() == 21
    about = first.stat()
    first.write_text("300")
    os.utime(first, ns=(about.st_atime_ns, about.st_mtime_ns))  # its metadata doesn't show it
    assert seen() == 320
    assert len(reports) == 4
