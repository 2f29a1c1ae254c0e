"""TLS for many connections of which most are idle: what one holds does not grow with its traffic.

asyncio's and uvloop's own TLS keep, for as long as a connection lasts, a read buffer of 256 KiB
and two buffers as large as the most that ever was in them: half a megabyte once a model has gone
each way. Here all connections read into one buffer, and no more than a slice of it goes through
OpenSSL at a time. What is read is delivered at once, and what is written is the socket's at once,
so pausing either means the socket itself.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    Data = bytes | bytearray | memoryview

READ: Final = 1 << 18  # bytes of a read buffer
# Bytes that go through OpenSSL at a time; it keeps two buffers of 4/3 of that for a connection.
_SLICE = 1 << 12
_RECORD = 1 << 14  # most bytes that TLS decrypts at once


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a server's socket, and the transport of the protocol above it.

    That protocol hears of the connection once TLS is agreed on, and nothing if it never is.
    """

    __slots__ = ("_above", "_buffer", "_incoming", "_outgoing", "_timer", "_tls", "_wire")

    def __init__(
        self, above: asyncio.Protocol, context: ssl.SSLContext, buffer: memoryview, *,
        within_s: float,
    ) -> None:  # fmt: skip
        """``buffer``: of the loop's, for all its connections. ``within_s``: to agree on TLS."""
        super().__init__()
        self._above = above
        self._buffer = buffer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._wire: Any = None  # the socket's transport
        # Running until TLS is agreed on.
        self._timer: asyncio.TimerHandle | None = asyncio.get_running_loop().call_later(
            within_s, self.abort
        )

    # what the socket says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        found: list[bytes] = []
        is_over = False
        try:
            for at in range(0, nbytes, _SLICE):
                self._incoming.write(self._buffer[at : min(at + _SLICE, nbytes)])
                if self._timer is None or self._agrees():
                    is_over = self._decrypt(found)
                if is_over or self._wire.is_closing():
                    break
        except ssl.SSLError:  # no TLS, none that we speak, or not what was sent
            self._flush()  # what is wrong, in TLS's own words
            self._wire.close()
            return
        self._flush()  # an answer of TLS itself, such as new keys
        if found:
            self._above.data_received(found[0] if len(found) == 1 else b"".join(found))
        if is_over:
            self._above.eof_received()
            self.close()

    def eof_received(self) -> None:
        if self._timer is None:
            self._above.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        else:
            self._above.connection_lost(exc)  # type: ignore[arg-type]

    def pause_writing(self) -> None:
        self._above.pause_writing()

    def resume_writing(self) -> None:
        self._above.resume_writing()

    def _agrees(self) -> bool:
        """Whether TLS is agreed on with what has come. Raises SSLError if it can't be."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        assert self._timer is not None  # noqa: S101  (it runs until now)
        self._timer.cancel()
        self._timer = None
        self._flush()
        self._above.connection_made(self)
        return True

    def _decrypt(self, found: list[bytes]) -> bool:
        """Add what can be read by now; return whether the other side said that it is the end."""
        with suppress(ssl.SSLWantReadError):  # costs more than to ask first, where that is enough
            while self._incoming.pending or self._tls.pending():
                data = self._tls.read(_RECORD)
                if not data:
                    return True
                found.append(data)
        return False

    def _flush(self) -> None:
        if self._outgoing.pending:
            self._wire.write(self._outgoing.read())

    # what the protocol above asks for

    def write(self, data: Data) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        if self._wire.is_closing():
            return
        sealed = []
        for data in list_of_data:
            rest = memoryview(data)
            for at in range(0, len(rest), _SLICE):
                self._tls.write(rest[at : at + _SLICE])
                sealed.append(self._outgoing.read())
        self._wire.write(b"".join(sealed))

    def close(self) -> None:
        if self._wire.is_closing():
            return
        if self._timer is None:
            with suppress(ssl.SSLError):  # of what the other side has yet to say
                self._tls.unwrap()
            self._flush()
        self._wire.close()

    def abort(self) -> None:
        self._wire.abort()

    def is_closing(self) -> bool:
        return bool(self._wire.is_closing())

    def pause_reading(self) -> None:
        self._wire.pause_reading()

    def resume_reading(self) -> None:
        self._wire.resume_reading()

    def is_reading(self) -> bool:
        return bool(self._wire.is_reading())

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._wire.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        low, high = self._wire.get_write_buffer_limits()
        return low, high

    def get_write_buffer_size(self) -> int:
        return int(self._wire.get_write_buffer_size())

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, asyncio.Protocol)  # noqa: S101  (it takes bytes)
        self._above = protocol

    def get_protocol(self) -> asyncio.Protocol:
        return self._above

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        match name:
            case "ssl_object":
                return self._tls
            case "sslcontext":
                return self._tls.context
            case "peercert":
                return self._tls.getpeercert()
            case _:
                return self._wire.get_extra_info(name, default)
