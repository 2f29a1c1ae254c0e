"""Component redis-aof at work: Redis is deleted and killed, and no open task is lost with it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from fedstream.broker.client import Client
from fedstream.broker.errors import FedstreamError
from fedstream.broker.keys import Keys
from fedstream.broker.records import View
from fedstream.broker.settings import RedisSettings
from tests.k8s.cluster import Cluster
from tests.k8s.cluster.image import Image
from tests.k8s.policy.targets import kustomized
from tests.support import EveryRole

pytestmark = [pytest.mark.process, pytest.mark.k8s, pytest.mark.timeout(900)]

OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: fedstream
resources: [K8S/overlays/dev]
components: [K8S/components/redis-aof]
configMapGenerator:
  - {name: fedstream-settings, behavior: merge, literals: [FEDSTREAM_RUN__VERSIONS=1000000]}
"""


async def test_a_redis_that_comes_back_has_what_it_had(
    tmp_path: Path, images: dict[str, Image]
) -> None:
    """What scripts wrote is loaded too, though `default`, with whose rights it is, is off."""
    async with Cluster(tmp_path / "cluster", images) as cluster:
        await cluster.apply(kustomized(OVERLAY))
        await cluster.settled()
        redis = Client(
            RedisSettings.model_validate(
                {
                    "url": cluster.here("redis://redis:6379/0"),
                    "username": "operator",
                    "password": "dev-operator",
                }
            )
        )
        ledger = EveryRole(redis, Keys("demo"), "test")

        async def view(least: int) -> View:
            """The run, once it has that version; before, Redis may be away or without it."""
            async with asyncio.timeout(120):
                while True:
                    with suppress(FedstreamError):
                        seen = await ledger.look()
                        if seen.head.version >= least:
                            return seen
                    await asyncio.sleep(0.1)

        before = await view(20)
        for kill in (False, True):
            [pod] = cluster["redis"].pods
            if kill:
                pod.kill()
                await cluster.until(
                    lambda: not cluster["redis"].pods[0].ready, what="Redis is killed"
                )
            else:
                pod.delete()
                await cluster.until(pod.gone.is_set, what="Redis is deleted")
            await cluster.settled()
            before = await view(before.head.version + 20)
            assert before.outcomes["given_up"] == 0, f"lost with Redis, {kill=}"
        [updater] = cluster["updater"].pods
        log = updater.containers[0].container.log.read_text()
        await redis.close()
    assert "Redis lost versions" not in log
