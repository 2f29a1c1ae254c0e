"""Sentinels name the master: the client finds it, and finds another one after a fail-over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import SecretStr

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.rights import PARTS, ROLES
from fedstream.broker.settings import SentinelSettings
from fedstream.core.errors import BrokerError, Unavailable
from fedstream.operate import acl
from tests.broker.pipeline import another_master, finished, pipeline, reached
from tests.broker.servers import Redis, redis, redis_7, said, until
from tests.support import wait_until

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(redis_7() is None, reason="no redis-server that is also a sentinel"),
]

NAME = "fedstream"
KEYS = Keys("watched")


@dataclass
class Pair:
    """A master, its replica, and who watches them."""

    master: Redis
    replica: Redis
    sentinels: list[Redis]

    def fail_over(self) -> None:
        """The master dies, and the sentinels soon think so."""
        self.master.kill()
        # Not before: on a machine that is busy a master that lives can be silent for long.
        for one in self.sentinels:
            soon = ("SENTINEL", "SET", NAME, "down-after-milliseconds", "500")
            assert said(one.port, *soon) == b"+OK\r\n"

    def settings(self, role: str) -> RedisSettings:
        """As the configuration of a role has it."""
        nodes = tuple(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return RedisSettings(
            url="redis://",
            username=role,
            password=SecretStr(f"of-{role}"),
            sentinel=SentinelSettings(nodes=nodes),
            timeout_s=5.0,
        )


@contextmanager
def pair(folder: Path) -> Iterator[Pair]:
    """Everybody is a user of `fedstream acl`, replica and sentinels too."""
    given = {f"FEDSTREAM_PASSWORD_{role.upper()}": f"of-{role}" for role in (*ROLES, *PARTS)}
    users = folder / "users.acl"
    acl.write(users, acl.file_of(KEYS.name, given))
    as_replica = (
        "--aclfile",
        str(users),
        "--masteruser",
        "replica",
        "--masterauth",
        "of-replica",
        "--repl-diskless-sync-delay",
        "0",
    )
    with ExitStack() as stack:
        master = stack.enter_context(redis(folder / "master", *as_replica))
        replica = stack.enter_context(
            redis(folder / "replica", *as_replica, "--replicaof", "127.0.0.1", str(master.port))
        )
        sentinels = [stack.enter_context(sentinel(folder / f"s{n}", master.port)) for n in range(3)]
        for one in sentinels:
            told = b"num-other-sentinels\r\n$1\r\n2"
            until(
                lambda: told in said(one.port, "SENTINEL", "MASTER", NAME),  # noqa: B023
                "sentinels that know each other",
            )
            until(
                lambda: b"num-slaves\r\n$1\r\n1" in said(one.port, "SENTINEL", "MASTER", NAME),  # noqa: B023
                "sentinels that know the replica",
            )
        yield Pair(master, replica, sentinels)


@contextmanager
def sentinel(folder: Path, master: int) -> Iterator[Redis]:
    folder.mkdir(parents=True)
    file = folder / "sentinel.conf"
    file.write_text(
        f"sentinel monitor {NAME} 127.0.0.1 {master} 2\n"
        f"sentinel down-after-milliseconds {NAME} 60000\n"
        f"sentinel failover-timeout {NAME} 3000\n"
        f"sentinel auth-user {NAME} sentinel\n"
        f"sentinel auth-pass {NAME} of-sentinel\n"
    )
    binary = redis_7()
    assert binary is not None
    server = Redis(binary, folder, str(file), "--sentinel")
    try:
        server.listens()
        # One that was itself held up for 2 s, on a busy machine, would do nothing for 30 s.
        assert said(server.port, "SENTINEL", "DEBUG", "tilt-trigger", "60000") == b"+OK\r\n"
        yield server
    finally:
        server.end()


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Pair]:
    with pair(tmp_path) as made:
        yield made


@pytest.fixture
async def client(there: Pair) -> AsyncIterator[Client]:
    client = Client(there.settings("operator"), "test")
    yield client
    await client.close()


async def test_run_continues_when_the_master_dies(
    there: Pair, client: Client, tmp_path: Path
) -> None:
    """The replica may be a moment behind: the updater publishes again, what was lost is counted."""
    sets = ("run.versions=100", "devices.latency={kind='fixed', mean_s=0.02}")
    async with pipeline(KEYS, there.settings, tmp_path, *sets) as services:
        await services.start("trainer", "trainer-1")
        await services.start("trainer", "trainer-2")
        await reached(client, KEYS, 20)
        assert client.address.endswith(str(there.master.port))
        there.fail_over()
        await another_master(client)
        assert client.address.endswith(str(there.replica.port))
        assert client.reconnects == 1
        view = await finished(client, KEYS)
        assert view.outcomes["applied"] == view.head.version == 100
        assert view.outcomes["refused"] == view.outcomes["dead"] == 0


@asynccontextmanager
async def naming(master: list[Redis]) -> AsyncIterator[RedisSettings]:
    """A sentinel that says what we want: the first of the list is the master."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while b"sentinel" in (await reader.read(1000)).lower():
            port = str(master[0].port)
            writer.write(f"*2\r\n$9\r\n127.0.0.1\r\n${len(port)}\r\n{port}\r\n".encode())
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    node = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield RedisSettings(url="redis://", sentinel=SentinelSettings(nodes=(node,)), timeout_s=5.0)
    server.close()
    await server.wait_closed()


async def test_demoted_master_is_abandoned(tmp_path: Path) -> None:
    """Nobody died: the connections are as good as ever, but the node takes no writes."""
    with redis(tmp_path / "one") as one, redis(tmp_path / "two") as two:
        master = [one]
        async with naming(master) as settings:
            client = Client(settings)
            await client.call("XADD", "s", "*", "m", 1)
            waiting = asyncio.create_task(
                client.call("XREAD", "BLOCK", 20_000, "STREAMS", "s", "$", wait_s=20)
            )
            await wait_until(lambda: b"blocked_clients:1" in said(one.port, "INFO", "clients"))
            assert said(one.port, "REPLICAOF", "127.0.0.1", str(two.port)) == b"+OK\r\n"
            with pytest.raises(Unavailable, match="UNBLOCKED"):
                await waiting
            # The sentinel does not know yet: the node itself says what it is.
            with pytest.raises(Unavailable, match="not a master but a slave"):
                await client.call("SET", "a", 1)
            master[0] = two
            assert await client.call("SET", "a", 1) == b"OK"
            assert said(two.port, "GET", "a") == b"$1\r\n1\r\n"
            # With a connection that was idle meanwhile it is the write that finds out.
            assert said(two.port, "REPLICAOF", "127.0.0.1", str(one.port)) == b"+OK\r\n"
            assert said(one.port, "REPLICAOF", "NO", "ONE") == b"+OK\r\n"
            with pytest.raises(Unavailable, match="read only replica"):
                await client.call("SET", "a", 2)
            master[0] = one
            assert await client.call("SET", "a", 2) == b"OK"
            await client.close()


async def test_sentinel_answers_are_checked(there: Pair, client: Client) -> None:
    settings = there.settings("operator")
    watching = settings.sentinel
    assert watching is not None

    def told(**changes: object) -> Client:
        sentinel = watching.model_copy(update=changes)
        return Client(settings.model_copy(update={"sentinel": sentinel}))

    with pytest.raises(Unavailable, match=r"the master 'another' \(redis\.sentinel\.master\)"):
        await told(master="another").call("PING")
    there.sentinels[0].kill()
    assert await client.call("PING") == b"PONG"  # the others are asked
    for one in there.sentinels[1:]:
        assert said(one.port, "ACL", "SETUSER", "default", ">watch") == b"+OK\r\n"
    knowing = told(nodes=watching.nodes[1:], password=SecretStr("watch"))
    assert await knowing.call("PING") == b"PONG"
    await knowing.close()
    with pytest.raises(BrokerError, match="refuses") as raised:
        await told(nodes=watching.nodes[1:]).call("PING")
    assert not raised.value.retriable
    for one in there.sentinels:
        one.kill()
    with pytest.raises(Unavailable, match="is unknown to 127"):
        await told().call("PING")
