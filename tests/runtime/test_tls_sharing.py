"""Connections of one loop share their buffers, and none sees another's bytes."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstream.runtime.tls import READ, TlsBuffers, TlsConnection

AUTHORITY = trustme.CA()
SERVED = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
TRUSTING = ssl.create_default_context()
AUTHORITY.issue_cert("127.0.0.1").configure_cert(SERVED)
AUTHORITY.configure_trust(TRUSTING)


class Wire:
    """A socket's transport: what is written to it, until it is closed."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed


class Echo(asyncio.Protocol):
    """Sends back what it hears."""

    def connection_made(self, transport: Any) -> None:
        self.wire = transport

    def data_received(self, data: bytes) -> None:
        self.wire.write(data)


class Connection(TlsConnection):
    """One whose parts can be replaced."""


class Pair:
    """A client of Python's own, in memory, and the connection that serves it."""

    def __init__(self, buffers: TlsBuffers, make: Callable[[], asyncio.Protocol] = Echo) -> None:
        self._buffers = buffers
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = TRUSTING.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")
        self.wire = Wire()
        self.connection = Connection(make, SERVED, buffers, within_s=60)
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]
        self.sent, self.heard = b"", b""
        self.on_the_way = b""  # from the client
        self.agreed = False

    def say(self, data: bytes) -> None:
        """Have the client send something, as soon as TLS is agreed on."""
        self.sent += data
        if self.agreed:
            self._write(data)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[self.client.write(data) :]

    def deliver(self, most: int) -> None:
        """Let that many bytes reach the server at most, and its answers the client."""
        self._speak()
        now, self.on_the_way = self.on_the_way[:most], self.on_the_way[most:]
        self.receive(now)
        self._speak()

    def receive(self, now: bytes) -> None:
        """Have the server receive these bytes."""
        if now and not self.wire.closed:
            self.connection.get_buffer(-1)[: len(now)] = now
            self.connection.buffer_updated(len(now))

    def _speak(self) -> None:
        self._incoming.write(bytes(self.wire.written))
        self.wire.written.clear()
        try:
            if not self.agreed:
                self.client.do_handshake()
                self.agreed = True
                self._write(self.sent)
            while True:
                self.heard += self.client.read(READ)
        except ssl.SSLWantReadError:
            pass
        self.on_the_way += self._outgoing.read()


def agreed(buffers: TlsBuffers) -> Pair:
    """A pair that has agreed on TLS."""
    pair = Pair(buffers)
    while not pair.agreed:
        pair.deliver(READ)
    pair.deliver(READ)
    return pair


def is_empty(buffers: TlsBuffers) -> bool:
    """Whether nothing is left between two calls."""
    return not (buffers.incoming.pending or buffers.outgoing.pending)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 40_000), st.integers(0, 30_000)), max_size=40
)


@settings(max_examples=40)
@given(STEPS)
def test_connections_that_take_turns_at_any_byte_do_not_mix(
    steps: list[tuple[int, int, int]],
) -> None:
    async def play() -> None:
        buffers = TlsBuffers()
        pairs = [Pair(buffers) for _ in range(3)]
        for which, most, size in steps:
            pairs[which].say(bytes([65 + which]) * size)
            pairs[which].deliver(most)
            assert is_empty(buffers)
        for pair in pairs:
            while len(pair.heard) < len(pair.sent) or not pair.agreed:
                pair.deliver(READ)
            assert pair.heard == pair.sent
            pair.connection.abort()

    asyncio.run(play())


def garbage(pair: Pair) -> None:
    """Half a record, and then bytes that belong to none."""
    pair.say(b"x" * 1000)
    pair.deliver(500)
    pair.receive(b"\x17\x03\x03\x00\x40" + bytes(2000))


def ending(pair: Pair) -> None:
    """TLS's own end, with more behind it."""
    pair.deliver(READ)
    with pytest.raises(ssl.SSLWantReadError):
        pair.client.unwrap()
    pair.deliver(0)
    pair.receive(pair.on_the_way + bytes(1000))


@pytest.mark.parametrize("leave", [garbage, ending])
async def test_one_that_ends_leaves_nothing_to_the_next(leave: Callable[[Pair], None]) -> None:
    buffers = TlsBuffers()
    honest, leaving = agreed(buffers), agreed(buffers)
    honest.say(b"before")
    honest.deliver(20)  # less than a record
    leave(leaving)
    assert leaving.wire.closed
    assert is_empty(buffers)
    honest.deliver(READ)
    honest.say(b" and after")
    honest.deliver(READ)
    assert honest.heard == b"before and after"
    honest.connection.abort()


async def test_what_writes_to_another_while_it_is_made_does_not_mix() -> None:
    buffers = TlsBuffers()
    first = agreed(buffers)

    class Greeting(Echo):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            first.connection.write(b"another has come")

    second = Pair(buffers, Greeting)
    second.say(b"at once")  # comes together with the end of the handshake
    for _ in range(4):
        second.deliver(READ)
    first.deliver(READ)
    assert (first.heard, second.heard) == (b"another has come", b"at once")
    for pair in (first, second):
        pair.connection.abort()


async def test_a_write_that_fails_leaves_nothing_to_the_next() -> None:
    buffers = TlsBuffers()
    pair = agreed(buffers)

    def lines() -> Any:
        yield b"half"
        raise OSError("no more")

    with pytest.raises(OSError, match="no more"):
        pair.connection.writelines(lines())
    assert is_empty(buffers)
    pair.deliver(READ)
    assert pair.heard == b"half"
    pair.connection.abort()


class Amid:
    """OpenSSL amid a message of the other side's that has not ended: it reads, but writes not."""

    def __init__(self, tls: ssl.SSLObject) -> None:
        self._tls = tls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tls, name)

    def write(self, _data: bytes) -> int:
        error = ssl.SSLWantReadError(ssl.SSL_ERROR_WANT_READ, "The operation did not complete")
        error.reason = None  # type: ignore[assignment]  # as OpenSSL leaves it
        raise error


async def test_a_write_amid_an_unfinished_message_ends_the_connection() -> None:
    buffers = TlsBuffers()
    pair = agreed(buffers)
    failures: list[str] = []
    pair.connection.failed = lambda reason, said: failures.append(reason)  # type: ignore[method-assign]
    pair.connection._tls = Amid(pair.connection._tls)  # type: ignore[assignment]
    pair.say(b"x")
    pair.deliver(READ)
    assert (pair.wire.closed, failures) == (True, ["tls"])
    assert is_empty(buffers)


async def test_shared_buffers_stay_small() -> None:
    buffers = TlsBuffers()
    pair = agreed(buffers)
    most = 0
    write = pair.wire.write

    def written(data: bytes) -> None:
        nonlocal most
        most = max(most, len(data))
        write(data)

    pair.wire.write = written  # type: ignore[method-assign]
    pair.connection.write(bytes(10 * READ))
    assert READ < most < 2.1 * READ
    pair.deliver(0)
    assert len(pair.heard) == 10 * READ
