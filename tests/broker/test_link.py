"""What a connection receives: bulks go where they belong, however the bytes are cut."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from redis.asyncio.connection import Connection

from fedstream.broker.client import Client, RedisSettings, _transport
from fedstream.broker.commands import Command
from fedstream.broker.discovery import Address
from fedstream.broker.keys import Keys
from fedstream.broker.link import Bulks
from fedstream.core.errors import Foreign, Unavailable
from fedstream.local.redis_server import RedisServer
from tests.support import wait_until

LONG = bytes(range(256)) * 320  # 80 KiB: received past the staging buffer


def received(stream: bytes, expected: int, into: bytearray, step: int) -> list[Any]:
    """The replies in a stream of which at most ``step`` bytes arrive at once."""
    place = memoryview(into)
    return fed(Bulks(expected, [None, *[place] * (expected - 1)], ValueError), stream, step)


def fed(bulks: Bulks, stream: bytes, step: int) -> list[Any]:
    at = 0
    while at < len(stream):
        room = bulks.room
        piece = stream[at : at + (step if room is None else min(step, len(room)))]
        if room is None:
            bulks.feed(memoryview(piece))
        else:
            room[: len(piece)] = piece
            bulks.filled(len(piece))
        at += len(piece)
    assert bulks.is_complete
    return bulks.replies


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
def test_bulks_go_into_the_buffer_however_they_are_cut(step: int) -> None:
    stream = b"$6\r\n262147\r\n$3\r\nabc\r\n$0\r\n\r\n$%d\r\n%b\r\n$-1\r\n" % (len(LONG), LONG)
    into = bytearray(len(LONG) + 5)
    assert received(stream, 5, into, step) == [b"262147", 3, 0, len(LONG), None]
    assert into == b"abc" + LONG + b"\0\0"


@pytest.mark.parametrize("step", [1000, 1 << 20])
def test_bytes_beyond_the_buffer_are_dropped_and_counted(step: int) -> None:
    stream = b"$1\r\n3\r\n$%d\r\n%b\r\n$2\r\nyz\r\n" % (len(LONG), LONG)
    for size in (0, 10, len(LONG) - 1, len(LONG), len(LONG) + 1):
        into = bytearray(size)
        assert received(stream, 3, into, step) == [b"3", len(LONG), 2]
        assert into == (LONG + b"yz")[:size]


@pytest.mark.parametrize("step", [1, 100])
def test_errors_stand_in_for_bulks(step: int) -> None:
    stream = b"+OK\r\n-WRONGTYPE no\r\n$-1\r\n$1\r\nx\r\n"
    into = bytearray(1)
    ok, error, nothing, length = received(stream, 4, into, step)
    assert (ok, str(error), nothing, length) == (b"OK", "WRONGTYPE no", None, 1)
    assert into == b"x"


@pytest.mark.parametrize(
    "stream", [b"*1\r\n", b":1\r\n", b"$x\r\n", b"$1\r\na\r\n$1\r\n", b"+" + bytes(1 << 17)]
)
def test_what_is_no_bulk_is_refused(stream: bytes) -> None:
    bulks = Bulks(1, [memoryview(bytearray(1))], ValueError)
    with pytest.raises(ValueError, match=r"reply|replies|invalid|line"):
        bulks.feed(memoryview(stream))


@pytest.mark.parametrize("step", [3, 1 << 20])
def test_each_bulk_goes_to_its_own_place(step: int) -> None:
    """Into one buffer behind the other if it is the same, else to the beginning of the next."""
    stream = b"+OK\r\n$1\r\n4\r\n$2\r\nab\r\n$2\r\ncd\r\n$1\r\n3\r\n-ERR no\r\n$%d\r\n%b\r\n"
    first, second, third = bytearray(4), bytearray(3), bytearray(len(LONG))
    places = [memoryview(first), memoryview(second), memoryview(third)]
    into = [None, places[0], places[0], None, places[1], places[2]]
    replies = fed(Bulks(7, into, ValueError), stream % (len(LONG), LONG), step)
    assert replies[:5] == [b"OK", b"4", 2, 2, b"3"]
    assert (type(replies[5]), replies[6]) == (ValueError, len(LONG))
    assert [bytes(first), bytes(second), bytes(third)] == [b"abcd", bytes(3), LONG]


async def test_bulks_and_usual_replies_take_turns(client: Client, keys: Keys) -> None:
    """A connection is in step after each, errors or not."""
    await client.call("HSET", keys.run, "size", "7", "0", LONG, "1", "end")
    asked: list[Command] = [("HGET", keys.run, name) for name in ("size", 0, 1)]
    for _ in range(3):
        into = bytearray(len(LONG) + 3)
        places = [None, *[memoryview(into)] * 3]
        replies = await client.pipeline(asked, into=places)
        assert replies == [b"7", len(LONG), 3]
        assert bytes(into) == LONG + b"end"
        with pytest.raises(Foreign):
            await client.pipeline([*asked, ("GET", keys.run)], into=places)
        assert await client.call("HMGET", keys.run, "size", 0, 1) == [b"7", LONG, b"end"]
    assert len(client._idle) == 1


async def test_connection_that_says_something_unasked_is_not_used_again(client: Client) -> None:
    await client.call("PING")
    [link] = client._idle
    link.get_buffer(-1)[:7] = b"+PONG\r\n"
    link.buffer_updated(7)
    assert not link.is_open
    assert await client.call("ECHO", "mine") == b"mine"


async def test_surplus_reply_in_the_same_read_is_not_the_next_callers(
    client: Client, keys: Keys
) -> None:
    await client.call("PING")
    [link] = client._idle
    waiting = asyncio.create_task(client.call("BLPOP", keys.run, 5, wait_s=5))
    await wait_until(lambda: not client._idle)
    link.get_buffer(-1)[:14] = b"+PONG\r\n+PONG\r\n"
    link.buffer_updated(14)
    with pytest.raises(Unavailable, match="more replies than commands"):
        await waiting
    assert not link.is_open
    assert await client.call("ECHO", "mine") == b"mine"


async def test_exchange_on_a_closed_connection_fails_at_once(client: Client) -> None:
    await client.call("PING")
    [link] = client._idle
    assert await link.exchange([], 0, seconds=1) == []
    link.abort()
    await asyncio.sleep(0)  # its protocol has been told, and is not told again
    with pytest.raises(ConnectionError, match="closed"):
        await link.exchange([b"*1\r\n$4\r\nPING\r\n"], 1, seconds=1)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_connection_that_is_reset_after_its_handshake_is_unavailable(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = struct.pack("ii", 1, 0)  # at once, which is a reset
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()

    class Slow(Client):
        async def _opened(self, place: Address | None, options: dict[str, Any]) -> Connection:
            connection = await super()._opened(place, options)
            await wait_until(_transport(connection).is_closing)
            return connection

    async def ask() -> None:
        async with await asyncio.start_server(reset, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            mine = Slow(RedisSettings(url=f"redis://127.0.0.1:{port}", timeout_s=2))
            with pytest.raises(Unavailable, match="Connection closed by server"):
                await mine.call("PING")

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(ask())


async def test_alarm_of_an_earlier_exchange_does_not_end_a_later_one(
    client: Client, keys: Keys
) -> None:
    client.hurry(0.2)
    await client.call("PING")
    [link] = client._idle
    alarm = link._alarm
    assert alarm is not None
    assert await client.call("BLPOP", keys.run, 0.5, wait_s=20) is None
    assert client._idle == [link]
    assert link._alarm is not alarm  # it rang meanwhile
    # Between exchanges it rings for nobody, and is not set again.
    client.hurry(0.05)
    await client.call("PING")
    await wait_until(lambda: link._alarm is None)
    assert await client.call("PING") == b"PONG"
    assert client._idle == [link]
    # A connection that was closed leaves none behind.
    link.abort()
    assert link._alarm is None


async def test_closed_connection_is_noticed_while_idle(client: Client, keys: Keys) -> None:
    await client.call("PING")
    [link] = client._idle
    number = await client.call("CLIENT", "ID")
    other = asyncio.create_task(client.call("BLPOP", keys.run, 5, wait_s=5))
    await wait_until(lambda: not client._idle)
    assert await client.call("CLIENT", "KILL", "ID", number) == 1
    with pytest.raises(Exception, match="does not answer"):
        await other
    await wait_until(lambda: not link.is_open)
    assert await client.call("PING") == b"PONG"


@pytest.mark.process
async def test_unix_socket_takes_a_chunk_at_once() -> None:
    """Otherwise it takes 200 KB, and Redis wakes up for each part of what is longer."""
    with RedisServer() as server:
        mine = Client(RedisSettings(url=server.url))
        await mine.call("PING")
        [link] = mine._idle
        own = link._transport.get_extra_info("socket")
        assert own.family == socket.AF_UNIX
        with socket.socket(socket.AF_UNIX) as usual:
            before = usual.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert own.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) > before
        await mine.close()
