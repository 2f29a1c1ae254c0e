"""Redis out of memory while a run is going on: all wait, nobody ends, and then all go on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from tests.broker.pipeline import finished, pipeline, reached
from tests.broker.servers import redis, redis_7
from tests.support import EveryRole, full, wait_until

pytestmark = [pytest.mark.process, pytest.mark.skipif(redis_7() is None, reason="no Redis 7")]
KEYS = Keys("full")
SLOW = "devices.latency={kind='fixed', mean_s=0.02}"
MODEL_BYTES = 4 * 4 << 14  # of tests.broker.pipeline:wide


@pytest.fixture
def own(tmp_path: Path) -> Iterator[RedisSettings]:
    """A Redis for this test alone: its memory is."""
    with redis(tmp_path / "redis") as server:
        yield RedisSettings(url=f"redis://127.0.0.1:{server.port}/0")


@pytest.fixture
async def client(own: RedisSettings) -> AsyncIterator[Client]:
    client = Client(own, "test")
    yield client
    await client.close()


async def test_every_service_waits_for_memory_and_recovers(
    own: RedisSettings, client: Client, tmp_path: Path
) -> None:
    sets = ("run.versions=60", "evaluator.every=1", SLOW)
    async with pipeline(KEYS, lambda _role: own, tmp_path, *sets) as services:
        await services.start("trainer", "trainer-1")
        await reached(client, KEYS, 10)
        async with full(client):
            await services.start("trainer", "trainer-2")  # one that comes just now
            for name in ("trainer-1", "updater", "trainer-2"):
                await wait_until(lambda: services.retries(name))  # noqa: B023
            stands = await EveryRole(client, KEYS, "test").look()
            assert not services.ended()
        view = await finished(client, KEYS)
        assert view.head.version == 60 > stands.head.version
        assert view.outcomes["applied"] == 60
        assert view.outcomes["refused"] == view.outcomes["dead"] == 0
        await wait_until(lambda: not services.waiting())


async def test_run_continues_within_its_memory(
    own: RedisSettings, client: Client, tmp_path: Path
) -> None:
    """Sixteen models are to be kept, but there is room for twelve: older ones go, often."""
    sets = ("run.versions=30", "task.name=tests.broker.pipeline:wide", "journal.sync=always")
    ledger = EveryRole(client, KEYS, "test")
    await ledger.prepare()  # what scripts take is no room for models
    used, _ = await ledger.memory()
    await client.call("CONFIG", "SET", "maxmemory", used + 12 * MODEL_BYTES)
    async with pipeline(KEYS, lambda _role: own, tmp_path, *sets) as services:
        await services.start("trainer", "trainer-1")
        view = await finished(client, KEYS)
        assert view.run.layout.nbytes == MODEL_BYTES
        assert view.outcomes["applied"] == 30
        assert view.outcomes["refused"] == view.outcomes["dead"] == 0
        assert services.retries("updater") + services.retries("trainer-1")
        assert not services.ended()
