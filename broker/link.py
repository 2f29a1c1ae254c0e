"""One open connection to Redis: commands out, and their replies in.

An exchange wakes its caller once, when the last reply is there, and takes one time-out however many
replies there are. A model's bytes are received where they belong, without a copy in between.
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
_STAGED = 1 << 16  # the same while bulks are received; what is beyond goes straight to its place
_SENT = 1 << 20  # bytes that the system takes at once: a chunk
_LINE = 1 << 16  # bytes of a line at most; none of Redis's is nearly as long
_CLOSED = "Connection closed by server."
_NOT_YET = object()
BulkPlace = memoryview | None  # where a bulk goes; None: returned as bytes
_END = b"\r\n"


class Bulks:
    """Receives a number of bulk replies: as bytes, or into buffers.

    The bytes beyond a buffer are dropped, and the reply says how many there were.
    """

    def __init__(
        self, expected: int, into: Sequence[BulkPlace], error: Callable[[str], Exception]
    ) -> None:
        """``into``: where each reply goes; see :meth:`Link.exchange`.

        ``error`` makes an exception from an error reply's text.
        """
        self.replies: list[Any] = []  # bytes, or lengths; None: nil; or errors
        self._expected = expected
        self._places = iter(into)
        self._place: BulkPlace = None
        self._into = memoryview(b"")  # what is left of the place
        self._error = error
        self._line = bytearray()  # the beginning of a line, or the first reply
        self._left = 0  # bytes of the current bulk still to come, and of the line's end after it
        self._length = 0  # of the current bulk
        self._next_place()

    @property
    def is_complete(self) -> bool:
        """Whether all replies are there."""
        return len(self.replies) == self._expected

    @property
    def room(self) -> memoryview | None:
        """Where the next bytes belong; None: they are to be passed to :meth:`feed`."""
        if not self._left or self._place is None:
            return None
        # The last bytes come with the line's end, and with what follows.
        direct = min(self._left - len(_END), len(self._into)) - 1
        return self._into[:direct] if direct >= _STAGED else None

    def filled(self, count: int) -> None:
        """So many bytes were written to :attr:`room`."""
        self._into = self._into[count:]
        self._left -= count

    def feed(self, data: memoryview) -> None:
        """Take bytes as they came. Raises ValueError unless they are bulk replies."""
        while data:
            if self.is_complete:
                raise ValueError("more replies than commands")
            data = self._bytes(data) if self._left else self._header(data)

    def _bytes(self, data: memoryview) -> memoryview:
        """Take bytes of the current bulk; return the rest."""
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
        """Take bytes of a line; return the rest."""
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
        elif kind == b"+":  # to a command sent ahead, such as ASKING
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
        """Take a stream's connection over, once its handshake is done.

        ``error`` makes an exception from an error reply's text. ``buffer``: ``READ`` bytes, used
        only within a call, so connections may share it.
        """
        self._writer = writer  # kept: when it goes, it closes the connection
        self._transport = transport = cast(asyncio.Transport, writer.transport)
        self._loop = asyncio.get_running_loop()
        self._error = error
        self._buffer = buffer
        self._reader = hiredis.Reader(replyError=self._erred, notEnoughData=_NOT_YET)
        self._waiter: asyncio.Future[list[Any]] | None = None  # None: no exchange
        self._early: asyncio.Future[list[Any]] | None = None  # None: nobody waits for it, or done
        self._until = 0.0  # when the exchange has taken too long, on the loop's clock
        self._alarm: asyncio.TimerHandle | None = None
        self._rings = inf  # when the alarm does; infinity: there is none
        self._soon = 0  # replies that it gets
        self._wait_s = 0.0  # seconds that the last commands may block
        self._replies: list[Any] = []
        self._expected = 0
        self._left = inf  # bytes that the replies may still have
        self._bulks: Bulks | None = None
        self._direct = False  # the last buffer handed out was the bulks' own
        self.received = 0  # replies in the last exchange that failed
        self.has_erred = False  # an error is among the replies of the last exchange
        self.is_open = True  # another exchange can be tried
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            # By default it takes 200 KB, and Redis wakes up for each part of what is longer. TCP's
            # buffers grow by themselves.
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
        """Send encoded commands; the future gets so many replies, error replies among them.

        ``most``: limit in bytes on all replies together, accurate to one read. ``into``: for
        commands that all reply with a bulk or nil: the buffer that each goes into, behind what the
        replies just before put there; None: it is returned as bytes.
        The future gets a TimeoutError after ``seconds``, ReplyTooLarge, or an OSError: the
        connection must then be aborted, as also if the future is cancelled. Raises ConnectionError.

        ``early``: gets all replies but the last ``late`` as soon as they are there, or the same
        error. The others may then come ``wait_s`` later than ``seconds``.
        """
        if not self.is_open:  # nothing would ever tell us so again
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
        """Close the connection at once; what was not sent is dropped."""
        self._close()
        self._over()
        self._transport.abort()

    # what the transport calls

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the next bytes are to be received."""
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
            self.abort()  # nobody asked for these
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
        """Parse bytes; return whether all replies are there."""
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
        """Have the alarm ring at a time of the loop's clock, and no sooner.

        Exchanges are far shorter than their time-outs. So an exchange does not stop the alarm when
        it is over: it rings at most once in a time-out, and then waits for a later exchange's end.
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
            self._until += self._wait_s  # only the command that may block is outstanding
            self._wait_s = 0.0
        if self._until > self._loop.time():
            self._ring_at(self._until)
        else:
            self._fail(TimeoutError())

    def _close(self) -> None:
        """Let nobody use the connection again."""
        self.is_open = False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._rings = None, inf

    def _fail(self, error: Exception) -> None:
        """Give the error to who waits. It was raised for nobody, if the exchange was given up."""
        waiting, self.received = (self._early, self._waiter), len(self._replies)
        self._over()
        for future in waiting:
            if future is not None and not future.done():
                future.set_exception(error)
                future.exception()  # asyncio would log it, if nobody asked for this one

    def _over(self) -> None:
        """End the exchange: its memory is the caller's again."""
        self._waiter = self._early = self._bulks = None
        self._replies = []


class Started:
    """Commands that were executed, and one or more after them that may wait.

    To be used in a ``with`` block, which closes the connection if it is left before the last reply
    was asked for; or to be closed.
    """

    def __init__(
        self,
        replies: list[Any],
        link: Link | None,
        rest: Callable[[], Awaitable[list[Any]]],
    ) -> None:
        self.replies = replies  # to all commands but the last ones
        self._link = link
        self._rest = rest

    async def last(self) -> Any:
        """Wait for the last command's reply; to be called once. Raises as ``pipeline`` does."""
        return (await self.rest())[-1]

    async def rest(self) -> list[Any]:
        """Wait for the replies to the last commands, as :meth:`last` does for that to one."""
        self._link = None  # it is up to the rest to close it
        return (await self._rest())[len(self.replies) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, unless the last reply was asked for."""
        if self._link is not None:
            self._link.abort()
            self._link = None
