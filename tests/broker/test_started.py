"""Commands of which the last waits: the others' replies come first, and all else is as ever."""

from __future__ import annotations

import asyncio

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.commands import Command
from fedstream.broker.keys import Keys
from fedstream.broker.streams import Group, given, reading
from fedstream.core.errors import BrokerError, ReplyTooLarge, Unavailable
from tests.broker.node import Node
from tests.support import Proxy, wait_until


def waiting(stream: str, block_ms: int = 60_000) -> Command:
    """Waits for the stream's next entry."""
    return ("XREAD", "BLOCK", block_ms, "STREAMS", stream, "$")


async def test_replies_come_before_the_last_command_has_waited(client: Client, keys: Keys) -> None:
    group = Group(client, keys.tasks, "some", "one")
    await group.ensure()
    commands = [("SET", keys.run, "1"), ("INCR", keys.run)]
    sent = [*commands, reading([group], count=9, block_ms=60_000)]
    with await client.start(sent, wait_s=60) as started:
        assert started.replies == [b"OK", 2]
        assert client._idle == []
        await client.call("XADD", keys.tasks, "*", "m", "next")
        [(_, entry)] = given([group], await started.last())
    assert entry.data == b"next"
    # Both connections are in step, and are used again.
    assert len(client._idle) == 2
    replies = tuple(await asyncio.gather(client.call("GET", keys.run), client.call("PING")))
    assert replies == (b"2", b"PONG")
    assert client.reconnects == 0


async def test_all_replies_at_once_are_two_waits_too(client: Client, keys: Keys) -> None:
    with await client.start([("SET", keys.run, "1"), ("GET", keys.run)], wait_s=1) as started:
        assert (started.replies, await started.last()) == ([b"OK"], b"1")
    assert len(client._idle) == 1


async def test_leaving_without_the_last_reply_closes_the_connection(
    client: Client, keys: Keys
) -> None:
    with await client.start([("PING",), waiting(keys.queue)], wait_s=60) as started:
        assert started.replies == [b"PONG"]

    async def nobody_waits() -> bool:
        return b"blocked_clients:0" in await client.call("INFO", "clients")

    await wait_until(nobody_waits)
    await client.call("XADD", keys.queue, "*", "m", "nobody's")
    assert await client.call("ECHO", "mine") == b"mine"
    assert (len(client._idle), client.reconnects) == (1, 0)


@pytest.mark.parametrize("is_early", [True, False])
async def test_cancelled_exchanges_replies_reach_nobody_else(
    redis: RedisSettings, keys: Keys, is_early: bool
) -> None:
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        began = asyncio.Event()

        async def exchange() -> None:
            sent: list[Command] = [("SET", keys.run, "1"), waiting(keys.queue)]
            with await mine.start(sent, wait_s=60) as started:
                began.set()
                await started.last()

        if is_early:
            proxy.answering.clear()
        task = asyncio.create_task(exchange())
        await (wait_until(lambda: not mine._idle) if is_early else began.wait())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proxy.answering.set()
        assert mine._idle == []
        assert await mine.call("ECHO", "mine") == b"mine"
        assert mine.reconnects == 0
        await mine.close()


async def test_first_replies_may_not_take_longer_because_the_last_may(
    redis: RedisSettings, keys: Keys
) -> None:
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        mine.hurry(0.2)
        proxy.answering.clear()
        with pytest.raises(Unavailable, match="does not answer: TimeoutError"):
            async with asyncio.timeout(30):
                await mine.start([("PING",), waiting(keys.queue)], wait_s=60)
        proxy.answering.set()
        await mine.close()


async def test_last_reply_may_take_as_long_as_it_blocks(client: Client, keys: Keys) -> None:
    await client.call("PING")
    client.hurry(0.2)
    with await client.start([("PING",), waiting(keys.queue, 400)], wait_s=20) as started:
        assert await started.last() is None


async def test_late_last_reply_is_unavailable(redis: RedisSettings, keys: Keys) -> None:
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        mine.hurry(0.2)
        started = await mine.start([("PING",), waiting(keys.queue)], wait_s=0.2)
        with started, pytest.raises(Unavailable, match="does not answer: TimeoutError"):
            await started.last()
        assert await mine.call("PING") == b"PONG"
        assert mine.reconnects == 1
        await mine.close()


async def test_connection_lost_while_the_last_waits_does_not_resend(
    redis: RedisSettings, keys: Keys, client: Client
) -> None:
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        sent = [("RPUSH", keys.run, "once"), waiting(keys.queue)]
        with await mine.start(sent, wait_s=60) as started:
            assert started.replies == [1]
            proxy.cut()
            with pytest.raises(Unavailable, match="Connection closed by server"):
                await started.last()
        assert await client.call("LRANGE", keys.run, 0, -1) == [b"once"]
        assert await mine.call("PING") == b"PONG"
        assert mine.reconnects == 1
        await mine.close()


async def test_several_may_come_after_the_wait(client: Client, keys: Keys) -> None:
    """What follows the one that blocks is executed when that is over."""
    sent: list[Command] = [("SET", keys.run, "1"), waiting(keys.queue), ("GET", keys.run)]
    with await client.start(sent, wait_s=60, late=2) as started:
        assert started.replies == [b"OK"]
        await client.call("SET", keys.run, "2")
        await client.call("XADD", keys.queue, "*", "m", "next")
        entries, now = await started.rest()
    assert (entries[0][0], now) == (keys.queue.encode(), b"2")
    with await client.start([("PING",), ("PING",), ("GET", keys.run)], wait_s=1, late=2) as started:
        assert (started.replies, await started.rest()) == ([b"PONG"], [b"PONG", b"2"])


async def test_error_among_the_first_is_raised_at_once(client: Client, keys: Keys) -> None:
    """And does not wait for what may never come."""
    sent: list[Command] = [("SET", keys.run, "1"), ("NONSENSE",), waiting(keys.queue, 3_600_000)]
    with pytest.raises(BrokerError, match="unknown command"):
        await client.start(sent, wait_s=3600)
    assert client._idle == []
    assert await client.call("GET", keys.run) == b"1"
    assert client.reconnects == 0  # nothing was lost


async def test_error_of_the_last_takes_nothing_from_the_first(client: Client, keys: Keys) -> None:
    group = Group(client, keys.tasks, "nobody's", "one")
    sent = [("SET", keys.run, "1"), reading([group], count=1, block_ms=1000)]
    with await client.start(sent, wait_s=1) as started:
        assert started.replies == [b"OK"]
        with pytest.raises(BrokerError, match="NOGROUP"):
            await started.last()
    assert await client.call("GET", keys.run) == b"1"
    assert len(client._idle) == 1


async def test_oversized_last_reply_is_not_read(client: Client, keys: Keys) -> None:
    await client.call("SETRANGE", keys.run, 8 << 20, "end")
    sent = [("SET", keys.head, "1"), ("GET", keys.run)]
    with await client.start(sent, wait_s=1, most=1 << 20) as started:
        assert started.replies == [b"OK"]
        with pytest.raises(ReplyTooLarge, match="1048576 bytes with the reply to 'GET'"):
            await started.last()
    assert await client.call("GET", keys.head) == b"1"


async def test_surplus_reply_is_not_the_next_callers(client: Client, keys: Keys) -> None:
    await client.call("PING")
    [link] = client._idle
    with await client.start([("PING",), waiting(keys.queue)], wait_s=60) as started:
        link.get_buffer(-1)[:10] = b"*-1\r\n*-1\r\n"
        link.buffer_updated(10)
        with pytest.raises(Unavailable, match="more replies than commands"):
            await started.last()
    assert not link.is_open
    assert await client.call("ECHO", "mine") == b"mine"


async def test_connection_to_a_former_master_is_not_kept(redis: RedisSettings, keys: Keys) -> None:
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        with await mine.start([("PING",), waiting(keys.queue, 50)], wait_s=1) as started:
            mine._forget()  # meanwhile another call found that the node is another
            assert await started.last() is None
        assert mine._idle == []
        await mine.close()


async def test_what_a_node_did_not_do_is_sent_on_whole() -> None:
    async with Node(xread=b"*-1\r\n") as there:
        moved = b"-MOVED 1 127.0.0.1:%d\r\n" % there.port
        async with Node(get=moved, xread=moved) as here:
            mine = Client(RedisSettings(url=f"redis://127.0.0.1:{here.port}", cluster=True))
            mine._place = ("127.0.0.1", here.port)
            with await mine.start([("GET", "a"), waiting("a")], wait_s=1) as started:
                assert (started.replies, await started.last()) == ([b"OK"], None)
            assert here.asked[-2:] == there.asked[-2:] == ["get", "xread"]
            mine._place = ("127.0.0.1", here.port)
            mine._forget(mine._place)
            sent: list[Command] = [("GET", "a"), waiting("a"), ("GET", "a")]
            with await mine.start(sent, wait_s=1, late=2) as started:
                assert (started.replies, await started.rest()) == ([b"OK"], [None, b"OK"])
            # In part, and nobody repeats it.
            mine._place = ("127.0.0.1", here.port)
            mine._forget(mine._place)
            before = len(there.asked)
            with pytest.raises(BrokerError):
                await mine.start([("SET", "a", "1"), ("GET", "a"), waiting("a")], wait_s=1)
            assert here.asked[-3:] == ["set", "get", "xread"]
            assert len(there.asked) == before
            await mine.close()


async def test_node_that_is_loading_is_left(redis: RedisSettings) -> None:
    loading = b"-LOADING Redis is loading the dataset in memory\r\n"
    async with Node(get=loading, xread=loading) as node:
        mine = Client(RedisSettings(url=f"redis://127.0.0.1:{node.port}"))
        with pytest.raises(Unavailable, match="does not answer: Redis is loading"):
            await mine.start([("GET", "a"), waiting("a")], wait_s=1)
        assert mine._idle == []
        with pytest.raises(Unavailable, match="does not answer: Redis is loading"):
            await mine.pipeline([("PING",), ("GET", "a")])
        assert mine._idle == []
        await mine.close()
