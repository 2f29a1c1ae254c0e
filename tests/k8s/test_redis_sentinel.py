"""Components redis-sentinel and redis-tls: masters are killed and hand over, the run goes on."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from fedstream.broker.client import Client
from fedstream.broker.errors import FedstreamError
from fedstream.broker.keys import Keys
from fedstream.broker.settings import RedisSettings, TlsSettings
from tests.k8s.cluster import Cluster, Pod
from tests.k8s.cluster.image import Image
from tests.k8s.policy.targets import kustomized
from tests.k8s.tls import redis_tls
from tests.support import EveryRole

pytestmark = [pytest.mark.process, pytest.mark.k8s, pytest.mark.timeout(900)]

OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: fedstream
resources: [K8S/overlays/dev]
components: [K8S/components/redis-sentinel, K8S/components/redis-tls]
configMapGenerator:
  - name: fedstream-settings
    behavior: merge
    literals:
      - FEDSTREAM_RUN__VERSIONS=1000000
      - FEDSTREAM_DEVICES__LATENCY={kind = "fixed", mean_s = 0.2}  # else trainers take all cores
secretGenerator:
  - {name: fedstream-redis, behavior: merge, literals: [replica=r, sentinel=s, watch=w]}
"""


NODES = [f"sentinel-{number}.sentinels:26379" for number in range(3)]


async def test_run_survives_its_masters(tmp_path: Path, images: dict[str, Image]) -> None:
    """One is killed; then all are rolled, and the master hands over.

    The one that is killed comes back empty while no Sentinel answers.
    """
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(tmp_path / "cluster", images))
        certificate, ca = redis_tls(tmp_path, cluster)
        tls = TlsSettings(ca=str(ca))
        await cluster.apply([*kustomized(OVERLAY), certificate])
        await cluster.settled()
        nodes = tuple(cluster.here(node) for node in NODES)
        sentinels = [
            Client(RedisSettings(url=f"rediss://sentinel:s@{node}", tls=tls)) for node in nodes
        ]
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
        for client in (*sentinels, redis):
            stack.push_async_callback(client.close)
        ledger = EveryRole(redis, Keys("demo"), "test")

        async def named() -> str:
            """The master's address, as the sentinels have it; its pod may just be gone."""
            address, _ = await sentinels[1].call("SENTINEL", "get-master-addr-by-name", "fedstream")
            return str(address.decode())

        async def master() -> Pod:
            """Whom the sentinels name."""
            address = await named()
            return next(pod for pod in cluster["redis"].pods if pod.address == address)

        async def another(than: Pod) -> bool:
            return await named() != than.address

        async def know_replicas() -> bool:
            """Whether every Sentinel knows the master's two replicas."""
            asked = ("SENTINEL", "replicas", "fedstream")
            return all([len(await client.call(*asked)) == 2 for client in sentinels])

        async def newest(least: int) -> int:
            """The newest version if it is at least so high, else 0; Redis may be away."""
            with suppress(FedstreamError):
                head = await ledger.head()
                if head is not None and head.version >= least:
                    return head.version
            return 0

        async def version(least: int) -> int:
            """The newest, once it is at least so high."""
            return int(await cluster.until(lambda: newest(least), what=f"version {least}"))

        first = await master()
        assert first.name == "redis-0"
        before = await version(5)
        # They ask the master every 10 s; until they know its replicas, they can promote none.
        await cluster.until(know_replicas, what="every Sentinel knows both replicas")
        for client in sentinels:  # else one that was stopped does nothing for 30 s
            await client.call("SENTINEL", "DEBUG", "tilt-trigger", "600000")
        with stopped(cluster["sentinel"].pods):
            first.kill()
            await cluster.until(lambda: len(told(first)) > 1, what="start.sh decides")
        assert "waiting for another" in told(first)[1], "it began as an empty master"
        await cluster.until(lambda: another(first), what="a replica takes over")
        before = await version(before + 5)
        await cluster.settled()
        assert f"{first.address}: master is {first.address}" not in told(first)[1:], (
            "it lost the data"
        )
        second = await master()
        await cluster.restart("redis")
        await cluster.until(lambda: another(second), what="the master hands over")
        await cluster.settled("redis")
        await version(before + 5)
        await cluster.settled()
        restarts = {
            pod.name: pod.restarts for name in ("coordinator", "updater", "trainer")
            for pod in cluster[name].pods
        }  # fmt: skip
    assert set(restarts.values()) == {0}, "nobody ends for want of Redis"


@contextmanager
def stopped(pods: list[Pod]) -> Iterator[None]:
    """Their processes stand still: they take connections and never answer."""
    running = [one.running for pod in pods for one in pod.containers if one.running]
    for each in running:
        each.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for each in running:
            each.signal(signal.SIGCONT)


def told(pod: Pod) -> list[str]:
    """What start.sh said of the master, each time that Redis was started."""
    lines = pod.containers[0].container.log.read_text(errors="replace").splitlines()
    return [line for line in lines if line.startswith(f"{pod.address}: ")]
