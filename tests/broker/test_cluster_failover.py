"""A cluster whose masters have replicas: when one takes over, the run goes on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis.crc import key_slot

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from tests.broker.pipeline import another_master, finished, pipeline, reached
from tests.broker.servers import PATIENT_MS, SLOTS, Shards, cluster, redis_7, said, until

pytestmark = [pytest.mark.process, pytest.mark.skipif(redis_7() is None, reason="no Redis 7")]

KEYS = Keys("sharded")


class Shard:
    """The nodes that have the run's slot."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        number = key_slot(KEYS.prefix.encode()) * len(shards.masters) // SLOTS
        self.master, self.replica = shards.masters[number], shards.replicas[number]
        beside = next(one for one in shards.masters if one is not self.master)
        self.settings = RedisSettings(
            url=f"redis://127.0.0.1:{beside.port}", cluster=True, timeout_s=5.0
        )

    def fail_over(self) -> None:
        """The master dies; the others agree that it has, and on its successor."""
        self.master.kill()
        # Not before: on a machine that is busy a master that lives can be silent for long.
        asked = ("CONFIG", "SET", "cluster-replica-no-failover", "no")
        assert said(self.replica.port, *asked) == b"+OK\r\n"
        self.shards.wait(500)

    def part(self) -> None:
        """From now on the replica hears nothing of its master."""
        # It can't log in any more.
        assert said(self.replica.port, "CONFIG", "SET", "masterauth", "wrong") == b"+OK\r\n"
        assert said(self.master.port, "CLIENT", "KILL", "TYPE", "replica") == b":1\r\n"
        until(
            lambda: b"master_link_status:down" in said(self.replica.port, "INFO", "replication"),
            "a replica that hears nothing",
        )


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    # One that was parted for long may follow its master all the same.
    waits = ("--cluster-replica-no-failover", "yes", "--cluster-replica-validity-factor", "0")
    with cluster(tmp_path / "cluster", *waits, replicas=True) as made:
        yield Shard(made)


@pytest.fixture
async def client(shard: Shard) -> AsyncIterator[Client]:
    client = Client(shard.settings, "test")
    client.bind(KEYS.prefix)
    yield client
    await client.close()


async def test_run_continues_when_its_slots_master_dies(
    shard: Shard, client: Client, tmp_path: Path
) -> None:
    """The replica lags: the updater publishes its newest version and the counts again."""
    sets = ("run.versions=120", "devices.latency={kind='fixed', mean_s=0.02}")
    async with pipeline(KEYS, lambda _role: shard.settings, tmp_path, *sets) as services:
        await services.start("trainer", "trainer-1")
        await services.start("trainer", "trainer-2")
        await reached(client, KEYS, 20)
        assert client.address == f"127.0.0.1:{shard.master.port}"
        shard.part()
        await reached(client, KEYS, 50)
        shard.fail_over()
        await another_master(client)
        shard.shards.wait(PATIENT_MS)
        assert client.address == f"127.0.0.1:{shard.replica.port}"
        assert client.reconnects == 1
        view = await finished(client, KEYS)
        assert view.outcomes["applied"] == view.head.version == 120
        assert view.outcomes["refused"] == view.outcomes["dead"] == 0
        assert services.ended() == []
