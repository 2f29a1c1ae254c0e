"""Rendered workloads: their pods, containers, environments and mounts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.k8s.manifests import Manifest, Manifests, texts

KINDS = ("Deployment", "StatefulSet")

# Made by whoever runs the cluster, not by these manifests: docs/how-to/kubernetes.md says how.
BY_THE_OPERATOR: Mapping[tuple[str, str], frozenset[str]] = {
    ("Secret", "fedstream-redis"): frozenset(
        [
            "coordinator",
            "scheduler",
            "updater",
            "evaluator",
            "trainer",
            "operator",
            "gateway",
            "sinks",
            "replica",
            "sentinel",
            "watch",
        ]
    ),
    ("Secret", "fedstream-tls"): frozenset(("tls.crt", "tls.key")),
    ("Secret", "fedstream-gateway-tls"): frozenset(("tls.crt", "tls.key")),
    ("Secret", "fedstream-redis-tls"): frozenset(("tls.crt", "tls.key", "ca.crt")),
    ("Secret", "fedstream-site-a"): frozenset(("password",)),
    ("Secret", "fedstream-http"): frozenset(("token",)),
    ("ConfigMap", "fedstream-policy"): frozenset(("policy.json", "roster.txt", "owner")),
    ("Secret", "fedstream-updater-tls"): frozenset(("tls.crt", "tls.key", "ca.crt")),
    ("Secret", "fedstream-device-keys"): frozenset(),  # a file for each device of the pool
    ("Secret", "fedstream-helper"): frozenset(("helper.pem",)),
    ("Secret", "fedstream-helper-tls"): frozenset(("tls.crt", "tls.key", "ca.crt")),
    ("ConfigMap", "fedstream-redis-ca"): frozenset(("ca.crt",)),
    ("PersistentVolumeClaim", "fedstream-data"): frozenset(),
    ("PersistentVolumeClaim", "fedstream-backup"): frozenset(),
}


# What lets others in from outside the cluster.
ENTRANCES = ("Ingress", "HTTPRoute")


@dataclass(frozen=True)
class Workload:
    """A Deployment, StatefulSet or CronJob."""

    manifest: Manifest

    @property
    def name(self) -> str:
        """As messages name it."""
        return f"{self.manifest['kind']} {self.manifest['metadata']['name']}"

    @property
    def spec(self) -> Manifest:
        """Of the workload."""
        spec: Manifest = self.manifest["spec"]
        return spec

    @property
    def _template(self) -> Manifest:
        job = self.manifest["kind"] == "CronJob"
        template: Manifest = (self.spec["jobTemplate"]["spec"] if job else self.spec)["template"]
        return template

    @property
    def pod(self) -> Manifest:
        """The pod's spec."""
        pod: Manifest = self._template["spec"]
        return pod

    @property
    def labels(self) -> dict[str, str]:
        """Of its pods."""
        labels: dict[str, str] = self._template["metadata"].get("labels", {})
        return labels

    @property
    def containers(self) -> list[Manifest]:
        """Those that keep running."""
        containers: list[Manifest] = self.pod["containers"]
        return containers

    @property
    def all_containers(self) -> list[Manifest]:
        """Init containers as well."""
        return [*self.pod.get("initContainers", ()), *self.containers]

    @property
    def ports(self) -> dict[str, int]:
        """The named ports of its pods."""
        return {
            port["name"]: port["containerPort"]
            for container in self.containers
            for port in container.get("ports", ())
            if "name" in port
        }

    @property
    def volumes(self) -> dict[str, Manifest]:
        """By name, those of the claim templates among them."""
        templates = {
            one["metadata"]["name"]: {"claimTemplate": one}
            for one in self.spec.get("volumeClaimTemplates", ())
        }
        return {one["name"]: one for one in self.pod.get("volumes", ())} | templates


def workloads(manifests: Manifests) -> Iterator[Workload]:
    """All whose pods keep running."""
    for manifest in manifests.of(*KINDS):
        yield Workload(manifest)


def with_jobs(manifests: Manifests) -> Iterator[Workload]:
    """All that make pods."""
    for manifest in manifests.of(*KINDS, "CronJob"):
        yield Workload(manifest)


def entered(manifests: Manifests) -> dict[str, str]:
    """The Services that an entrance leads to, with the entrance."""
    return {
        service: f"{one['kind']} {one['metadata']['name']}"
        for one in manifests.of(*ENTRANCES)
        for rule in one["spec"]["rules"]
        for service in _services(rule)
    }


def hosts(manifests: Manifests, service: str) -> set[str]:
    """The hosts for which an entrance leads to a Service."""
    return {
        host
        for one in manifests.of(*ENTRANCES)
        for rule in one["spec"]["rules"]
        if service in _services(rule)
        for host in (rule.get("host"), *one["spec"].get("hostnames", ()))
        if host is not None
    }


def _services(rule: Manifest) -> set[str]:
    """The Services that a rule of an entrance leads to."""
    paths = rule.get("http", {}).get("paths", ())
    backends = [*(path["backend"]["service"] for path in paths), *rule.get("backendRefs", ())]
    return {backend["name"] for backend in backends}


def selected(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector is for these labels; an empty one is for all."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    for rule in selector.get("matchExpressions", ()):
        value = labels.get(rule["key"])
        holds = {
            "In": value in rule.get("values", ()),
            "NotIn": value not in rule.get("values", ()),
            "Exists": value is not None,
            "DoesNotExist": value is None,
        }
        if not holds[rule["operator"]]:
            return False
    return True


def held(manifests: Manifests, kind: str, name: str) -> frozenset[str] | None:
    """The keys of a ConfigMap or Secret; None if there is none."""
    one = manifests.find(kind, name)
    return frozenset(texts(one)) if one is not None else BY_THE_OPERATOR.get((kind, name))


# Values that a pod's fields may have, by their paths.
POD: Mapping[str, str] = {
    "metadata.name": "pod-0",
    "metadata.labels['apps.kubernetes.io/pod-index']": "0",
    "status.podIP": "10.1.2.3",
}

OWNER = "0" * 64  # as ConfigMap fedstream-policy may say, where the operator makes it


def environment(
    manifests: Manifests, container: Manifest, fields: Mapping[str, str] = POD
) -> dict[str, str]:
    """Environment of a container's process. ``fields``: the pod's, by their paths."""
    env: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if (one := manifests.find("ConfigMap", source["configMapRef"]["name"])) is not None:
            env |= texts(one)
    for entry in container.get("env", ()):
        match entry:
            case {"valueFrom": {"fieldRef": {"fieldPath": path}}}:
                env[entry["name"]] = fields[path]
            case {"valueFrom": {"configMapKeyRef": {"name": name, "key": key}}}:
                one = manifests.find("ConfigMap", name)
                env[entry["name"]] = texts(one)[key] if one else OWNER
            case {"value": text}:
                filled = re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), text)
                env[entry["name"]] = filled
            case _:
                raise ValueError(f"{entry['name']}: {entry} is of no kind that is read here")
    return env


def file_at(manifests: Manifests, workload: Workload, container: Manifest, path: str) -> str | None:
    """The text that a ConfigMap puts at ``path`` in a container; None if there is none."""
    for mount in container.get("volumeMounts", ()):
        volume = workload.volumes.get(mount["name"], {})
        one = manifests.find("ConfigMap", volume.get("configMap", {}).get("name", ""))
        if one is None:
            continue
        for key, text in texts(one).items():
            whole = mount.get("subPath") == key and path == mount["mountPath"]
            if whole or ("subPath" not in mount and path == f"{mount['mountPath']}/{key}"):
                return text
    return None


def sources(volume: Manifest) -> list[tuple[str, Manifest]]:
    """The ConfigMaps and Secrets that a volume is made of: kind, and what is said of each."""
    named = {"configMap": ("ConfigMap", "name"), "secret": ("Secret", "secretName")}
    found = [
        (kind, {**volume[field], "name": volume[field][name]})
        for field, (kind, name) in named.items()
        if field in volume
    ]
    for one in volume.get("projected", {}).get("sources", ()):
        found += [(named[field][0], about) for field, about in one.items()]
    return found


def secret_at(workload: Workload, container: Manifest, path: str) -> tuple[str, str] | None:
    """The Secret and the key that are a file of a container, by a volume that says its items."""
    mount = mount_of(container, path)
    if mount is None:
        return None
    name = path.removeprefix(mount["mountPath"].rstrip("/") + "/")
    for kind, about in sources(workload.volumes[mount["name"]]):
        for item in about.get("items", ()):
            if kind == "Secret" and item["path"] == name:
                return about["name"], item["key"]
    return None


def mount_of(container: Manifest, path: str) -> Manifest | None:
    """The innermost mount that ``path`` lies in."""
    around = [
        mount
        for mount in container.get("volumeMounts", ())
        if path == mount["mountPath"] or path.startswith(mount["mountPath"].rstrip("/") + "/")
    ]
    return max(around, key=lambda mount: len(mount["mountPath"]), default=None)
