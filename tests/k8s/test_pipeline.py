"""The manifests at work: a run goes on while pods come, go, are replaced and are killed.

The overlay production-aof runs as it is rendered, with a Secret made beforehand; only settings are
added: a run that lasts as long as the test, and devices that take a while.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.settings import RedisSettings
from tests.chaos.account import accounted
from tests.chaos.checks import complaints
from tests.chaos.history import gathered, replayed
from tests.chaos.watcher import Watcher
from tests.k8s.cluster import Cluster, Manifest, Manifests, Pod
from tests.k8s.cluster.image import Image
from tests.k8s.cluster.manifests import texts
from tests.k8s.cluster.network import client
from tests.k8s.conftest import Kustomized
from tests.k8s.policy.targets import K8S
from tests.k8s.tls import redis_tls

pytestmark = [pytest.mark.process, pytest.mark.k8s, pytest.mark.timeout(900)]

ROLES = ("coordinator", "scheduler", "updater", "evaluator", "trainer", "operator")
PASSWORDS: Manifest = {
    "apiVersion": "v1", "kind": "Secret",
    "metadata": {"name": "fedstream-redis", "namespace": "fedstream"},
    "stringData": {role: f"password-of-{role}" for role in ROLES},
}  # fmt: skip
TOKEN: Manifest = {
    "apiVersion": "v1", "kind": "Secret",
    "metadata": {"name": "fedstream-http", "namespace": "fedstream"},
    "stringData": {"token": "0123456789abcdef"},
}  # fmt: skip
RUN = "demo"
_PACE_S = 0.02  # of whoever asks all the time

# The manifests' own task, on devices whose every step takes a while.
SLOW_TASK = """
import time
class Slow(Digits):
    def loss(self, model, batch):
        time.sleep(0.15)
        return super().loss(model, batch)
task = Slow
"""


def slow_task() -> str:
    """The task's module."""
    return (K8S / "base" / "task" / "task.py").read_text() + SLOW_TASK


def with_replicas(manifests: Manifests, **replicas: int) -> list[Manifest]:
    """The objects, with another number of some pods to begin with."""
    objects = list(manifests)
    for one in objects:
        if one["kind"] in ("Deployment", "StatefulSet") and one["metadata"]["name"] in replicas:
            one["spec"]["replicas"] = replicas[one["metadata"]["name"]]
    return objects


class Deployment:
    """A cluster with fedstream in it, seen as its operator sees it."""

    def __init__(self, cluster: Cluster, redis: Client, session: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self.client = redis
        self.life = 0  # of Redis: how often it came up
        self.up = asyncio.Event()
        self.watcher = Watcher(self, Keys(RUN))
        self.session = session

    async def get(self, path: str = "") -> dict[str, Any]:
        """What the coordinators' Service says of the run."""
        url = f"{self.cluster.service('coordinator').url}/v1/runs/{RUN}{path}"
        said = {"Authorization": f"Bearer {TOKEN['stringData']['token']}"}
        async with self.session.get(url, headers=said) as answer:
            found: dict[str, Any] = await answer.json()
            assert answer.status == 200, found
            return found

    async def ready(self, *names: str) -> None:
        """Waits until workloads are as they should be."""
        await self.cluster.settled(*names)

    async def versions(self, more: int) -> None:
        """Waits for so many versions more than there are."""
        version = self.watcher.version + more
        await self.cluster.until(lambda: self.watcher.version >= version, what=f"version {version}")

    def redis_is_up(self) -> None:
        """It lives (again), with nothing in it."""
        self.life += 1
        self.up.set()

    def pod(self, name: str) -> Pod:
        """The only pod of a workload."""
        [pod] = self.cluster[name].pods
        return pod


@asynccontextmanager
async def deployed(
    tmp_path: Path, images: Mapping[str, Image], objects: list[Manifest]
) -> AsyncIterator[Deployment]:
    """What the objects make, once Redis is there."""
    async with Cluster(tmp_path / "cluster", images) as cluster, client() as session:
        certificate, ca = redis_tls(tmp_path, cluster)
        await cluster.apply([*objects, TOKEN, certificate])
        await cluster.settled("redis")
        secret = next(
            one for one in objects
            if one["kind"] == "Secret" and one["metadata"]["name"] == "fedstream-redis"
        )  # fmt: skip
        password = texts(secret)["operator"]
        [added] = [
            one["data"] for one in objects
            if one["kind"] == "ConfigMap" and one["metadata"]["name"].startswith("fedstream-sett")
        ]  # fmt: skip
        url = added.get("FEDSTREAM_REDIS__URL", "redis://redis:6379/0")
        settings = RedisSettings.model_validate(
            {"url": cluster.here(url), "username": "operator", "password": password}
            | ({"tls": {"ca": str(ca)}} if url.startswith("rediss") else {})
        )
        redis = Client(settings, "test")
        deployment = Deployment(cluster, redis, session)
        deployment.redis_is_up()
        watching = asyncio.create_task(deployment.watcher.watch())
        try:
            yield deployment
        finally:
            watching.cancel()
            await asyncio.wait({watching})
            await redis.close()
        if not watching.cancelled():
            await watching  # raises what ended it


@asynccontextmanager
async def always_answered(deployment: Deployment) -> AsyncIterator[list[dict[str, Any]]]:
    """Inside the block the run's status is asked for all the time, and always told."""
    told: list[dict[str, Any]] = []

    async def ask() -> None:
        while True:
            told.append(await deployment.get())
            await asyncio.sleep(_PACE_S)

    asking = asyncio.create_task(ask())
    try:
        yield told
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking


def said(pods: list[Pod], line: str) -> int:
    """In how many of these pods' logs a line is."""
    logs = (each.container.log for pod in pods for each in pod.containers)
    return sum(f'"{line}"' in log.read_text() for log in logs if log.exists())


async def test_run_survives_everything_done_to_its_pods(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """Trainers 0, 1, 6, 2, 0; Deployments rolled; updater evicted and killed; Redis restarted."""
    settings = {"RUN__VERSIONS": "100000", "JOURNAL__SEGMENT_VERSIONS": "40"}
    manifests = kustomized("production-aof", task=slow_task(), **settings)
    objects = with_replicas(manifests, trainer=0)
    async with deployed(tmp_path, images, [*objects, PASSWORDS]) as it:
        cluster = it.cluster
        await it.ready()
        await cluster.until(lambda: it.watcher.version == 0, what="the run is there")

        cluster.scale("trainer", 1)
        await it.ready("trainer")
        await it.versions(3)
        old, service = cluster["coordinator"].pods, cluster.service("coordinator")
        del service.ready[:]
        async with always_answered(it):
            await cluster.restart("coordinator")
            await cluster.restart("scheduler")
            await cluster.restart("evaluator")
            cluster.scale("trainer", 6)
            await it.ready("trainer")
            await it.versions(10)
            six = cluster["trainer"].pods
            six[0].kill()  # it comes back under its name, and takes its task again
            cluster.scale("trainer", 2)
            await it.ready()
            await it.versions(5)
        assert not set(old) & set(cluster["coordinator"].pods)
        assert min(service.ready) >= len(old), "never fewer than before"
        assert said(six, "workspace saved") > 0, "each was between two tasks"
        await cluster.until(
            lambda: said(cluster["trainer"].pods, "continuing from a workspace"),
            what="what one began another finishes",
        )

        await cluster.restart("trainer")
        await it.ready("trainer")
        await it.versions(5)

        updater = it.pod("updater")
        updater.delete()
        await cluster.until(updater.gone.is_set, what="the updater is evicted")
        await it.ready("updater")
        assert it.pod("updater") is not updater
        await it.versions(5)
        it.pod("updater").kill()
        await cluster.until(lambda: not it.pod("updater").ready, what="the updater is killed")
        await it.ready("updater")
        assert it.pod("updater").restarts == 1
        await it.versions(5)

        it.up.clear()
        it.pod("redis").kill()
        await cluster.until(lambda: not it.pod("redis").ready, what="Redis is killed")
        await it.ready("redis")
        it.up.set()
        await it.ready()
        await it.versions(5)

        cluster.scale("trainer", 0)
        await it.ready("trainer")

        async def nothing_waits() -> bool:
            about = await it.get()
            return not (about["queue"] or about["inbox"] or about["admitted"])

        await cluster.until(nothing_waits, what="what was uploaded is applied")
        about = await it.get()
        for name in ("scheduler", "updater", "evaluator", "coordinator"):
            cluster.scale(name, 0)
        await it.ready()
        facts = await gathered(
            it.client, Keys(RUN), cluster.claims / "journal-updater-0" / "journal",
            findings=tuple(cluster.findings),
        )  # fmt: skip
    assert complaints(facts) == []
    tasks = about["tasks"]
    assert tasks["issued"] == sum(n for what, n in tasks.items() if what != "issued")
    taken = facts.account.taken
    assert tasks["applied"] == sum(record["outcome"] == "applied" for record in taken)
    assert it.watcher.published <= set(facts.account.made.items())
    assert about["version"] == facts.head[0] > 30
    assert about["digest"] == facts.account.model


class Scaler:
    """What KEDA and its autoscaler come to, at once: a trainer for so much of the number."""

    def __init__(self, scaled: Manifest, it: Deployment) -> None:
        [trigger] = scaled["spec"]["triggers"]
        about = trigger["metadata"]
        assert trigger["type"] == "metrics-api"
        self._it = it
        self._target: str = scaled["spec"]["scaleTargetRef"]["name"]
        self._most: int = scaled["spec"]["maxReplicaCount"]
        self._url = it.cluster.here(about["url"])
        self._where: str = about["valueLocation"]
        self._each, self._wakes_above = (
            float(about[name]) for name in ("targetValue", "activationTargetValue")
        )
        self.replicas = [it.cluster[self._target].replicas]

    async def run(self) -> None:
        """Until it is cancelled. KEDA has no token: the route must need none."""
        while True:
            async with self._it.session.get(self._url) as answer:
                value = (await answer.json())[self._where] if answer.status == 200 else None
            if value is not None:  # else everything stays as it is
                wanted = math.ceil(value / self._each) if value > self._wakes_above else 0
                if (wanted := min(wanted, self._most)) != self.replicas[-1]:
                    self.replicas.append(wanted)
                    self._it.cluster.scale(self._target, wanted)
            await asyncio.sleep(_PACE_S)


async def test_keda_scales_the_pool_beside_a_site(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """Components keda and site: from no trainer to as many as tasks are open, and to none."""
    versions = 40
    settings = {"RUN__VERSIONS": str(versions), "SCHEDULER__POLICY__N": "4", "TASK__DEVICES": "6"}
    manifests = kustomized("dev", "keda", "site", task=slow_task(), **settings)
    secret: Manifest = {
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "fedstream-site-a", "namespace": "fedstream"},
        "stringData": {"password": "password-of-site-a"},
    }  # fmt: skip
    objects = [*with_replicas(manifests, trainer=0), secret]
    async with deployed(tmp_path, images, objects) as it:
        cluster = it.cluster
        scaler = Scaler(manifests.get("ScaledObject", "trainer"), it)
        await it.ready()
        scaling = asyncio.create_task(scaler.run())
        await cluster.until(lambda: it.watcher.version >= 5, what="version 5")
        register = (await it.get())["register"]
        await cluster.until(lambda: it.watcher.version == versions, what="the end of the run")
        await cluster.until(lambda: scaler.replicas[-1] == 0, what="no trainer is needed")
        await it.ready()
        scaling.cancel()
        await asyncio.wait({scaling})
        about, scale = await it.get(), await it.get("/scaling")
        journal = it.pod("updater").inside.folder / "volumes" / "journal" / "journal"
        facts = await gathered(it.client, Keys(RUN), journal, findings=tuple(cluster.findings))
    assert scaler.replicas[0] == scaler.replicas[-1] == 0
    assert max(scaler.replicas) == 4, "as many as tasks are open"
    assert (about["state"], about["version"], scale["open"]) == ("finished", versions, 0)
    owned = {name: about["owns"] for name, about in register.items() if about["owns"]}
    assert sorted(owned.values()) == [[0], [1]]
    assert all("site-a" in name for name in owned)
    uploads = [record["upload"] for record in facts.account.taken]
    own = {upload["device"] for upload in uploads if "site-a" in upload["trainer"]}
    pool = {upload["device"] for upload in uploads if "site-a" not in upload["trainer"]}
    assert own == {0, 1}
    assert pool
    assert not pool & own
    others = [one for one in complaints(facts) if not one.startswith("same_arithmetic")]
    assert others == [], "but for a site's staleness, which counts from what it was handed"


async def test_owners_keep_serving_whatever_redis_and_the_updater_lose(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """Components device-owners and redis-aof, and what overlay dev says of a journal that is lost.

    With its file Redis loses no open task, also where scripts wrote what it loads, though
    `default`, with whose rights it is, is off.
    """
    settings = {"RUN__VERSIONS": "100000", "TASK__DEVICES": "2"}
    manifests = kustomized("dev", "device-owners", "redis-aof", task=slow_task(), **settings)
    async with deployed(tmp_path, images, with_replicas(manifests, owner=2)) as it:
        cluster = it.cluster
        await it.ready()
        await it.versions(5)
        for kill in (False, True):
            redis = it.pod("redis")
            it.up.clear()
            if kill:
                redis.kill()
                await cluster.until(lambda: not it.pod("redis").ready, what="Redis is killed")
            else:
                redis.delete()
                await cluster.until(redis.gone.is_set, what="Redis is deleted")
            await it.ready("redis")
            it.up.set()
            await it.ready()
            await it.versions(5)
            assert (await it.get())["tasks"]["given_up"] == 0, f"lost with Redis, {kill=}"
        updater = it.pod("updater")
        assert said([updater], "Redis lost versions") == 0
        updater.delete()
        await cluster.until(updater.gone.is_set, what="the updater is evicted")
        await it.ready("updater")
        await it.versions(5)
        about = await it.get()
        findings = tuple(cluster.findings)
        journal = it.pod("updater").inside.folder / "volumes" / "journal" / "journal"
        for name in ("owner", "scheduler", "updater"):
            cluster.scale(name, 0)
        await it.ready()
        again, diverged = accounted(journal, None), replayed(journal).diverged
    assert sorted(about["register"]) == ["owner-0", "owner-1"]
    uploads = [record["upload"] for record in again.taken]
    served = {(upload["trainer"], upload["device"]) for upload in uploads}
    assert served == {("owner-0", 0), ("owner-1", 1)}
    assert min(again.made) > 0, "it went on with the newest model that Redis had"
    assert diverged == ""
    versions = [version for version, _ in it.watcher.published]
    assert len(versions) == len(set(versions)), "no version was taken back"
    tasks = about["tasks"]
    assert tasks["issued"] == sum(n for what, n in tasks.items() if what != "issued")
    assert findings == ()
