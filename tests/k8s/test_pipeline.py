"""The manifests at work: a run goes on while pods come, go, are replaced and are killed.

The production overlay runs as it is rendered, with a Secret made beforehand; only settings are
added: a run that lasts as long as the test, and devices that take a while.
"""

from __future__ import annotations

import asyncio
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
from tests.k8s.cluster.keda import Scaler
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
        url = f"{self.cluster.service('coordinator').url()}/v1/runs/{RUN}{path}"
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
        password = cluster.secret(secret["metadata"]["name"])["operator"]
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


async def test_a_run_outlives_all_that_is_done_to_its_pods(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """Trainers 0, 1, 6, 2, 0; Deployments rolled; updater evicted and killed; Redis restarted."""
    settings = {"RUN__VERSIONS": "100000", "JOURNAL__SEGMENT_VERSIONS": "40"}
    manifests = kustomized("production", task=slow_task(), **settings)
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
        cluster.evict(updater)
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
        it.redis_is_up()
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


async def test_keda_brings_trainers_for_a_run_and_takes_them_away_after_it(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """From zero to as many as tasks are open, and to zero when the run is finished."""
    settings = {"RUN__VERSIONS": "60", "SCHEDULER__POLICY__N": "4"}
    manifests = kustomized("dev", "keda", task=slow_task(), **settings)
    async with deployed(tmp_path, images, with_replicas(manifests, trainer=0)) as it:
        cluster, replicas = it.cluster, [0]
        scaler = Scaler(manifests.get("ScaledObject", "trainer"), cluster, faster=10)
        await it.ready()
        await cluster.until(lambda: it.watcher.version == 0, what="the run is there")
        scaling = asyncio.create_task(scaler.run())
        while not (replicas[-1] == 0 and it.watcher.version == 60):
            now = await cluster.until(
                lambda: cluster["trainer"].replicas != replicas[-1] and cluster["trainer"],
                within_s=300, what=f"another number of trainers than {replicas[-1]}",
            )  # fmt: skip
            replicas.append(now.replicas)
        scaling.cancel()
        await asyncio.wait({scaling})
        await it.ready()
        about, scale = await it.get(), await it.get("/scaling")
        journal = it.pod("updater").inside.folder / "volumes" / "journal" / "journal"
        facts = await gathered(it.client, Keys(RUN), journal, findings=tuple(cluster.findings))
    most = replicas.index(4)  # as many as tasks are open
    assert replicas[:2] == [0, 1], "one is woken, then the autoscaler decides"
    assert replicas[: most + 1] == sorted(replicas[: most + 1])
    assert replicas[most:] == sorted(replicas[most:], reverse=True)
    assert scaler.asked[-1] == 0
    assert (about["state"], about["version"], scale["open"]) == ("finished", 60, 0)
    assert complaints(facts) == []


async def test_owners_serve_their_own_devices_and_a_journal_that_is_lost_is_begun_anew(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """Component device-owners; and what overlay dev says of an evicted updater."""
    settings = {"RUN__VERSIONS": "100000", "TASK__DEVICES": "2"}
    manifests = kustomized("dev", "device-owners", task=slow_task(), **settings)
    objects = with_replicas(manifests, owner=2)
    async with deployed(tmp_path, images, objects) as it:
        cluster = it.cluster
        await it.ready()
        await it.versions(10)
        assert sorted((await it.get())["register"]) == ["owner-0", "owner-1"]
        updater = it.pod("updater")
        cluster.evict(updater)
        await cluster.until(updater.gone.is_set, what="the updater is evicted")
        await it.ready("updater")
        await it.versions(10)
        about = await it.get()
        findings = tuple(cluster.findings)
        journal = it.pod("updater").inside.folder / "volumes" / "journal" / "journal"
        for name in ("owner", "scheduler", "updater"):
            cluster.scale(name, 0)
        await it.ready()
        again, diverged = accounted(journal, None), replayed(journal).diverged
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


async def test_a_site_serves_its_devices_as_a_user_of_its_own(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """Component site, beside the pool."""
    settings = {"RUN__VERSIONS": "100000", "TASK__DEVICES": "4"}
    manifests = kustomized("dev", "site", task=slow_task(), **settings)
    secret: Manifest = {
        "apiVersion": "v1", "kind": "Secret",
        "metadata": {"name": "fedstream-site-a", "namespace": "fedstream"},
        "stringData": {"password": "password-of-site-a"},
    }  # fmt: skip
    async with deployed(tmp_path, images, [*manifests, secret]) as it:
        await it.ready()
        await it.versions(12)
        register = (await it.get())["register"]
        findings = tuple(it.cluster.findings)
    owned = {name: about["owns"] for name, about in register.items() if about["owns"]}
    assert sorted(owned.values()) == [[0], [1]]
    assert all("site-a" in name for name in owned)
    assert findings == ()


async def test_a_password_that_is_missing_is_told_where_it_is_missed(
    tmp_path: Path, images: dict[str, Image], kustomized: Kustomized
) -> None:
    """Nothing starts without it, and it is enough to add it."""
    manifests = kustomized("production", task=slow_task())
    others = dict.fromkeys(("scheduler", "evaluator", "trainer", "updater"), 0)
    objects = with_replicas(manifests, **others)
    known = {**PASSWORDS, "stringData": {**PASSWORDS["stringData"]}}
    del known["stringData"]["coordinator"]
    missed = "CreateContainerConfigError: secret 'fedstream-redis' has no key 'coordinator'"
    async with Cluster(tmp_path / "cluster", images) as cluster:
        certificate, _ = redis_tls(tmp_path, cluster)
        await cluster.apply([*objects, known, TOKEN, certificate])

        def says(name: str, container: str) -> bool:
            states = {pod.state for pod in cluster[name].pods}
            return states == {f"{container}: {missed}"}

        await cluster.until(lambda: says("redis", "acl"), what="Redis says it")
        await cluster.until(lambda: says("coordinator", "coordinator"), what="coordinators say it")
        await cluster.apply([PASSWORDS])
        await cluster.settled()
        assert cluster.findings == []
