"""TLS for many connections of which most are idle: what one holds does not grow with its traffic.

asyncio's and uvloop's own TLS keep, for as long as a connection lasts, a read buffer of 256 KiB
and two buffers as large as the most that ever was in them: half a megabyte once a model has gone
each way. Here all connections share their buffers, each for the length of one call. What is read is
delivered at once, and what is written is the socket's at once, so pausing either means the socket
itself.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Data = bytes | bytearray | memoryview

READ: Final = 1 << 18  # bytes of a read buffer
# In which the time to agree on TLS is counted. A step that takes longer is late by our own delay,
# and counts as one: what has come from the other side meanwhile is read before the next.
_STEPS = 8
_RECORD = 1 << 14  # most bytes that TLS decrypts at once
# What OpenSSL calls it if a client shows no certificate, or one that nobody trusted has signed.
_NO_CERTIFICATE = ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED")
# No TLS, none that we speak, damaged, or ended by the client before it was agreed on; not agreed on
# in time; the client's certificate is missing or refused.
TlsFailure: TypeAlias = Literal["tls", "timeout", "certificate"]


class TlsBuffers:
    """What passes through the connections of a loop, of each for the length of one call.

    OpenSSL takes all that it is given out of ``incoming``, and keeps an unfinished record in the
    connection's own state. So between two calls both of its ends are empty, and the next connection
    may use them.
    """

    __slots__ = ("incoming", "opened", "outgoing", "sealed")

    def __init__(self) -> None:
        self.sealed = memoryview(bytearray(READ))  # as it comes from the socket
        # Less than that can be inside, and what was held back of the records before.
        self.opened = memoryview(bytearray(READ + 2 * _RECORD))
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()


Stamp: TypeAlias = tuple[tuple[int, ...], ...]


def stamp(files: Iterable[Path]) -> Stamp | None:
    """What the system says of files, which differs once one was replaced or written.

    That notices a Secret of Kubernetes, which changes when a symbolic link is swapped, where
    watching the files would not. None while one is missing.
    """
    try:
        found = [file.stat() for file in files]
    except OSError:
        return None
    return tuple((one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


@dataclass
class CurrentTls:
    """What new connections begin TLS with; those that are open keep what they began with."""

    context: ssl.SSLContext


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a socket, and the transport of the protocol above it.

    That protocol is made once TLS is agreed on, and never if it isn't.
    """

    __slots__ = (
        "_above",
        "_buffers",
        "_context",
        "_has_begun",
        "_has_failed",
        "_make",
        "_steps",
        "_timer",
        "_tls",
        "_wire",
        "_within_s",
    )
    # Both from when there is a socket.
    _tls: ssl.SSLObject
    _wire: Any  # its transport

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: ssl.SSLContext,
        buffers: TlsBuffers,
        *,
        within_s: float,
    ) -> None:
        """``make``: the protocol above. ``buffers``: of the loop. ``within_s``: to agree on TLS."""
        super().__init__()
        self._make = make
        self._context = context
        self._buffers = buffers
        self._within_s = within_s
        self._has_begun = self._has_failed = False
        self._above: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None  # running until TLS is agreed on

    def failed(self, reason: TlsFailure, said: str) -> None:
        """Hear, at most once, why the connection ends. ``said``: the same for people."""

    # what the socket says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = transport
        self._tls = self._context.wrap_bio(
            self._buffers.incoming, self._buffers.outgoing, server_side=True
        )
        self._steps = _STEPS
        self._step()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffers.sealed

    def buffer_updated(self, nbytes: int) -> None:
        try:
            opened = self._opened(nbytes)
        except ssl.SSLError as error:
            reason: TlsFailure = "certificate" if error.reason in _NO_CERTIFICATE else "tls"
            said = getattr(error, "verify_message", "") or error.reason or str(error)
            self._fails(reason, said)
            self._wire.close()
            return
        if opened is None:
            return
        size, is_over = opened
        if self._above is None:
            self._above = self._make()
            self._above.connection_made(self)
            if self._wire.is_closing():
                return
        if size:
            self._above.data_received(bytes(self._buffers.opened[:size]))
        if is_over:
            self._above.eof_received()
            self.close()

    def eof_received(self) -> None:
        if self._above is not None:
            self._above.eof_received()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            if self._has_begun:  # probes of an open port, which say nothing, are no failures
                self._fails("tls", "the client went away")  # as many do that don't trust us
        if self._above is not None:
            self._above.connection_lost(exc)  # type: ignore[arg-type]

    def pause_writing(self) -> None:
        if self._above is not None:
            self._above.pause_writing()

    def resume_writing(self) -> None:
        if self._above is not None:
            self._above.resume_writing()

    def _step(self) -> None:
        if not self._steps:
            self._late()
            return
        self._steps -= 1
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._within_s / _STEPS, self._step)

    def _late(self) -> None:
        self._fails("timeout", f"no agreement within {self._within_s:g} s")
        self.abort()

    def _fails(self, reason: TlsFailure, said: str) -> None:
        if not self._has_failed:  # closing takes until what is wrong has been read
            self._has_failed = True
            self.failed(reason, said)

    def _agrees(self) -> bool:
        """Whether TLS is agreed on with what has come. Raises SSLError if it can't be."""
        self._has_begun = True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        finally:
            self._flush()
        assert self._timer is not None  # noqa: S101  (it runs until now)
        self._timer.cancel()
        self._timer = None
        return True

    def _opened(self, nbytes: int) -> tuple[int, bool] | None:
        """Decrypt what came: how many bytes are in the buffer then, and whether the other side said
        that it is the end; None while TLS is not agreed on. Raises SSLError.
        """
        incoming = self._buffers.incoming
        incoming.write(self._buffers.sealed[:nbytes])
        try:
            if self._above is None and not self._agrees():
                return None
            return self._decrypted()
        finally:
            incoming.read()  # what follows a failure, or an end, is nobody's
            self._flush()  # what TLS itself answers: new keys, or what is wrong

    def _decrypted(self) -> tuple[int, bool]:
        opened, size = self._buffers.opened, 0
        tls, incoming = self._tls, self._buffers.incoming
        with suppress(ssl.SSLWantReadError):  # costs more than to ask first, where that is enough
            while incoming.pending or tls.pending():
                # Into a buffer, this returns a number, whatever typeshed says.
                read = cast("int", tls.read(_RECORD, opened[size:]))
                if not read:
                    return size, True
                size += read
        return size, False

    def _flush(self) -> None:
        """Send what was encrypted. Due after each call of TLS: the next connection's goes there."""
        outgoing = self._buffers.outgoing
        if outgoing.pending:
            self._wire.write(outgoing.read())

    # what the protocol above asks for

    def write(self, data: Data) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Data]) -> None:
        if self._wire.is_closing():
            return
        try:
            for data in list_of_data:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._tls.write(rest[:READ]) :]
                    if self._buffers.outgoing.pending > READ:  # it keeps the most that it ever held
                        self._flush()
        except ssl.SSLError as error:
            # The other side has begun a message of TLS itself, such as new keys, and not ended it.
            self._fails("tls", error.reason or str(error))
            self._wire.abort()
        finally:
            self._flush()

    def close(self) -> None:
        if self._wire.is_closing():
            return
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
        assert self._above is not None  # noqa: S101  (who asks has been made)
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
