"""The manifests, and that whatever could be wrong with them would be seen.

``make k8s-check`` runs all checks on every rendering. Here the production overlay is broken in one
place after the other, and the check whose business it is says so.
"""

from __future__ import annotations

import copy
import os
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedstream import __version__
from tests.k8s.cluster.manifests import Manifests, kubectl, rendered
from tests.k8s.policy import checkov
from tests.k8s.policy.checks import CHECKS, findings
from tests.k8s.policy.sources import sources
from tests.k8s.policy.targets import K8S, ROOT, on_base, render_all
from tests.k8s.policy.workloads import BY_THE_OPERATOR

pytestmark = pytest.mark.timeout(600)  # all renderings and checks: 17 s of one core


@pytest.fixture(scope="session", autouse=True)
def _kubectl_is_there() -> None:
    if kubectl() is None:
        assert os.environ.get("FEDSTREAM_CI") != "1", "kubectl is not on PATH; in CI it has to be"
        pytest.skip("kubectl is not on PATH: it renders the manifests")


@pytest.fixture(scope="session")
def renderings() -> dict[str, Manifests]:
    """All of them."""
    return dict(render_all())


def broken(manifests: Manifests, change: Callable[[Manifests], object]) -> list[str]:
    """What is said of a copy after a change."""
    those = Manifests(copy.deepcopy(list(manifests)))
    change(those)
    return list(findings(Manifests(list(those))))  # anew: a change may rename


def test_every_overlay_and_component_passes_every_check(renderings: dict[str, Manifests]) -> None:
    found = [
        f"{name}: {line}" for name, manifests in renderings.items() for line in findings(manifests)
    ]
    assert found == []


def test_the_sources_name_images_in_one_place() -> None:
    assert list(sources()) == []


def pod(manifests: Manifests, name: str) -> dict[str, Any]:
    """The pod's spec of a workload."""
    found = manifests.find("Deployment", name) or manifests.get("StatefulSet", name)
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def container(manifests: Manifests, name: str) -> dict[str, Any]:
    """The first container of a workload's pods."""
    first: dict[str, Any] = pod(manifests, name)["containers"][0]
    return first


def entry(manifests: Manifests, workload: str, name: str) -> dict[str, Any]:
    """A variable of a workload's environment."""
    return next(one for one in container(manifests, workload)["env"] if one["name"] == name)


def config(manifests: Manifests, start: str) -> dict[str, str]:
    """What a generated ConfigMap holds."""
    found = next(
        one for one in manifests.of("ConfigMap") if one["metadata"]["name"].startswith(start)
    )
    data: dict[str, str] = found["data"]
    return data


def replace(data: dict[str, str], key: str, old: str, new: str) -> None:
    """Changes a text that is there."""
    assert old in data[key]
    data[key] = data[key].replace(old, new)


def rule(manifests: Manifests, name: str) -> dict[str, Any]:
    """A network policy's spec."""
    spec: dict[str, Any] = manifests.get("NetworkPolicy", name)["spec"]
    return spec


Change = Callable[[Manifests], object]
BREAKS: dict[str, tuple[Change, str]] = {
    "a field that no Kubernetes knows": (
        lambda m: container(m, "trainer").update(imagePullPolicies="Always"),
        r"schemas: Deployment trainer: Kubernetes 1\.30: .*imagePullPolicies",
    ),
    "a value of another type": (
        lambda m: m.get("Deployment", "scheduler")["spec"].update(replicas="one"),
        r"schemas: Deployment scheduler: Kubernetes 1\.37: spec\.replicas",
    ),
    "a number in KEDA's texts": (
        lambda m: m.get("ScaledObject", "trainer")["spec"]["triggers"][0]["metadata"].update(
            targetValue=1
        ),
        r"schemas: ScaledObject trainer: .*targetValue: 1 is not of type 'string'",
    ),
    "a key that KEDA does not know": (
        lambda m: m.get("ScaledObject", "trainer")["spec"].update(minReplicas=0),
        r"schemas: ScaledObject trainer: .*minReplicas",
    ),
    "an object without a schema": (
        lambda m: m.put({"kind": "Rollout", "apiVersion": "x/v1", "metadata": {"name": "a"}}),
        r"schemas: Rollout a: Couldn't find schema",
    ),
    "a Service for nobody": (
        lambda m: m.get("Service", "redis")["spec"]["selector"].update(tier="cache"),
        r"references: Service redis: selects no pods",
    ),
    "a Service's port that no pod has": (
        lambda m: m.get("Service", "coordinator")["spec"]["ports"][0].update(targetPort="web"),
        r"references: Service coordinator: Deployment coordinator has no port 'web'",
    ),
    "an Ingress to no Service": (
        lambda m: m.get("Ingress", "coordinator")["spec"]["rules"][0]["http"]["paths"][0][
            "backend"
        ]["service"].update(name="coordinators"),
        r"references: Ingress coordinator: there is no port .* of Service 'coordinators'",
    ),
    "a ConfigMap that is not there": (
        lambda m: pod(m, "trainer")["volumes"][0]["configMap"].update(name="config"),
        r"references: Deployment trainer: there is no ConfigMap 'config'",
    ),
    "a key that its ConfigMap has not": (
        lambda m: container(m, "trainer")["volumeMounts"][0].update(subPath="run.tml"),
        r"references: Deployment trainer, .*: ConfigMap .* has no 'run\.tml'",
    ),
    "a password that the Secret has not": (
        lambda m: entry(m, "trainer", "FEDSTREAM_REDIS__PASSWORD")["valueFrom"][
            "secretKeyRef"
        ].update(key="trainers"),
        r"references: Deployment trainer, .*: Secret 'fedstream-redis' has no 'trainers'",
    ),
    "a mount without a volume": (
        lambda m: container(m, "evaluator")["volumeMounts"][0].update(name="conf"),
        r"references: Deployment evaluator, .*: there is no volume 'conf'",
    ),
    "a volume that nobody mounts": (
        lambda m: pod(m, "scheduler")["volumes"].append({"name": "x", "emptyDir": {}}),
        r"references: Deployment scheduler: volume 'x' is mounted nowhere",
    ),
    "a claim that is not there": (
        lambda m: next(
            volume for volume in pod(m, "trainer")["volumes"] if volume["name"] == "data"
        )["persistentVolumeClaim"].update(claimName="data"),
        r"references: Deployment trainer: there is no PersistentVolumeClaim 'data'",
    ),
    "a budget for no pods": (
        lambda m: m.get("PodDisruptionBudget", "trainer")["spec"]["selector"]["matchLabels"].update(
            role="trainer"
        ),
        r"references: PodDisruptionBudget trainer: selects no pods",
    ),
    "a network policy for no pods": (
        lambda m: rule(m, "redis")["podSelector"]["matchLabels"].update(role="redis"),
        r"references: NetworkPolicy redis: selects no pods",
    ),
    "a network policy for a port where nobody listens": (
        lambda m: rule(m, "metrics")["ingress"][0]["ports"][0].update(port=9090),
        r"references: NetworkPolicy metrics: ingress port 9090, where nobody listens",
    ),
    "an object in another namespace": (
        lambda m: m.get("Service", "redis")["metadata"].update(namespace="default"),
        r"references: Service redis: in namespace 'default'",
    ),
    "a configuration that does not load": (
        lambda m: replace(config(m, "fedstream-config"), "run.toml", "seed = 0", "seeds = 0"),
        r"settings: Deployment trainer, .*: run\.seeds",
    ),
    "a variable that is no key": (
        lambda m: config(m, "fedstream-settings").update(FEDSTREAM_TRAINER__THREAD="2"),
        r"settings: .*trainer\.thread",
    ),
    "a drain that the grace period cuts": (
        lambda m: replace(
            config(m, "fedstream-config"),
            "run.toml",
            "[updater]\ndrain_s = 20.0",
            "[updater]\ndrain_s = 26.0",
        ),
        r"settings: StatefulSet updater, .*: terminationGracePeriodSeconds 30 is less than .* 31$",
    ),
    "a preStop that the grace period cuts": (
        lambda m: container(m, "coordinator")["lifecycle"]["preStop"]["sleep"].update(seconds=11),
        r"settings: Deployment coordinator, .*: terminationGracePeriodSeconds 30 .* 31$",
    ),
    "a port where the service does not listen": (
        lambda m: container(m, "scheduler")["ports"][0].update(containerPort=8000),
        r"settings: Deployment scheduler, .*: http\.health_port = 8081, the port .* is 8000$",
    ),
    "probes at the port that everybody may fill": (
        lambda m: container(m, "coordinator")["livenessProbe"]["httpGet"].update(port="http"),
        r"probes: Deployment coordinator, .*: livenessProbe does not ask the port of probes alone",
    ),
    "one port for probes and everybody": (
        lambda m: container(m, "coordinator")["ports"][1].update(containerPort=8080),
        r"settings: Deployment coordinator, .*: two ports are one",
    ),
    "probes that the Ingress controller may ask": (
        lambda m: rule(m, "ingress-to-coordinator")["ingress"][0]["ports"].append(
            {"protocol": "TCP", "port": 8081}
        ),
        r"networks: .* let the Ingress controller to Deployment coordinator, port 8081",
    ),
    "another service's user": (
        lambda m: entry(m, "trainer", "FEDSTREAM_REDIS__USERNAME").update(value="updater"),
        r"settings: Deployment trainer, .*: is not Redis's user 'trainer'",
    ),
    "a Redis that is nowhere": (
        lambda m: replace(
            config(m, "fedstream-settings"), "FEDSTREAM_REDIS__URL", "//redis:", "//cache:"
        ),
        r"settings: .*: redis\.url = 'rediss://cache:6379/0' is no Service here",
    ),
    "a task that is mounted nowhere": (
        lambda m: replace(config(m, "fedstream-config"), "run.toml", "task.py:task", "my.py:task"),
        r"settings: Deployment trainer, .*: task\.name = .*my\.py:task': no ConfigMap is mounted",
    ),
    "a journal beside its volume": (
        lambda m: replace(config(m, "fedstream-config"), "run.toml", "/var/lib", "/var/log"),
        r"settings: StatefulSet updater, .*: journal\.dir = '/var/log/fedstream/journal'",
    ),
    "adopting where the journal lasts": (
        lambda m: config(m, "fedstream-settings").update(FEDSTREAM_JOURNAL__ADOPT="true"),
        r"settings: StatefulSet updater, .*: journal\.adopt = true with a volume that lasts",
    ),
    "KEDA, and tasks that follow the trainers": (
        lambda m: config(m, "fedstream-settings").pop("FEDSTREAM_SCHEDULER__POLICY__N"),
        r"settings: ScaledObject trainer: scheduler\.policy\.n is not set",
    ),
    "more in flight than trainers": (
        lambda m: config(m, "fedstream-settings").update(FEDSTREAM_SCHEDULER__POLICY__N="17"),
        r"settings: ScaledObject trainer: scheduler\.policy\.n = 17 is above maxReplicaCount 16",
    ),
    "KEDA, and tasks that only trainers open": (
        lambda m: (
            config(m, "fedstream-settings").pop("FEDSTREAM_SCHEDULER__POLICY__N"),
            config(m, "fedstream-settings").update(
                FEDSTREAM_SCHEDULER__POLICY__KIND="none", FEDSTREAM_TRAINER__ANARCHIC__RATE="1.0"
            ),
        ),
        r"settings: ScaledObject trainer: scheduler\.policy\.kind = 'none'",
    ),
    "KEDA and a number of replicas": (
        lambda m: m.get("Deployment", "trainer")["spec"].update(replicas=2),
        r"settings: ScaledObject trainer: its Deployment says replicas",
    ),
    "KEDA asks about another run": (
        lambda m: config(m, "fedstream-run").update(FEDSTREAM_RUN__NAME="prod"),
        r"settings: ScaledObject trainer: asks /v1/runs/demo/scaling, and run\.name is 'prod'",
    ),
    "a root file system that is written to": (
        lambda m: container(m, "redis")["securityContext"].update(readOnlyRootFilesystem=False),
        r"restricted: StatefulSet redis, container redis: readOnlyRootFilesystem is not true",
    ),
    "a capability": (
        lambda m: container(m, "trainer")["securityContext"]["capabilities"].update(
            add=["NET_BIND_SERVICE"]
        ),
        r"restricted: Deployment trainer, container trainer: capabilities",
    ),
    "root": (
        lambda m: pod(m, "updater")["securityContext"].update(runAsUser=0),
        r"restricted: StatefulSet updater: runAsUser 0",
    ),
    "no seccomp": (
        lambda m: pod(m, "updater")["securityContext"].pop("seccompProfile"),
        r"restricted: StatefulSet updater: seccompProfile",
    ),
    "a token of the Kubernetes API": (
        lambda m: pod(m, "coordinator").update(automountServiceAccountToken=True),
        r"restricted: Deployment coordinator: automountServiceAccountToken",
    ),
    "a folder of the node": (
        lambda m: pod(m, "trainer")["volumes"].append({"name": "x", "hostPath": {"path": "/"}}),
        r"restricted: Deployment trainer: volume 'x' is of kind hostPath",
    ),
    "a namespace that enforces nothing": (
        lambda m: m.get("Namespace", "fedstream")["metadata"]["labels"].clear(),
        r"restricted: Namespace fedstream",
    ),
    "no limit": (
        lambda m: container(m, "trainer")["resources"]["limits"].pop("memory"),
        r"restricted: Deployment trainer, container trainer: no limits\.memory",
    ),
    "no limit to what is written": (
        lambda m: container(m, "trainer")["resources"]["limits"].pop("ephemeral-storage"),
        r"restricted: Deployment trainer, container trainer: no limits\.ephemeral-storage",
    ),
    "volumes that the pod is evicted for": (
        lambda m: container(m, "trainer")["resources"]["limits"].update(
            {"ephemeral-storage": "256Mi"}
        ),
        r"restricted: Deployment trainer: limits\.ephemeral-storage are 256 MiB, its .* 306 MiB",
    ),
    "a Redis that is alive for as long as it takes connections": (
        lambda m: container(m, "redis").update(livenessProbe={"tcpSocket": {"port": "redis"}}),
        r"probes: StatefulSet redis, .*: livenessProbe is no command",
    ),
    "liveness that depends on Redis": (
        lambda m: container(m, "trainer")["livenessProbe"]["httpGet"].update(path="/readyz"),
        r"probes: Deployment trainer, .*: livenessProbe asks /readyz",
    ),
    "a probe of a port that is not there": (
        lambda m: container(m, "trainer")["readinessProbe"]["httpGet"].update(port="web"),
        r"probes: Deployment trainer, .*: readinessProbe asks port 'web'",
    ),
    "a startup that recovery does not fit in": (
        lambda m: container(m, "updater")["startupProbe"].update(failureThreshold=10),
        r"probes: StatefulSet updater, .*: startup may take 50 s, less than 600 s",
    ),
    "several, and no budget": (
        lambda m: m.get("Deployment", "evaluator")["spec"].update(replicas=2),
        r"spread: Deployment evaluator: 2 replicas and no PodDisruptionBudget",
    ),
    "a budget that holds up every drain": (
        lambda m: m.get("PodDisruptionBudget", "coordinator")["spec"].update(minAvailable=3),
        r"spread: Deployment coordinator: minAvailable 3 of 3",
    ),
    "a budget that needs all of them": (
        lambda m: m.get("PodDisruptionBudget", "trainer")["spec"].update(maxUnavailable="0%"),
        r"spread: Deployment trainer: maxUnavailable 0: no node could drain",
    ),
    "nodes that take no pods, counted as empty": (
        lambda m: pod(m, "coordinator")["topologySpreadConstraints"][0].pop("nodeTaintsPolicy"),
        r"spread: Deployment coordinator: tainted nodes count as empty ones",
    ),
    "a StatefulSet that waits for a broken pod": (
        lambda m: m.get("StatefulSet", "updater")["spec"].pop("podManagementPolicy"),
        r"repairable: StatefulSet updater: podManagementPolicy is not Parallel",
    ),
    "a Redis that evicts": (
        lambda m: replace(config(m, "redis-config"), "redis.conf", "noeviction", "allkeys-lru"),
        r"redis: StatefulSet redis: maxmemory-policy",
    ),
    "a Redis that keeps every connection": (
        lambda m: replace(config(m, "redis-config"), "redis.conf", "timeout 300", "timeout 0"),
        r"redis: StatefulSet redis: no timeout: connections of nobody stay for ever",
    ),
    "a Redis that the kernel kills first": (
        lambda m: container(m, "redis")["resources"]["limits"].update(memory="1536Mi"),
        r"redis: StatefulSet redis: maxmemory 1572864000 B is not at most 0\.8",
    ),
    "a Redis that forks, and has no memory for it": (
        lambda m: container(m, "redis").update(args=["--appendonly", "yes"]),
        r"redis: StatefulSet redis: maxmemory 1572864000 B is not at most 0\.5",
    ),
    "users that nobody writes": (
        lambda m: replace(config(m, "redis-config"), "redis.conf", "users.acl", "user.acl"),
        r"redis: StatefulSet redis: no init container writes aclfile /run/redis/user\.acl",
    ),
    "services that may not ask Redis": (
        lambda m: rule(m, "services-to-redis")["egress"].clear(),
        r"networks: network policies stop Deployment trainer to StatefulSet redis, port 6379/TCP",
    ),
    "no names": (
        lambda m: rule(m, "dns")["egress"][0]["ports"].pop(0),
        r"networks: network policies stop StatefulSet updater to DNS, port 53/UDP",
    ),
    "no default deny": (
        lambda m: rule(m, "default-deny")["policyTypes"].remove("Ingress"),
        r"networks: no NetworkPolicy denies Ingress by default",
    ),
    "a default deny that lets all out": (
        lambda m: rule(m, "default-deny").update(egress=[{}]),
        r"networks: no NetworkPolicy denies Egress by default",
    ),
    "an Ingress controller that may ask where there is no Ingress": (
        lambda m: m.drop("Ingress", "coordinator"),
        r"networks: .* let the Ingress controller to Deployment coordinator, port 8080/TCP through",
    ),
    "KEDA may not ask": (
        lambda m: rule(m, "keda-to-coordinator")["ingress"].clear(),
        r"networks: network policies stop KEDA to Deployment coordinator, port 8080/TCP",
    ),
    "services that may go anywhere": (
        lambda m: rule(m, "services-to-redis")["egress"].append({}),
        r"networks: network policies let Deployment trainer to the internet, port 443/TCP through",
    ),
    "a Redis that all may ask": (
        lambda m: rule(m, "redis")["ingress"][0]["from"].append({"namespaceSelector": {}}),
        r"networks: .* let a pod of namespace default to StatefulSet redis, port 6379/TCP through",
    ),
    "an Ingress without TLS": (
        lambda m: m.get("Ingress", "coordinator")["spec"].pop("tls"),
        r"exposure: Ingress coordinator: fedstream\.example\.org is let in without TLS",
    ),
    "an Ingress with TLS for another host": (
        lambda m: m.get("Ingress", "coordinator")["spec"]["rules"].append(
            {**m.get("Ingress", "coordinator")["spec"]["rules"][0], "host": "other.example.org"}
        ),
        r"exposure: Ingress coordinator: other\.example\.org is let in without TLS",
    ),
    "an Ingress to a coordinator that asks nobody who they are": (
        lambda m: container(m, "coordinator")["env"].remove(
            entry(m, "coordinator", "FEDSTREAM_HTTP__TOKEN")
        ),
        r"exposure: Deployment coordinator: an Ingress leads to it, and it asks for no token",
    ),
    "an Ingress to a coordinator whose token is in the manifest": (
        lambda m: entry(m, "coordinator", "FEDSTREAM_HTTP__TOKEN").update(
            {"value": "0123456789abcdef", "valueFrom": {}}
        ),
        r"exposure: Deployment coordinator: .* it asks for no token of a Secret",
    ),
    "a Redis in the clear behind an Ingress": (
        lambda m: config(m, "fedstream-settings").pop("FEDSTREAM_REDIS__URL"),
        r"exposure: StatefulSet updater: talks to Redis without TLS",
    ),
    "services by TLS, and a Redis without": (
        lambda m: config(m, "redis-config").pop("tls.inc"),
        r"settings: .*: redis\.url = 'rediss://redis:6379/0', and Redis speaks redis://",
    ),
    "a Secret for Redis's certificate that nobody makes": (
        lambda m: next(
            volume for volume in pod(m, "redis")["volumes"] if volume["name"] == "redis-tls"
        )["secret"].update(secretName="redis-tls"),
        r"references: StatefulSet redis: there is no Secret 'redis-tls'",
    ),
    "an image without a tag": (
        lambda m: container(m, "trainer").update(image="fedstream"),
        r"images: Deployment trainer, container trainer: image 'fedstream' has no tag",
    ),
}


SITES: dict[str, tuple[Change, str]] = {
    "a site with the pool's password": (
        lambda m: entry(m, "site-a", "FEDSTREAM_REDIS__PASSWORD")["valueFrom"][
            "secretKeyRef"
        ].update(name="fedstream-redis", key="trainer"),
        r"sites: StatefulSet site-a: Deployment trainer has the Secret of its site",
    ),
    "a site that is the pool's user": (
        lambda m: entry(m, "site-a", "FEDSTREAM_REDIS__USERNAME").update(value="trainer"),
        r"settings: StatefulSet site-a, .*: is not Redis's user 'trainer-site-a'",
    ),
    "a site that nobody serves": (
        lambda m: config(m, "fedstream-run").update(FEDSTREAM_COORDINATOR__SITES='["pool"]'),
        r"sites: StatefulSet site-a: coordinator\.sites does not name 'site-a'",
    ),
    "a site without a user": (
        lambda m: pod(m, "redis")["initContainers"][0]["env"].pop(),
        r"sites: StatefulSet site-a: Redis's users are made without FEDSTREAM_PASSWORD_SITE_SITE_A",
    ),
}


@pytest.mark.parametrize("what", SITES)
def test_what_is_wrong_of_a_site_is_seen(what: str, renderings: dict[str, Manifests]) -> None:
    change, expected = SITES[what]
    lines = broken(renderings["production with site"], change)
    assert any(re.search(expected, line) for line in lines), "\n".join(lines)


@pytest.mark.parametrize("what", BREAKS)
def test_what_is_wrong_is_seen(what: str, renderings: dict[str, Manifests]) -> None:
    change, expected = BREAKS[what]
    lines = broken(renderings["overlay production"], change)
    assert any(re.search(expected, line) for line in lines), "\n".join(lines)


def test_keda_goes_with_rounds(renderings: dict[str, Manifests]) -> None:
    """Their number of open tasks is their own: as the documentation says to write it."""

    def fedavg(manifests: Manifests) -> None:
        settings = config(manifests, "fedstream-settings")
        text = (ROOT / "docs" / "operations.md").read_text()
        literals = r"behavior: replace,\s+literals: \[(.*?)\]"
        [said] = re.findall(literals, text)
        settings.clear()
        settings |= dict(one.split("=") for one in said.split(", "))
        replace(config(manifests, "fedstream-config"), "run.toml", "fedasync", "fedavg")

    assert broken(renderings["overlay production"], fedavg) == []


def test_every_check_has_been_seen_to_fail() -> None:
    seen = (*BREAKS.values(), *SITES.values())
    assert {pattern.partition(":")[0] for _, pattern in seen} == set(CHECKS)


def test_an_image_of_its_own_is_seen(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    text = (K8S / "images" / "kustomization.yaml").read_text()
    (tmp_path / "images" / "kustomization.yaml").write_text(text)
    (tmp_path / "a.yaml").write_text("containers:\n  - image: fedstream:0.9\n")
    assert any("a.yaml:2: image 'fedstream:0.9'" in line for line in sources(tmp_path))


def test_tags_are_the_packages_version() -> None:
    table = yaml.safe_load((K8S / "images" / "kustomization.yaml").read_text())["images"]
    tags = {entry["name"]: entry["newTag"] for entry in table}
    assert tags["fedstream"] == __version__
    assert tags["fedstream-cuda"] == f"{__version__}-cuda"


def test_what_the_operator_makes_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    missing = [name for _, name in BY_THE_OPERATOR if name not in text]
    assert missing == []


def test_the_objects_in_the_documentation_are_valid() -> None:
    """What is to be copied from there would be taken by a cluster."""
    text = (ROOT / "docs" / "operations.md").read_text()
    blocks = [textwrap.dedent(found) for found in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]
    objects = [one for block in blocks for one in yaml.safe_load_all(block)]
    kinds = sorted(one["kind"] for one in objects)
    assert kinds == ["Kustomization", "PersistentVolume", "Pod"]
    cluster = Manifests(one for one in objects if one["kind"] != "Kustomization")
    assert list(CHECKS["schemas"](cluster)) == []
    claim = cluster.get("Pod", "journal")["spec"]["volumes"][0]["persistentVolumeClaim"]
    assert claim == {"claimName": "journal-updater-0"}


def test_commands_in_the_documentation_name_what_is_there(renderings: dict[str, Manifests]) -> None:
    """A Secret that an overlay makes has the name of the one that the operator makes."""
    text = (ROOT / "docs" / "operations.md").read_text()
    commands = "\n".join(re.findall(r"kubectl (?:-n|--namespace) fedstream ([^`\n]*)", text))
    named = set(re.findall(r"get secret ([a-z-]+)", commands))
    assert named == {"fedstream-redis"}
    assert [one["metadata"]["name"] for one in renderings["overlay dev"].of("Secret")] == [*named]
    kinds = {"deploy": "Deployment", "deployment": "Deployment", "statefulset": "StatefulSet"}
    objects = set(re.findall(r"\b(deploy|deployment|statefulset|service)[/ ]([\w-]+)", commands))
    every = [one for manifests in renderings.values() for one in manifests]
    there = {(one["kind"], one["metadata"]["name"]) for one in every}
    wanted = {(kinds.get(kind, "Service"), name) for kind, name in objects}
    assert wanted - there == set()


def test_an_overlay_of_ones_own_builds_on_production(
    tmp_path: Path, renderings: dict[str, Manifests]
) -> None:
    """The one in the documentation: another run.toml and task, and all else as it is."""
    text = (ROOT / "docs" / "operations.md").read_text()
    [block] = re.findall(r"```yaml\n( *apiVersion: kustomize.*?)```", text, re.DOTALL)
    (tmp_path / "run.toml").write_text("[run]\nversions = 7\n")
    (tmp_path / "task.py").write_text("task = 'mine'\n")
    overlay = textwrap.dedent(block)
    up = os.path.relpath(K8S, tmp_path.resolve())
    (tmp_path / "kustomization.yaml").write_text(overlay.replace("../fedstream/k8s", up))
    manifests = rendered(tmp_path)
    assert config(manifests, "fedstream-config") == {"run.toml": "[run]\nversions = 7\n"}
    assert config(manifests, "fedstream-task") == {"task.py": "task = 'mine'\n"}
    found = {one["metadata"]["name"] for one in manifests.of("ConfigMap")}
    used = {volume["configMap"]["name"] for volume in pod(manifests, "trainer")["volumes"][:2]}
    assert used < found, "the pods have the new ones"
    redis = renderings["overlay production"].get("StatefulSet", "redis")
    assert manifests.get("StatefulSet", "redis") == redis, "another run.toml does not roll Redis"


@pytest.mark.skipif(
    not checkov.PROGRAM.is_file(), reason="checkov is not installed: make .venv-checkov/installed"
)
def test_checkov_sees_what_is_wrong_and_exceptions_that_nobody_needs() -> None:
    manifests = on_base("keda")
    container(manifests, "trainer")["securityContext"].update(privileged=True)
    allowed = {**checkov.exceptions(), "CKV_K8S_1": "an exception for something that nobody does"}
    wrong = checkov.checkov({"broken": manifests}, allowed).wrong
    assert any("CKV_K8S_16" in line and "trainer" in line for line in wrong), wrong
    assert any("nothing needs the exception CKV_K8S_1 " in line for line in wrong), wrong
    assert len(wrong) == 2
