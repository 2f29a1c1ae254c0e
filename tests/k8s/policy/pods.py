"""Every pod: restricted (Pod Security Standards), bounded, probed, spread and stopped in time."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.k8s.cluster.manifests import Manifest, Manifests
from tests.k8s.policy.workloads import Workload, selected, with_jobs, workloads

# https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted
_VOLUMES = {
    "configMap",
    "emptyDir",
    "persistentVolumeClaim",
    "projected",
    "secret",
    "claimTemplate",
}
_LEAST_STARTUP_S = {"updater": 600.0, "redis": 60.0}  # outlasts recovery; taking over
_LEAST_STARTUP_OTHERS_S = 60.0
_LOGS = 50 << 20  # of a container, as the kubelet rotates them by default: five of 10 MiB
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}


def restricted(manifests: Manifests) -> Iterator[str]:
    """What the namespace's level would refuse, and a little more."""
    for namespace in manifests.of("Namespace"):
        labels = namespace["metadata"].get("labels", {})
        if labels.get("pod-security.kubernetes.io/enforce") != "restricted":
            yield f"Namespace {namespace['metadata']['name']}: does not enforce 'restricted'"
    for workload in with_jobs(manifests):
        pod, name = workload.pod, workload.name
        security = pod.get("securityContext", {})
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.get(key):
                yield f"{name}: {key}"
        if security.get("runAsNonRoot") is not True:
            yield f"{name}: runAsNonRoot is not true"
        if security.get("runAsUser", 0) < 10_000:  # below are the users of the node
            yield f"{name}: runAsUser {security.get('runAsUser')} is not above 10000"
        if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
            yield f"{name}: seccompProfile is not RuntimeDefault"
        if pod.get("automountServiceAccountToken") is not False:
            yield f"{name}: automountServiceAccountToken is not false"
        if pod.get("enableServiceLinks") is not False:
            yield f"{name}: enableServiceLinks is not false"
        for volume in pod.get("volumes", ()):
            kinds = set(volume) - {"name"}
            if not kinds <= _VOLUMES:
                yield f"{name}: volume {volume['name']!r} is of kind {', '.join(sorted(kinds))}"
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{name}: emptyDir {volume['name']!r} has no sizeLimit"
        for container in workload.all_containers:
            yield from _container(f"{name}, container {container['name']}", container)
        yield from _disk(workload)


def _disk(workload: Workload) -> Iterator[str]:
    """A pod is evicted above its containers' limits together, what its volumes hold included."""
    limits = [
        amount(container.get("resources", {}).get("limits", {}).get("ephemeral-storage", "0"))
        for container in workload.containers
    ]
    volumes = [
        amount(volume["emptyDir"].get("sizeLimit", "0"))
        for volume in workload.pod.get("volumes", ())
        if volume.get("emptyDir", {}).get("medium") != "Memory" and "emptyDir" in volume
    ]
    wanted = sum(volumes) + _LOGS * len(limits)
    if all(limits) and sum(limits) < wanted:
        yield (
            f"{workload.name}: limits.ephemeral-storage are {sum(limits) >> 20} MiB, its volumes "
            f"and logs {wanted >> 20} MiB"
        )


def _container(name: str, container: Manifest) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: allowPrivilegeEscalation is not false"
    if security.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: readOnlyRootFilesystem is not true"
    if security.get("capabilities") != {"drop": ["ALL"]}:
        yield f"{name}: capabilities are not just drop: [ALL]"
    for key in ("privileged", "runAsUser", "runAsNonRoot", "seccompProfile", "procMount"):
        if key in security:
            yield f"{name}: {key} belongs to the pod, or nowhere"
    for key in ("requests", "limits"):
        for resource in ("cpu", "memory", "ephemeral-storage"):
            if resource not in container.get("resources", {}).get(key, {}):
                yield f"{name}: no {key}.{resource}"


def probes(manifests: Manifests) -> Iterator[str]:
    """Startup outlasts recovery, liveness doesn't depend on Redis, readiness does."""
    for workload in workloads(manifests):
        for container in workload.containers:
            name = f"{workload.name}, container {container['name']}"
            ours = container["command"] == ["fedstream"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if probe not in container:
                    yield f"{name}: no {probe}"
                    continue
                path = container[probe].get("httpGet", {}).get("path")
                wanted = "/readyz" if probe == "readinessProbe" else "/livez"
                if ours and path != wanted:
                    yield f"{name}: {probe} asks {path}, not {wanted}"
                if ours and container[probe].get("httpGet", {}).get("port") != "health":
                    yield f"{name}: {probe} does not ask the port of probes alone, 'health'"
                if not ours and "exec" not in container[probe]:
                    yield f"{name}: {probe} is no command: a busy Redis still takes connections"
                ask = container[probe].get("httpGet") or container[probe].get("tcpSocket")
                if ask is not None and ask["port"] not in workload.ports:
                    yield f"{name}: {probe} asks port {ask['port']!r}, which it does not have"
            startup = container.get("startupProbe", {})
            budget = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
            least = _LEAST_STARTUP_S.get(container["name"], _LEAST_STARTUP_OTHERS_S)
            if startup and budget < least:
                yield f"{name}: startup may take {budget} s, less than {least:.0f} s"


def spread(manifests: Manifests) -> Iterator[str]:
    """Replicas that one node must not take with it: spread, and with a disruption budget."""
    budgets = manifests.of("PodDisruptionBudget")
    for workload in workloads(manifests):
        replicas = workload.spec.get("replicas")
        several = replicas is None or replicas > 1  # None: something scales it
        covering = [one for one in budgets if selected(one["spec"]["selector"], workload.labels)]
        if several and not covering:
            yield f"{workload.name}: {replicas or 'several'} replicas and no PodDisruptionBudget"
        if len(covering) > 1:
            yield f"{workload.name}: two PodDisruptionBudgets, and evictions fail"
        constraints = workload.pod.get("topologySpreadConstraints", ())
        if several and not constraints:
            yield f"{workload.name}: several replicas and no topologySpreadConstraints"
        for constraint in constraints:
            if not selected(constraint["labelSelector"], workload.labels):
                yield f"{workload.name}: a topologySpreadConstraint selects other pods"
            strict = constraint["whenUnsatisfiable"] == "DoNotSchedule"
            if strict and constraint.get("nodeTaintsPolicy") != "Honor":
                yield f"{workload.name}: tainted nodes count as empty ones: nodeTaintsPolicy"
        for budget in covering:
            least = budget["spec"].get("minAvailable")
            too_many = isinstance(least, int) and replicas is not None and least >= replicas
            if too_many or least == "100%":
                yield f"{workload.name}: minAvailable {least} of {replicas}: no node could drain"
            if budget["spec"].get("maxUnavailable") in (0, "0%"):
                yield f"{workload.name}: maxUnavailable 0: no node could drain"


def repairable(manifests: Manifests) -> Iterator[str]:
    """A StatefulSet whose pod can't become ready takes the repaired one all the same."""
    for workload in workloads(manifests):
        ordered = workload.spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady"
        if workload.manifest["kind"] == "StatefulSet" and ordered:
            yield f"{workload.name}: podManagementPolicy is not Parallel: a broken pod would stay"


def redis(manifests: Manifests) -> Iterator[str]:
    """Redis refuses writes before the kernel kills it; its users are where it looks for them."""
    for workload in workloads(manifests):
        for container in workload.containers:
            if container["name"] != "redis":
                continue
            conf = _redis_conf(manifests, workload)
            if conf.get("maxmemory-policy") != "noeviction":
                yield f"{workload.name}: maxmemory-policy is not noeviction"
            for key in ("timeout", "tcp-keepalive", "maxclients"):
                if int(conf.get(key, "0")) == 0:
                    yield f"{workload.name}: no {key}: connections of nobody stay for ever"
            most = amount(conf.get("maxmemory", "0"))
            limit = amount(container["resources"]["limits"]["memory"])
            forks = "--appendonly" in container.get("args", ()) or workload.spec["replicas"] > 1
            share = 0.5 if forks else 0.8  # what changes meanwhile is in memory twice
            if not 0 < most <= share * limit:
                yield (
                    f"{workload.name}: maxmemory {most} B is not at most {share} of the limit "
                    f"{limit}"
                )
            written = [
                argument
                for init in workload.pod.get("initContainers", ())
                for argument in init.get("args", ())
                if argument.startswith("/")
            ]
            if conf.get("aclfile") not in written:
                yield f"{workload.name}: no init container writes aclfile {conf.get('aclfile')}"


def durable(manifests: Manifests) -> Iterator[str]:
    """Redis loses nothing with a pod: it writes to a volume, has replicas, or is elsewhere."""
    if (found := manifests.find("StatefulSet", "redis")) is None:
        return
    workload = Workload(found)
    written = "--appendonly" in workload.containers[0].get("args", ())
    on_volume = any("claimTemplate" in volume for volume in workload.volumes.values())
    if workload.spec["replicas"] == 1 and not (written and on_volume):
        yield (
            f"{workload.name}: loses what it holds with its pod: add redis-aof, redis-sentinel "
            "or external-redis"
        )


def _redis_conf(manifests: Manifests, workload: Workload) -> dict[str, str]:
    name = workload.volumes["redis-config"]["configMap"]["name"]
    text = manifests.get("ConfigMap", name)["data"]["redis.conf"]
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return {line[0]: line[1] for line in lines if len(line) == 2 and not line[0].startswith("#")}


def amount(text: str) -> int:
    """Bytes of a quantity, as Kubernetes or Redis write it."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no amount of memory")
    return int(found[1]) * _UNITS[found[2]]


def images(manifests: Manifests) -> Iterator[str]:
    """Every image came through k8s/images: it has a tag or digest, and not `latest`."""
    for workload in with_jobs(manifests):
        for container in workload.all_containers:
            image = container["image"]
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@sha256:" not in image and (not tag or tag == "latest"):
                yield f"{workload.name}, container {container['name']}: image {image!r} has no tag"
            if container.get("imagePullPolicy") != "IfNotPresent":
                yield f"{workload.name}, container {container['name']}: imagePullPolicy"
