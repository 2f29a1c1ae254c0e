"""A cluster: one run, one slot, one node; and the way there when it is another one.

That everything else holds on a cluster too is the contract that this folder's other tests are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.discovery import Cluster, Sentinels
from fedstream.broker.keys import Keys
from fedstream.broker.settings import SentinelSettings
from fedstream.core.errors import BrokerError, Unavailable
from tests.broker.pipeline import finished, pipeline, reached
from tests.broker.servers import redis_7, said
from tests.support import EveryRole, Hand, wait_until

pytestmark = pytest.mark.skipif(redis_7() is None, reason="no Redis 7")


class Slot:
    """The slot of a run, and how it is moved."""

    def __init__(self, ports: list[int], keys: Keys) -> None:
        self.number = key_slot(keys.prefix.encode())
        self._keys = keys
        self._ports = ports
        self._ids = {
            port: said(port, "CLUSTER", "MYID").split(b"\r\n")[1].decode() for port in ports
        }
        self.at = next(port for port in ports if self._owns(port))
        self.to = next(port for port in ports if port != self.at)

    def _owns(self, port: int) -> bool:
        return not said(port, "EXISTS", self._keys.run).startswith(b"-MOVED")

    def begin(self) -> None:
        """From now on what is not there yet belongs to the other node."""
        slot = str(self.number)
        assert (
            said(self.to, "CLUSTER", "SETSLOT", slot, "IMPORTING", self._ids[self.at]) == b"+OK\r\n"
        )
        assert (
            said(self.at, "CLUSTER", "SETSLOT", slot, "MIGRATING", self._ids[self.to]) == b"+OK\r\n"
        )

    def move(self, *only: str) -> None:
        """Moves what there is."""
        while True:
            found = said(self.at, "CLUSTER", "GETKEYSINSLOT", str(self.number), "100").decode()
            names = only or re.findall(r"fedstream:\S+", found)
            if not names:
                return
            migrate = ("MIGRATE", "127.0.0.1", str(self.to), "", "0", "5000", "KEYS", *names)
            assert said(self.at, *migrate) == b"+OK\r\n"
            if only:
                return

    def end(self) -> None:
        """Now it is the other node's."""
        for port in (self.to, *self._ports):
            assert (
                said(port, "CLUSTER", "SETSLOT", str(self.number), "NODE", self._ids[self.to])
                == b"+OK\r\n"
            )
        self.at, self.to = self.to, self.at


@pytest.fixture
def settings(nodes: list[int]) -> RedisSettings:
    return RedisSettings(url=f"redis://127.0.0.1:{nodes[0]}", cluster=True, timeout_s=5.0)


@pytest.fixture
async def client(settings: RedisSettings) -> AsyncIterator[Client]:
    client = Client(settings, "test")
    yield client
    await client.close()


@pytest.fixture
async def keys(client: Client) -> AsyncIterator[Keys]:
    keys = Keys("moving")
    client.bind(keys.prefix)
    yield keys
    await EveryRole(client, keys, "test").purge()


async def test_keyless_commands_go_to_the_runs_node(
    settings: RedisSettings, nodes: list[int]
) -> None:
    places = set()
    for name in "abcdefghij":
        keys = Keys(name)
        client = Client(settings)
        EveryRole(client, keys, "test")
        assert await client.call("PING") == b"PONG"
        slot = Slot(nodes, keys)
        assert client.address == f"127.0.0.1:{slot.at}"
        places.add(client.address)
        await client.close()
    assert len(places) == 3


async def test_client_finds_the_node_by_the_first_key(
    settings: RedisSettings, client: Client, keys: Keys
) -> None:
    stranger = Client(settings)
    assert await stranger.call("SET", keys.run, "x") == b"OK"
    assert await client.call("GET", keys.run) == b"x"
    await stranger.pipeline([("MULTI",), ("SET", keys.run, "y"), ("GET", keys.run), ("EXEC",)])
    assert stranger.address == client.address
    await stranger.close()


async def test_client_without_cluster_setting_says_what_to_do(nodes: list[int], keys: Keys) -> None:
    other = next(port for port in nodes if port != Slot(nodes, keys).at)
    plain = Client(RedisSettings(url=f"redis://127.0.0.1:{other}"))
    with pytest.raises(BrokerError, match=r"node of a cluster: set redis\.cluster = true"):
        await plain.call("GET", keys.run)
    await plain.close()


async def test_cluster_setting_without_a_cluster_is_an_error(any_redis: RedisSettings) -> None:
    client = Client(RedisSettings(url=any_redis.url, cluster=True))
    with pytest.raises(BrokerError, match="cluster support disabled") as raised:
        await client.call("PING")
    assert not raised.value.retriable


async def test_steps_are_atomic_while_the_slot_moves(
    client: Client, keys: Keys, nodes: list[int]
) -> None:
    hand = Hand(client, keys, EveryRole(client, keys, "test"))
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger)
    [entry] = await hand.said(upload)
    slot = Slot(nodes, keys)
    slot.begin()
    assert await client.call("HGET", keys.head, "version") == b"0"  # what is there is there
    assert await client.call("SET", keys.workspace("pool", "new"), "x") == b"OK"  # by ASK
    assert await client.call("GET", keys.workspace("pool", "new")) == b"x"
    await client.pipeline([("MULTI",), ("SET", keys.workspace("pool", "more"), "y"), ("EXEC",)])
    slot.move(keys.run, keys.head)
    with pytest.raises(Unavailable):  # it only reads those two, and would write others before
        await hand.ledger.admit(entry, upload, size_limit=1 << 20)
    assert await client.call("XLEN", keys.inbox("pool")) == 1
    with pytest.raises(Unavailable):
        await client.call("DEL", keys.run, keys.open)  # TRYAGAIN
    slot.move()
    slot.end()
    assert await hand.ledger.admit(entry, upload, size_limit=1 << 20) == ("admitted", "")
    assert client.address == f"127.0.0.1:{slot.at}"
    assert (
        await client.call("UNLINK", keys.workspace("pool", "new"), keys.workspace("pool", "more"))
        == 2
    )
    await hand.balanced()


async def test_moving_owners_stream_leaves_triggers_and_register_unchanged(
    client: Client, keys: Keys, nodes: list[int]
) -> None:
    """Its name is put together inside the script, where Redis can't look at it before."""
    hand = Hand(client, keys, EveryRole(client, keys, "test"))
    await hand.create()
    await hand.announce("ann", 3)
    await hand.tasks.ensure()
    for named in (keys.rates, keys.admitted):  # what is declared is there
        await client.call("HSET", named, "somebody", "1")
    await client.call("ZADD", keys.ended, 0, "sometime")
    await hand.request(device=3)
    slot = Slot(nodes, keys)
    slot.begin()  # the stream is not there yet: from now on it is the other node's
    with pytest.raises(Unavailable):
        await hand.dispatch()
    with pytest.raises(Unavailable):
        await hand.open(device=3)
    assert await client.call("HGET", keys.counts, "issued") == b"1"
    with pytest.raises(Unavailable):
        await hand.ledger.leave(b"ann")
    assert await client.call("XLEN", keys.triggers) == 1
    assert await client.call("ZCARD", keys.alive) == 1
    slot.move()
    slot.end()
    assert await hand.ledger.leave(b"ann") == 0


async def test_run_continues_when_its_slot_moves(
    settings: RedisSettings, client: Client, keys: Keys, nodes: list[int], tmp_path: Path
) -> None:
    sets = ("run.versions=60", "devices.latency={kind='fixed', mean_s=0.02}")
    async with pipeline(keys, lambda _role: settings, tmp_path, *sets) as services:
        await services.start("trainer", "trainer-1")
        await reached(client, keys, 10)
        slot = Slot(nodes, keys)
        slot.begin()
        await asyncio.to_thread(slot.move)
        slot.end()
        view = await finished(client, keys)
        assert client.address == f"127.0.0.1:{slot.at}"
        assert view.outcomes["applied"] == view.head.version == 60
        assert view.outcomes["refused"] == view.outcomes["dead"] == 0


async def test_cluster_outage_is_waited_out(client: Client, keys: Keys, nodes: list[int]) -> None:
    slot = Slot(nodes, keys)
    beside = next(
        number
        for number in (slot.number + 1, slot.number - 1)
        if b"MOVED" not in said(slot.at, "CLUSTER", "COUNTKEYSINSLOT", str(number))
    )
    assert said(slot.at, "CLUSTER", "DELSLOTS", str(beside)) == b"+OK\r\n"
    try:

        async def down() -> bool:
            try:
                await client.call("SET", keys.run, "x")
            except Unavailable as error:
                return "down" in str(error)
            return False

        await wait_until(down)
    finally:
        assert said(slot.at, "CLUSTER", "ADDSLOTS", str(beside)) == b"+OK\r\n"

    async def up() -> bool:
        try:
            return bool(await client.call("SET", keys.run, "x") == b"OK")
        except Unavailable:
            return False

    await wait_until(up)


# what nodes say, without any


async def test_all_configured_nodes_are_tried() -> None:
    asked = []

    async def ask(node: tuple[str, int], _question: tuple[str, ...]) -> object:
        asked.append(node)
        if node == ("a", 1) and len(asked) > 1:
            raise Unavailable("gone")
        rows = [[0, 99, [b"", 1, b"id"]], [100, 16383, [b"b", 2, b"id"], [b"c", 3, b"id"]]]
        return rows if len(asked) < 4 else []

    cluster = Cluster(("a", 1))
    assert await cluster.find(ask) == ("a", 1)  # any will do, and one that says no name is itself
    cluster.slot = 100
    assert await cluster.find(ask) == ("b", 2)
    assert asked == [("a", 1), ("a", 1), ("b", 2)]
    with pytest.raises(Unavailable, match="the node of slot 100 is unknown to b:2, "):
        await cluster.find(ask)


async def test_unresponsive_nodes_do_not_hide_the_one_that_knows() -> None:
    """An attempt has its time-out: the next one goes on behind those that took it."""
    asked = []

    async def ask(node: tuple[str, int], _question: tuple[str, ...]) -> object:
        asked.append(node[0])
        if node[0] != "c":
            raise asyncio.CancelledError  # the time-out of the whole exchange
        return [b"m", b"1"]

    sentinels = Sentinels(SentinelSettings(nodes=("a", "b", "c")))
    for _ in "ab":
        with pytest.raises(asyncio.CancelledError):
            await sentinels.find(ask)
    assert await sentinels.find(ask) == ("m", 1)
    assert asked == ["a", "b", "c"]
    assert await sentinels.find(ask) == ("m", 1)
    assert asked[3:] == ["c"]


async def test_nodes_that_left_the_cluster_are_forgotten() -> None:
    masters = [b"b", b"c", b"d"]

    async def ask(_node: tuple[str, int], _question: tuple[str, ...]) -> object:
        return [[0, 16383, [masters.pop(0), 2, b"id"]]]

    cluster = Cluster(("a", 1))
    for _ in range(3):
        await cluster.find(ask)
    assert cluster.nodes == [("a", 1), ("d", 2)]


async def test_sentinels_that_all_refuse_are_not_an_outage() -> None:
    async def ask(node: tuple[str, int], _question: tuple[str, ...]) -> object:
        raise BrokerError(f"{node[0]} refuses")

    sentinels = Sentinels(SentinelSettings(nodes=("a", "[::1]:7")))
    assert sentinels.nodes == [("a", 26379), ("::1", 7)]
    with pytest.raises(BrokerError, match="a refuses") as raised:
        await sentinels.find(ask)
    assert not raised.value.retriable
