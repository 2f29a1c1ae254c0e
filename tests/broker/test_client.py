"""A command is sent once; what goes wrong is one of a few errors, and the next call works."""

from __future__ import annotations

import asyncio

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import BrokerError, ConfigError, ReplyTooLarge, Unavailable
from tests.broker.node import Node
from tests.support import Proxy, wait_until


@pytest.mark.parametrize("size", [0, 16 * 1024 + 1, 3_000_000])
async def test_arguments_of_any_size_arrive(client: Client, keys: Keys, size: int) -> None:
    value = bytes(range(256)) * (size // 256) + bytes(size % 256)
    await client.call("HSET", keys.run, "before", 1, "it", memoryview(value), "after", 2)
    assert await client.call("HMGET", keys.run, "before", "it", "after") == [b"1", value, b"2"]


async def test_pipeline_completes_and_raises_its_first_error(client: Client, keys: Keys) -> None:
    with pytest.raises(BrokerError, match="unknown command") as raised:
        await client.pipeline(
            [
                ("SET", keys.run, "1"),
                ("NONSENSE",),
                ("XLEN", keys.run),
                ("SET", keys.head, "2"),
            ]
        )
    assert not raised.value.retriable
    # The replies behind the error went to nobody else.
    assert await client.call("MGET", keys.run, keys.head) == [b"1", b"2"]


async def test_oversized_reply_is_not_read(client: Client, keys: Keys) -> None:
    """Redis has done all that it was told; the next exchange meets nothing of it."""
    await client.call("SETRANGE", keys.run, 8 << 20, "end")
    commands = [("SET", keys.head, "1"), ("GET", keys.run), ("INCR", keys.head)]
    with pytest.raises(ReplyTooLarge, match="1048576 bytes with the reply to 'GET'") as raised:
        await client.pipeline(commands, most=1 << 20)
    assert raised.value.retriable
    assert (await client.call("GET", keys.head), client.reconnects) == (b"2", 0)
    *_, number = await client.pipeline(commands, most=9 << 20)
    assert number == 2
    assert len(await client.call("GET", keys.run)) == (8 << 20) + 3  # on the same connection
    assert len(client._idle) == 1


async def test_connection_lost_mid_command_does_not_resend_it(
    redis: RedisSettings, keys: Keys, client: Client
) -> None:
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        assert await mine.call("PING") == b"PONG"
        proxy.cut_reply_to = lambda data: b"RPUSH" in data
        with pytest.raises(Unavailable, match="does not answer") as raised:
            await mine.call("RPUSH", keys.run, "once")
        assert raised.value.retriable
        assert proxy.cut_replies == 1
        assert await client.call("LRANGE", keys.run, 0, -1) == [b"once"]
        assert await mine.call("LRANGE", keys.run, 0, -1) == [b"once"]
        await mine.close()


async def test_connections_cut_while_idle_cost_one_call_each(redis: RedisSettings) -> None:
    async with Proxy(redis) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        await mine.call("PING")
        assert mine.reconnects == 0
        for times in (1, 2):
            proxy.cut()
            with pytest.raises(Unavailable):
                await mine.call("PING")
            assert await mine.call("PING") == b"PONG"
            assert mine.reconnects == times
        await mine.close()


async def test_cancelled_calls_reply_is_not_given_to_the_next(
    redis: RedisSettings, keys: Keys, client: Client
) -> None:
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        await mine.call("SET", keys.run, "first")
        proxy.answering.clear()
        call = asyncio.create_task(mine.call("GET", keys.run))
        await asyncio.sleep(0)
        await wait_until(lambda: not mine._idle)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        proxy.answering.set()
        await client.call("SET", keys.run, "second")
        assert await mine.call("GET", keys.run) == b"second"
        assert await mine.call("PING") == b"PONG"
        await mine.close()


async def test_late_reply_is_unavailable(
    redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Proxy(redis) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        proxy.answering.clear()
        with monkeypatch.context() as patched:
            patched.setattr(mine, "_timeout_s", 0.2)
            with pytest.raises(Unavailable, match="does not answer: TimeoutError"):
                await mine.call("PING")
        proxy.answering.set()
        assert await mine.call("PING") == b"PONG"
        await mine.close()


async def test_abandoned_command_is_not_sent_later(
    redis: RedisSettings, keys: Keys, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its buffer may be in use for something else by then."""
    async with Proxy(redis, keys) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        proxy.reading.clear()
        with monkeypatch.context() as patched:
            patched.setattr(mine, "_timeout_s", 0.5)
            with pytest.raises(Unavailable):
                # More than socket buffers take.
                await mine.call("SET", keys.run, bytes(64 << 20))
        proxy.reading.set()
        await wait_until(lambda: all(task.done() for task in proxy.tasks))  # all is through
        assert await mine.call("PING") == b"PONG"
        assert await client.call("EXISTS", keys.run) == 0
        await mine.close()


async def test_blocking_command_may_exceed_the_timeout(redis: RedisSettings, keys: Keys) -> None:
    mine = Client(redis)
    await mine.call("PING")
    mine.hurry(0.2)
    reply = await mine.call("XREAD", "BLOCK", 400, "STREAMS", keys.queue, "$", wait_s=20)
    assert reply is None
    await mine.close()


async def test_unreachable_redis_is_unavailable_and_names_the_address() -> None:
    mine = Client(RedisSettings(url="redis://user:secret@127.0.0.1:1/0"))
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1 does not answer") as raised:
        await mine.call("PING")
    assert "secret" not in str(raised.value)
    await mine.close()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://there", "'http://there' is not allowed: "),
        ("redis://[::1", "'redis://[::1' is not allowed: "),
        ("redis://there/0?colour=red", "'redis://there/0?colour=red': unknown option 'colour'"),
        ("redis://there?port=abc", "'redis://there?port=abc': unknown option 'port'"),
        ("redis://there?host=x", "'redis://there?host=x': unknown option 'host'"),
        ("redis://there?retry=5", "'redis://there?retry=5': unknown option 'retry'"),
        ("redis://there?ssl_ciphers=a", "'redis://there?ssl_ciphers=a': option 'ssl_ciphers' does"),
        ("rediss://there?ssl_cert_reqs=a", "'rediss://there?ssl_cert_reqs=a': Invalid SSL"),
        ("redis://there/demo", "'redis://there/demo': 'demo' is not a database number"),
        ("redis://there/1/2", "'redis://there/1/2': '1/2' is not a database number"),
        ("redis://me:ge/heim@there", "'redis://...@there' is not allowed: special characters"),
        ("redis://me:ge#heim@there", "'redis://...@there' is not allowed: special characters"),
    ],
)
def test_a_bad_url_is_a_configuration_error_that_names_the_key(url: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Client(RedisSettings(url=url))
    assert str(raised.value).startswith(f"redis.url: {said}")
    assert "heim" not in str(raised.value)
    assert "'ge'" not in str(raised.value)


async def test_decoding_options_in_the_url_are_ignored(redis: RedisSettings) -> None:
    client = Client(redis.model_copy(update={"url": redis.url + "?decode_responses=true"}))
    assert await client.call("ECHO", "x") == b"x"
    await client.close()


@pytest.mark.parametrize(
    ("words", "is_passing"),
    [
        ("Script attempted to access a non local key in a cluster node", True),
        ("Attempted to access a non local key in a cluster node script: on @user_script:4.", True),
        ("Script attempted to execute a write command while the cluster is down", True),
        ("Attempted to execute a command while the cluster is down and readonly", True),
        ("The user executing the script can't access at least one of the keys", False),
        ("ACL failure in script: No permissions to access a key script: on @user_script:1", False),
    ],
)
async def test_error_texts_of_every_redis_release_are_understood(
    words: str, is_passing: bool
) -> None:
    """Redis 7 and later ones, and Valkey: of an error inside a script there are only words."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):  # TIME comes first
            await reader.read(1000)
            writer.write(f"-ERR {words}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    mine = Client(RedisSettings(url=f"redis://127.0.0.1:{port}"))
    says = "does not answer" if is_passing else "refuses"
    with pytest.raises(BrokerError, match=says) as raised:
        await mine.call("EVALSHA", "0" * 40, 0)
    assert raised.value.retriable == is_passing
    await mine.close()
    server.close()
    await server.wait_closed()


async def test_a_closed_client_keeps_no_connection(redis: RedisSettings, client: Client) -> None:
    mine = Client(redis, "closing")
    await asyncio.gather(*(mine.call("PING") for _ in range(5)))

    async def connections() -> int:
        listed = await client.call("CLIENT", "LIST")
        return int(listed.count(b"name=closing"))

    assert await connections() == 5
    blocked = asyncio.create_task(mine.call("BLPOP", "nothing", 0.05, wait_s=1))
    await asyncio.sleep(0)
    await mine.close()
    assert await blocked is None  # in use while it was closed: answered, and closed then

    async def none_left() -> bool:
        return await connections() == 0

    await wait_until(none_left)


async def test_partly_executed_command_is_not_repeated_at_another_node() -> None:
    async with Node() as there, Node(get=b"-MOVED 1 127.0.0.1:%d\r\n" % there.port) as here:
        settings = RedisSettings(url=f"redis://127.0.0.1:{here.port}", cluster=True)
        mine = Client(settings)
        mine._place = ("127.0.0.1", here.port)
        with pytest.raises(BrokerError):
            await mine.pipeline([("SET", "a", "1"), ("GET", "b")])
        assert here.asked[-2:] == ["set", "get"]
        assert there.asked == []
        # Alone it changed nothing, and goes where it is sent.
        mine._place = ("127.0.0.1", here.port)
        assert await mine.call("GET", "b") == b"OK"
        assert there.asked[-1] == "get"
        await mine.close()


async def test_connection_to_a_former_master_is_not_kept(redis: RedisSettings) -> None:
    async with Proxy(redis) as proxy:
        mine = Client(proxy.settings)
        await mine.call("PING")
        proxy.answering.clear()
        call = asyncio.create_task(mine.call("PING"))
        await wait_until(lambda: not mine._idle)
        mine._forget()  # meanwhile another call found that the node is another
        proxy.answering.set()
        assert await call == b"PONG"
        assert mine._idle == []
        assert await mine.call("PING") == b"PONG"
        assert proxy.connections == 2
        await mine.close()
