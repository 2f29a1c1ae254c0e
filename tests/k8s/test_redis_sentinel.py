"""Components redis-sentinel and redis-tls: masters are killed and hand over, the run goes on."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest

from fedstream.broker.client import Client
from fedstream.broker.errors import FedstreamError
from fedstream.broker.keys import Keys
from fedstream.broker.ledger import Ledger
from fedstream.broker.settings import RedisSettings, TlsSettings
from tests.k8s.cluster import Cluster, Pod
from tests.k8s.cluster.image import Image
from tests.k8s.policy.targets import kustomized
from tests.k8s.tls import redis_tls
from tests.support import wait_until

pytestmark = [pytest.mark.k8s, pytest.mark.timeout(900)]

OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: fedstream
resources: [K8S/overlays/dev]
components: [K8S/components/redis-sentinel, K8S/components/redis-tls]
configMapGenerator:
  - {name: fedstream-settings, behavior: merge, literals: [FEDSTREAM_RUN__VERSIONS=1000000]}
secretGenerator:
  - {name: fedstream-redis, behavior: merge, literals: [replica=r, sentinel=s, watch=w]}
"""


NODES = [f"sentinel-{number}.sentinels:26379" for number in range(3)]


async def test_a_run_outlives_its_masters(tmp_path: Path, images: dict[str, Image]) -> None:
    """One is killed and comes back empty; then all are rolled, and the master hands over."""
    async with Cluster(tmp_path / "cluster", images) as cluster:
        certificate, ca = redis_tls(tmp_path, cluster)
        tls = TlsSettings(ca=str(ca))
        await cluster.apply([*kustomized(OVERLAY), certificate])
        await cluster.settled()
        nodes = tuple(cluster.here(node) for node in NODES)
        sentinel = Client(RedisSettings(url=f"rediss://watch:w@{nodes[1]}", tls=tls))
        redis = Client(
            RedisSettings.model_validate(
                {
                    "url": "rediss://",
                    "tls": tls,
                    "username": "operator",
                    "password": "dev-operator",
                    "sentinel": {"nodes": nodes, "username": "watch", "password": "w"},
                }
            )
        )
        ledger = Ledger(redis, Keys("demo"), "test")

        async def named() -> str:
            """The master's address, as the sentinels have it; its pod may just be gone."""
            address, _ = await sentinel.call("SENTINEL", "get-master-addr-by-name", "fedstream")
            return str(address.decode())

        async def master() -> Pod:
            """Whom the sentinels name."""
            address = await named()
            return next(pod for pod in cluster["redis"].pods if pod.address == address)

        async def another(than: Pod) -> bool:
            return await named() != than.address

        async def version(least: int) -> int:
            """The newest, once it is at least so high; meanwhile Redis may be away."""
            async with asyncio.timeout(120):
                while True:
                    with suppress(FedstreamError):
                        head = await ledger.head()
                        if head is not None and head.version >= least:
                            return head.version
                    await asyncio.sleep(0.1)

        first = await master()
        assert first.name == "redis-0"
        before = await version(20)
        first.kill()
        await wait_until(lambda: another(first), timeout=120, what="a replica takes over")
        before = await version(before + 20)
        await cluster.settled()
        second = await master()
        await cluster.restart("redis")
        await wait_until(lambda: another(second), timeout=120, what="the master hands over")
        await cluster.settled("redis")
        await version(before + 20)
        await cluster.settled()
        restarts = {
            pod.name: pod.restarts for name in ("coordinator", "updater", "trainer")
            for pod in cluster[name].pods
        }  # fmt: skip
        await redis.close()
        await sentinel.close()
    assert set(restarts.values()) == {0}, "nobody ends for want of Redis"
