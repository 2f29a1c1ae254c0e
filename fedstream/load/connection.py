"""One connection of a device: requests in HTTP/1.1 and their answers, one after the other.

It exists to cost little, since ten thousand of them share a machine with what they load: a body
passes through without being joined or kept, and a connection that waits holds next to nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from fedstream.runtime.tls import TlsBuffers, TlsConnection, TlsFailure

if TYPE_CHECKING:
    import ssl

    from fedstream.load.answer import AnswerReader

    Pieces = Sequence[bytes | memoryview]

_CONNECT_S = 15.0
_AGREE_S = 60.0  # on TLS
_PIECE_S = 0.1  # between two pieces on a slow link
_PIECE = 1 << 18  # bytes that are written at once


class CutOff(ConnectionAbortedError):
    """The device itself has broken off."""


class Untrusted(ConnectionError):
    """The gateway's certificate is not trusted."""


class LoadConnection(asyncio.Protocol):
    """A connection, and the exchange that is under way on it."""

    __slots__ = (
        "_answer", "_bytes_per_s", "_error", "_heard", "_is_full", "_late", "_loop", "_opened",
        "_pending", "_socket", "_timer", "_waiter", "_within_s",
    )  # fmt: skip
    _socket: asyncio.Transport  # from when it is open

    def __init__(self, opened: asyncio.Future[None], bytes_per_s: float | None) -> None:
        """``opened``: done when it is. ``bytes_per_s``: of a slow link, either way."""
        self._loop = opened.get_loop()
        self._opened = opened
        self._bytes_per_s = bytes_per_s
        self._answer: AnswerReader | None = None  # that is awaited
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None  # why it is of no use any more
        self._timer: asyncio.TimerHandle | None = None  # of an answer's next bytes
        self._late: asyncio.TimerHandle | None = None  # of bytes that are on a slow link
        self._pending = b""  # these
        self._is_full = False  # what was written waits for the gateway
        self._within_s = 0.0
        self._heard = self._loop.time()  # when something was heard last, or sent

    @property
    def is_open(self) -> bool:
        """Whether it can take a request."""
        return self._error is None

    def idle_s(self) -> float:
        """How long nothing has been heard or sent."""
        return self._loop.time() - self._heard

    async def exchange(
        self,
        head: bytes,
        body: Pieces,
        answer: AnswerReader,
        *,
        within_s: float,
        is_cut: bool = False,
    ) -> None:
        """Send a request and read its answer. Raises OSError; the connection is closed then.

        ``within_s``: the longest wait for the answer's next bytes. ``is_cut``: the body lacks its
        end, so what follows it is CutOff.
        """
        self._answer = answer
        self._within_s = within_s
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(within_s, self._look)
        try:
            is_sent = await self._send(head, body)
            if is_cut:
                raise CutOff
            while not answer.is_whole:
                await self._change()
            if not (is_sent and answer.keeps_open):
                self.close()
        except BaseException:
            self.close()
            raise
        finally:
            self._timer.cancel()
            self._timer = self._answer = None

    def cut(self) -> None:
        """Break an exchange off that is under way."""
        self._fail(CutOff())

    def close(self) -> None:
        """Close it, behind what was written."""
        self._error = self._error or ConnectionAbortedError("closed")
        self._socket.close()

    def refuse(self, error: Exception) -> None:
        """Hear that it does not come about."""
        if not self._opened.done():
            self._opened.set_exception(error)

    async def _send(self, head: bytes, body: Pieces) -> bool:
        """Send a request; whether all of it was sent before there was an answer."""
        if self._bytes_per_s is None and sum(map(len, body)) <= _PIECE:
            self._socket.writelines((head, *body))
            return True
        self._socket.write(head)
        rate = self._bytes_per_s
        size = _PIECE if rate is None else max(1, round(rate * _PIECE_S))
        for piece in (part[at : at + size] for part in body for at in range(0, len(part), size)):
            if rate is not None:
                await asyncio.sleep(len(piece) / rate)
            while self._is_full and not self._is_answered():
                await self._change()
            if self._is_answered():
                return False
            self._socket.write(piece)
            self._heard = self._loop.time()
        return True

    def _is_answered(self) -> bool:
        """Raises OSError if there is no connection any more."""
        if self._error is not None:
            raise self._error
        return self._answer is not None and self._answer.is_whole

    async def _change(self) -> None:
        """Wait until something has happened. Raises OSError if that ends the connection."""
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._error is None:
            self._error = error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)

    def _look(self) -> None:
        """Give up if nothing was heard for too long."""
        left_s = self._heard + self._within_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._look)
        else:
            self._fail(TimeoutError(f"nothing for {self._within_s:g} s"))
            self._socket.abort()

    # what the socket says, or TLS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast("asyncio.Transport", transport)
        if not self._opened.done():
            self._opened.set_result(None)

    def data_received(self, data: bytes) -> None:
        rate = self._bytes_per_s
        if rate is None:
            self._arrived(data)
            return
        # While it comes, nothing else does; so the gateway has to wait, too.
        self._socket.pause_reading()
        self._pending += data
        if self._late is None:
            self._late = self._loop.call_later(len(data) / rate, self._come, rate, len(data))

    def _come(self, rate: float, size: int) -> None:
        """Hear so many bytes that were on their way."""
        self._late = None
        data, self._pending = self._pending[:size], self._pending[size:]
        if left := len(self._pending):
            self._late = self._loop.call_later(left / rate, self._come, rate, left)
        elif not self._socket.is_closing():
            self._socket.resume_reading()
        self._arrived(data)

    def _arrived(self, data: bytes) -> None:
        self._heard = self._loop.time()
        if self._answer is None:
            self.close()  # nobody asked
            return
        try:
            self._answer.feed(data)
        except ConnectionError as error:
            self._fail(error)
        if self._answer.is_whole:
            self._wake()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self._wake()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._late is not None:
            self._late.cancel()
            self._arrived(self._pending)
        if exc is None and self._answer is not None and self._answer.end():
            self._wake()
        self._fail(exc if isinstance(exc, Exception) else ConnectionResetError("it was closed"))


class _SecuredConnection(TlsConnection):
    """What is below a connection with TLS."""

    __slots__ = ("_connection",)

    def __init__(
        self, connection: LoadConnection, context: ssl.SSLContext, buffers: TlsBuffers, host: str
    ) -> None:
        super().__init__(lambda: connection, context, buffers, within_s=_AGREE_S, host=host)
        self._connection = connection

    def failed(self, reason: TlsFailure, said: str) -> None:
        is_untrusted = reason == "certificate"
        self._connection.refuse(
            Untrusted(said) if is_untrusted else ConnectionError(f"{reason}: {said}")
        )


async def connect(
    host: str,
    port: int,
    tls: ssl.SSLContext | None,
    buffers: TlsBuffers,
    bytes_per_s: float | None,
) -> LoadConnection:
    """Connect to a gateway. Raises OSError, such as Untrusted.

    ``buffers``: that all connections read into. ``bytes_per_s``: of a slow link.
    """
    loop = asyncio.get_running_loop()
    opened = loop.create_future()
    made = LoadConnection(opened, bytes_per_s)
    below = made if tls is None else _SecuredConnection(made, tls, buffers, host)
    async with asyncio.timeout(_CONNECT_S):
        socket, _ = await loop.create_connection(lambda: below, host, port)
    try:
        await opened
    except BaseException:
        socket.abort()
        raise
    return made
