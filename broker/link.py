"""One open connection to Redis, which sends commands and receives their replies.

An exchange wakes its caller once, after the last reply, and has one time-out for any number of
replies. The bytes of a model are received directly into its memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from math import inf
from typing import Any, Self, cast

import hiredis

from fedstream.broker.commands import Buffer
from fedstream.core.errors import ReplyTooLarge

READ = 1 << 18  # bytes taken from a connection at once
_STAGED = 1 << 16  # the same for bulks; the bytes after it are received into their buffer
_SENT = 1 << 20  # bytes of the system's send buffer: a chunk fits
_LINE = 1 << 16  # bytes of a line at most; Redis's lines are far shorter
_CLOSED = "Connection closed by server."
_NOT_YET = object()
BulkPlace = memoryview | None  # the buffer for a bulk; None: return it as bytes
_END = b"\r\n"


class Bulks:
    """Receives bulk replies as bytes or into buffers.

    Drops bytes beyond a buffer's end; the reply of a bulk in a buffer is the bulk's length.
    """

    def __init__(
        self, expected: int, into: Sequence[BulkPlace], error: Callable[[str], Exception]
    ) -> None:
        """``into``: the buffer of each reply; see :meth:`Link.exchange`.

        ``error``: makes an exception from the text of an error reply.
        """
        self.replies: list[Any] = []  # bytes, a length, None for nil, or an error
        self._expected = expected
        self._places = iter(into)
        self._place: BulkPlace = None
        self._into = memoryview(b"")  # the rest of the current buffer
        self._error = error
        self._line = bytearray()  # the beginning of a line, or the first reply
        self._left = 0  # missing bytes of the current bulk, its line end included
        self._length = 0  # of the current bulk
        self._next_place()

    @property
    def is_complete(self) -> bool:
        """Whether all replies are there."""
        return len(self.replies) == self._expected

    @property
    def room(self) -> memoryview | None:
        """The memory for the next bytes; None: pass them to :meth:`feed`."""
        if not self._left or self._place is None:
            return None
        # The last bytes are received together with the line's end and the next reply.
        direct = min(self._left - len(_END), len(self._into)) - 1
        return self._into[:direct] if direct >= _STAGED else None

    def filled(self, count: int) -> None:
        """Note that ``count`` bytes were written to :attr:`room`."""
        self._into = self._into[count:]
        self._left -= count

    def feed(self, data: memoryview) -> None:
        """Parse received bytes. Raises ValueError unless they are bulk replies."""
        while data:
            if self.is_complete:
                raise ValueError("more replies than commands")
            data = self._bytes(data) if self._left else self._header(data)

    def _bytes(self, data: memoryview) -> memoryview:
        """Consume bytes of the current bulk; return the rest."""
        content = data[: max(0, self._left - len(_END))]
        if self._place is None:
            self._line += content
        else:
            kept = min(len(content), len(self._into))
            self._into[:kept] = content[:kept]
            self._into = self._into[kept:]
        taken = min(len(data), self._left)
        self._left -= taken
        if not self._left:
            self._reply(bytes(self._line) if self._place is None else self._length)
            self._line.clear()
        return data[taken:]

    def _reply(self, what: Any) -> None:
        self.replies.append(what)
        self._next_place()

    def _next_place(self) -> None:
        place = next(self._places, None)
        if place is not self._place:
            self._place = place
            self._into = memoryview(b"") if place is None else place

    def _header(self, data: memoryview) -> memoryview:
        """Consume bytes of a line; return the rest."""
        had = len(self._line)
        self._line += data[:_LINE]
        end = self._line.find(_END, max(0, had - 1))
        if end < 0:
            if len(self._line) > _LINE:
                raise ValueError("a line without an end")
            return data[_LINE:]
        kind, text = self._line[:1], bytes(self._line[1:end])
        self._line.clear()
        if kind == b"-":
            self._reply(self._error(text.decode(errors="replace")))
        elif kind == b"+":  # the reply to a preceding command, such as ASKING
            self.replies.append(text)
        elif kind != b"$":
            raise ValueError(f"a reply of kind {kind.decode(errors='replace')!r}, expected a bulk")
        elif text == b"-1":
            self._reply(None)
        else:
            self._length = int(text)
            self._left = self._length + len(_END)
        return data[end + len(_END) - had :]


class Link(asyncio.BufferedProtocol):
    """An open connection, for one exchange at a time."""

    def __init__(
        self, writer: asyncio.StreamWriter, error: Callable[[str], Exception], buffer: memoryview
    ) -> None:
        """Take over the connection of a stream after its handshake.

        ``error``: makes an exception from the text of an error reply. ``buffer``: ``READ`` bytes,
        used only within a call, so connections may share it.
        """
        self._writer = writer  # kept, as its deletion would close the connection
        self._transport = transport = cast(asyncio.Transport, writer.transport)
        self._loop = asyncio.get_running_loop()
        self._error = error
        self._buffer = buffer
        self._reader = hiredis.Reader(replyError=self._erred, notEnoughData=_NOT_YET)
        self._waiter: asyncio.Future[list[Any]] | None = None  # None: no exchange
        self._early: asyncio.Future[list[Any]] | None = None  # None: not requested, or done
        self._until = 0.0  # time-out of the exchange, by the loop's clock
        self._alarm: asyncio.TimerHandle | None = None
        self._rings = inf  # time of the alarm; infinity: none is set
        self._soon = 0  # replies for the early future
        self._wait_s = 0.0  # seconds that the last commands may block
        self._replies: list[Any] = []
        self._expected = 0
        self._left = inf  # bytes left for the replies
        self._bulks: Bulks | None = None
        self._direct = False  # the last buffer handed out belongs to the bulks
        self.received = 0  # replies in the last exchange that failed
        self.has_erred = False  # an error is among the replies of the last exchange
        self.is_open = True  # another exchange can be tried
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            # A Unix socket takes 200 KB by default, and Redis wakes up for each part of a longer
            # command. TCP's buffers grow by themselves.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT)
        transport.pause_reading()
        transport.set_protocol(self)
        transport.resume_reading()

    def exchange(
        self,
        data: Sequence[Buffer],
        expected: int,
        *,
        seconds: float,
        most: float = inf,
        into: Sequence[BulkPlace] | None = None,
        early: asyncio.Future[list[Any]] | None = None,
        late: int = 1,
        wait_s: float = 0.0,
    ) -> asyncio.Future[list[Any]]:
        """Send encoded commands; the future gets ``expected`` replies, error replies included.

        ``most``: limit in bytes on all replies together, accurate to one read. ``into``: a buffer
        for each reply, all of which must be a bulk or nil; replies in a row with the same buffer
        are appended to each other; None: return bytes. The future fails with TimeoutError after
        ``seconds``, with ReplyTooLarge or with OSError. The caller must then abort the connection,
        as after cancelling the future. Raises ConnectionError.

        ``early``: a future that gets all replies but the last ``late``, as soon as they are there,
        or fails with the same error. The last replies may take ``wait_s`` longer than ``seconds``.
        """
        if not self.is_open:  # the transport reports a loss only once
            raise ConnectionError(_CLOSED)
        waiter: asyncio.Future[list[Any]] = self._loop.create_future()
        if not expected:
            waiter.set_result([])
            return waiter
        self._waiter, self._early, self._wait_s = waiter, early, wait_s
        self._soon = expected - late
        self._expected, self._left, self.has_erred = expected, most, False
        if into is None:
            self._replies = []
        else:
            self._bulks = Bulks(expected, into, self._erred)
            self._replies = self._bulks.replies
        self._until = until = self._loop.time() + seconds
        if until < self._rings:
            self._ring_at(until)
        if len(data) == 1:
            self._transport.write(data[0])
        else:
            self._transport.writelines(data)
        return waiter

    def abort(self) -> None:
        """Close the connection at once, dropping unsent data."""
        self._close()
        self._over()
        self._transport.abort()

    # called by the transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """The memory for the next received bytes."""
        if self._bulks is None:
            self._direct = False
            return self._buffer
        room = self._bulks.room
        self._direct = room is not None
        return self._buffer[:_STAGED] if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        """Take the bytes that were received."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            self.abort()  # bytes without a request
            return
        self._left -= nbytes
        try:
            complete = self._taken(nbytes)
        except (ValueError, hiredis.HiredisError) as error:
            self._fail(ConnectionError(f"not Redis's protocol: {error}"))
            return
        replies = self._replies
        early = self._early
        if early is not None and len(replies) >= self._soon:
            self._early = None
            if not early.done():
                early.set_result(replies[: self._soon])
        if complete:
            self._over()
            waiter.set_result(replies)
        elif self._left <= 0:
            self._fail(ReplyTooLarge())

    def _taken(self, count: int) -> bool:
        """Parse received bytes; return whether the exchange is complete."""
        bulks = self._bulks
        if bulks is not None:
            if self._direct:
                bulks.filled(count)
            else:
                bulks.feed(self._buffer[:count])
            return bulks.is_complete
        reader, replies = self._reader, self._replies
        reader.feed(self._buffer, 0, count)  # type: ignore[arg-type]  # any buffer will do
        for _ in range(self._expected - len(replies)):
            reply = reader.gets()
            if reply is _NOT_YET:
                return False
            replies.append(reply)
        if reader.has_data():
            raise ValueError("more replies than commands")
        return True

    def eof_received(self) -> None:
        """Redis has closed the connection."""
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        self._close()
        self._fail(exc or ConnectionError(_CLOSED))

    def _erred(self, text: str) -> Exception:
        """Make an exception from an error reply."""
        self.has_erred = True
        return self._error(text)

    def _ring_at(self, time: float) -> None:
        """Set the alarm to a time of the loop's clock.

        Exchanges are far shorter than their time-outs, so the end of an exchange does not cancel
        the alarm. The alarm rings at most once per time-out, and is then set anew for the exchange
        under way.
        """
        if self._alarm is not None:
            self._alarm.cancel()
        self._rings = time
        self._alarm = self._loop.call_at(time, self._ring)

    def _ring(self) -> None:
        """End the exchange if its time is up."""
        self._alarm, self._rings = None, inf
        if self._waiter is None:
            return
        if self._wait_s and self._early is None and self._until <= self._loop.time():
            self._until += self._wait_s  # only the blocking command is outstanding
            self._wait_s = 0.0
        if self._until > self._loop.time():
            self._ring_at(self._until)
        else:
            self._fail(TimeoutError())

    def _close(self) -> None:
        """Mark the connection as unusable."""
        self.is_open = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._rings = None, inf

    def _fail(self, error: Exception) -> None:
        """Fail the pending futures with the error."""
        waiting, self.received = (self._early, self._waiter), len(self._replies)
        self._over()
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # asyncio logs errors that are not retrieved

    def _over(self) -> None:
        """End the exchange and drop references to the caller's memory."""
        self._waiter = self._early = self._bulks = None
        self._replies = []


class Started:
    """The replies to executed commands, and one or more blocking commands still under way.

    Use it in a ``with`` block, or close it: both close the connection unless :meth:`rest` or
    :meth:`last` was called.
    """

    def __init__(
        self,
        replies: list[Any],
        link: Link | None,
        rest: Callable[[], Awaitable[list[Any]]],
    ) -> None:
        self.replies = replies  # to all commands but the blocking ones
        self._link = link
        self._rest = rest

    async def last(self) -> Any:
        """Wait for the last command's reply. Call it once. Raises as ``pipeline`` does."""
        return (await self.rest())[-1]

    async def rest(self) -> list[Any]:
        """Wait for the replies to the blocking commands. Call it once. Raises as ``pipeline``."""
        self._link = None  # _rest closes the link if it fails
        return (await self._rest())[len(self.replies) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, unless :meth:`rest` or :meth:`last` was called."""
        if self._link is not None:
            self._link.abort()
            self._link = None
