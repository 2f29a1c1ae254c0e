"""TLS for many mostly idle connections, whose memory does not grow with their traffic.

In asyncio and uvloop, a TLS connection keeps a read buffer of 256 KiB and two buffers of the
largest size ever needed: half a megabyte after a model in each direction. Here all connections
share their buffers, each for the duration of one call. Received bytes are delivered at once, and
written bytes go to the socket at once, so pausing reading or writing applies to the socket itself.
"""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeAlias, TypeVar, cast

from fedstream.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    Data = bytes | bytearray | memoryview

T = TypeVar("T")

READ: Final = 1 << 18  # bytes of a read buffer
# Steps in which the handshake's time limit is counted. A step that takes longer was delayed by this
# process and counts once, so that bytes that arrived meanwhile are read before the next step.
_STEPS = 8
_RECORD = 1 << 14  # most bytes that TLS decrypts at once
# OpenSSL's reasons if a client has no certificate, or one without a trusted signature.
_NO_CERTIFICATE = ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "CERTIFICATE_VERIFY_FAILED")
# The handshake failed; it took too long; the client's certificate is missing or refused.
TlsFailure: TypeAlias = Literal["tls", "timeout", "certificate"]


class TlsBuffers:
    """The buffers that all connections of a loop share, each for the duration of one call.

    OpenSSL consumes all bytes in ``incoming``, and keeps an unfinished record in the connection's
    own state. So between two calls both buffers are empty, and the next connection may use them.
    """

    __slots__ = ("incoming", "opened", "outgoing", "sealed")

    def __init__(self) -> None:
        self.sealed = memoryview(bytearray(READ))  # encrypted bytes from the socket
        # Decrypted bytes of one read, plus a record held back before, always fit.
        self.opened = memoryview(bytearray(READ + 2 * _RECORD))
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()


class RenewedFiles(Generic[T]):
    """The value of certificates or tokens in files, which are read again once they change.

    While the files are unusable, the previous value stays, and each look tries again, as the files'
    metadata doesn't show every repair.
    """

    def __init__(self, files: Iterable[Path], read: Callable[[], T]) -> None:
        """``read``: raises ConfigError for unusable files, also here."""
        self._files = tuple(files)
        self._read = read
        self._seen = self._metadata()  # first, so that no later change is missed
        self._is_usable = True
        self.value = read()

    def look(self, report: Callable[[ConfigError], object]) -> T:
        """The newest value. ``report``: called once for each change to unusable files."""
        found = self._metadata()
        if not self._is_usable or found != self._seen:
            try:
                self.value = self._read()
            except ConfigError as error:
                if self._is_usable or found != self._seen:
                    report(error)
                self._is_usable = False
            else:
                self._is_usable = True
            self._seen = found
        return self.value

    def _metadata(self) -> tuple[tuple[int, ...], ...] | None:
        """Numbers that change once a file is replaced or written; None while a file is missing.

        Unlike watching the files, this notices a Secret of Kubernetes, which changes by swapping a
        symbolic link.
        """
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return None
        return tuple((one.st_dev, one.st_ino, one.st_mtime_ns, one.st_size) for one in found)


@dataclass(frozen=True)
class Certificate:
    """The parts of a server's certificate that clients check. Times are in seconds since 1970."""

    names: tuple[str, ...]  # hosts and addresses (subjectAltName)
    begins: float
    ends: float


@dataclass
class CurrentTls:
    """The TLS context of new connections; open connections keep theirs."""

    context: ssl.SSLContext


class TlsConnection(asyncio.BufferedProtocol, asyncio.Transport):
    """The protocol of a socket, and the transport of the protocol above it.

    The protocol above is made after the TLS handshake.
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
    # Both are set once there is a socket.
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
        """``make``: makes the protocol above. ``within_s``: time limit of the handshake."""
        super().__init__()
        self._make = make
        self._context = context
        self._buffers = buffers
        self._within_s = within_s
        self._has_begun = self._has_failed = False
        self._above: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None  # running until the end of the handshake

    def failed(self, reason: TlsFailure, said: str) -> None:
        """Called at most once, if the connection fails. ``said``: the reason in words."""

    # called by the socket

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
            if self._has_begun:  # probes of an open port, which send nothing, are no failures
                self._fails("tls", "the client went away")  # it may distrust us
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
        if not self._has_failed:  # closing waits until the alert has been read
            self._has_failed = True
            self.failed(reason, said)

    def _agrees(self) -> bool:
        """Continue the handshake; return whether it is done. Raises SSLError."""
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
        """Decrypt received bytes; return the number of bytes in the buffer, and whether the other
        side has ended TLS. None during the handshake. Raises SSLError.
        """
        incoming = self._buffers.incoming
        incoming.write(self._buffers.sealed[:nbytes])
        try:
            if self._above is None and not self._agrees():
                return None
            return self._decrypted()
        finally:
            incoming.read()  # drop bytes after a failure or an end
            self._flush()  # TLS's own messages: new keys, alerts

    def _decrypted(self) -> tuple[int, bool]:
        opened, size = self._buffers.opened, 0
        tls, incoming = self._tls, self._buffers.incoming
        with suppress(ssl.SSLWantReadError):  # more expensive than a check beforehand
            while incoming.pending or tls.pending():
                # Into a buffer, this returns a number, whatever typeshed says.
                read = cast("int", tls.read(_RECORD, opened[size:]))
                if not read:
                    return size, True
                size += read
        return size, False

    def _flush(self) -> None:
        """Send encrypted bytes. Needed after each call of TLS, as the buffer is shared."""
        outgoing = self._buffers.outgoing
        if outgoing.pending:
            self._wire.write(outgoing.read())

    # called by the protocol above

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
                    if self._buffers.outgoing.pending > READ:  # it would keep its memory
                        self._flush()
        except ssl.SSLError as error:
            # The other side has begun and not finished a message of TLS itself, such as new keys.
            self._fails("tls", error.reason or str(error))
            self._wire.abort()
        finally:
            self._flush()

    def close(self) -> None:
        if self._wire.is_closing():
            return
        with suppress(ssl.SSLError):  # the other side's end is not awaited
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
