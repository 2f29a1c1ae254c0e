"""All checks of rendered objects, by name, that no linter makes.

Each is a function of the objects that yields a line for each fault. Objects' form is for
kubernetes-validate, Pod Security and the presence of limits for checkov (``linters.py``), network
policies for ``tests/cluster/test_policies.py``, which compares them with the documented table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from urllib.parse import urlsplit

import yaml

from fedstream.coordinator.sites import served
from fedstream.core.errors import ConfigError
from fedstream.core.messages import POOL
from tests.k8s.manifests import K8S, Manifest, Manifests
from tests.k8s.policy.linters import schemas
from tests.k8s.policy.settings import read, settings
from tests.k8s.workloads import (
    BY_THE_OPERATOR,
    Workload,
    entered,
    environment,
    held,
    hosts,
    mount_of,
    secret_at,
    selected,
    sources,
    with_jobs,
    workloads,
)

_LEAST_STARTUP_S = {"updater": 600.0}  # outlasts recovery
_LEAST_STARTUP_OTHERS_S = 60.0
_LOGS = 50 << 20  # bytes of a container's logs, as the kubelet rotates them by default
_UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "kb": 2**10, "mb": 2**20, "gb": 2**30}


def references(manifests: Manifests) -> Iterator[str]:
    """Names of other objects lead somewhere; nothing with data is deleted with the overlay."""
    every = list(workloads(manifests))
    for workload in every:
        matched = [one.name for one in every if selected(workload.spec["selector"], one.labels)]
        if matched != [workload.name]:
            yield f"{workload.name}: its selector is for {matched or 'no pods'}"
    for workload in with_jobs(manifests):
        account = workload.pod.get("serviceAccountName", "default")
        if manifests.find("ServiceAccount", account) is None:
            yield f"{workload.name}: there is no ServiceAccount {account!r}"
        for container in workload.all_containers:
            yield from _container(manifests, workload, container)
        for volume in workload.volumes.values():
            yield from _source(manifests, workload, volume)
    yield from _services(manifests)
    yield from _entrances(manifests)
    for one in manifests.of("Namespace", "PersistentVolumeClaim", "PersistentVolume"):
        yield f"{one['kind']} {one['metadata']['name']}: is deleted with the overlay"
    for one in manifests.of("StatefulSet"):
        if "Delete" in one["spec"].get("persistentVolumeClaimRetentionPolicy", {}).values():
            yield f"StatefulSet {one['metadata']['name']}: its claims are deleted with it"


def _container(manifests: Manifests, workload: Workload, container: Manifest) -> Iterator[str]:
    name = f"{workload.name}, container {container['name']}"
    for source in container.get("envFrom", ()):
        if held(manifests, "ConfigMap", source["configMapRef"]["name"]) is None:
            yield f"{name}: there is no ConfigMap {source['configMapRef']['name']!r}"
    for entry in container.get("env", ()):
        about = entry.get("valueFrom", {}).get("configMapKeyRef")
        if about and about["key"] not in (held(manifests, "ConfigMap", about["name"]) or ()):
            yield f"{name}: ConfigMap {about['name']!r} has no {about['key']!r}"
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in workload.volumes:
            yield f"{name}: there is no volume {mount['name']!r}"
        elif "subPath" in mount:
            config = workload.volumes[mount["name"]].get("configMap", {}).get("name", "")
            if mount["subPath"] not in (held(manifests, "ConfigMap", config) or ()):
                yield f"{name}: ConfigMap {config!r} has no {mount['subPath']!r}"


def _source(manifests: Manifests, workload: Workload, volume: Manifest) -> Iterator[str]:
    for kind, about in sources(volume):
        name, keys = about["name"], held(manifests, kind, about["name"])
        if about.get("optional"):  # one that the operator may add
            keys = BY_THE_OPERATOR.get((kind, name), keys)
        if keys is None:
            yield f"{workload.name}: there is no {kind} {name!r}"
            continue
        for item in about.get("items", ()):
            if item["key"] not in keys:
                yield f"{workload.name}: {kind} {name!r} has no {item['key']!r}"
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    there = claim in {
        f"{template['metadata']['name']}-{one['metadata']['name']}-0"
        for one in manifests.of("StatefulSet")
        for template in one["spec"].get("volumeClaimTemplates", ())
    }
    if claim and not there and ("PersistentVolumeClaim", claim) not in BY_THE_OPERATOR:
        yield f"{workload.name}: there is no PersistentVolumeClaim {claim!r}"


def _services(manifests: Manifests) -> Iterator[str]:
    for service in manifests.of("Service"):
        name = f"Service {service['metadata']['name']}"
        selector = {"matchLabels": service["spec"]["selector"]}
        behind = [one for one in workloads(manifests) if selected(selector, one.labels)]
        if not behind:
            yield f"{name}: selects no pods"
        for port in service["spec"]["ports"]:
            for workload in behind:
                if port["targetPort"] not in workload.ports:
                    yield f"{name}: {workload.name} has no port {port['targetPort']!r}"
    for workload in workloads(manifests):
        governing = workload.spec.get("serviceName", "")
        if workload.manifest["kind"] == "StatefulSet":
            found = manifests.find("Service", governing)
            selector = {"matchLabels": found["spec"]["selector"]} if found else {}
            if found is None or not selected(selector, workload.labels):
                yield f"{workload.name}: there is no Service {governing!r} for its pods"


def _entrances(manifests: Manifests) -> Iterator[str]:
    for ingress in manifests.of("Ingress"):
        name = f"Ingress {ingress['metadata']['name']}"
        for tls in ingress["spec"].get("tls", ()):
            if held(manifests, "Secret", tls["secretName"]) is None:
                yield f"{name}: there is no Secret {tls['secretName']!r}"
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                to = path["backend"]["service"]
                yield from _way_in(manifests, name, to["name"], to["port"], path["path"])
    for route in manifests.of("HTTPRoute"):
        name = f"HTTPRoute {route['metadata']['name']}"
        for rule in route["spec"]["rules"]:
            for to in rule["backendRefs"]:
                for match in rule["matches"]:
                    port = {"port": to["port"]}
                    yield from _way_in(manifests, name, to["name"], port, match["path"]["value"])


def _way_in(
    manifests: Manifests, name: str, service: str, port: Manifest, path: str
) -> Iterator[str]:
    found = manifests.find("Service", service)
    ports = found["spec"]["ports"] if found else []
    if not any(port.items() <= one.items() for one in ports):
        yield f"{name}: there is no port {port} of Service {service!r}"
    if path != "/v1" and service != "coordinator":  # which also has a page
        yield f"{name}: {path} lets out more than the API"


def storage(manifests: Manifests) -> Iterator[str]:
    """A pod is evicted above its containers' limits together, what its volumes hold included."""
    for workload in with_jobs(manifests):
        key, volumes = "ephemeral-storage", workload.pod.get("volumes", ())
        limits = [one["resources"].get("limits", {}).get(key) for one in workload.containers]
        folders = [volume["emptyDir"] for volume in volumes if "emptyDir" in volume]
        if not all(limits) or not all("sizeLimit" in folder for folder in folders):
            yield f"{workload.name}: no limits.{key}, or an emptyDir without sizeLimit"
            continue
        has, wanted = sum(map(amount, limits)), _LOGS * len(limits)
        wanted += sum(amount(one["sizeLimit"]) for one in folders if one.get("medium") != "Memory")
        if has < wanted:
            yield (
                f"{workload.name}: limits.{key} are {has >> 20} MiB, its volumes "
                f"and logs {wanted >> 20} MiB"
            )


def probes(manifests: Manifests) -> Iterator[str]:
    """Startup outlasts recovery, liveness doesn't depend on Redis, readiness does."""
    for workload in workloads(manifests):
        for container in workload.containers:
            name = f"{workload.name}, container {container['name']}"
            ours = container["command"] == ["fedstream"]
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                about = container.get(probe, {})
                path = "/readyz" if probe == "readinessProbe" else "/livez"
                wanted = {"path": path, "port": "health"}  # a port that nobody else can fill
                if ours and about.get("httpGet") != wanted:
                    yield f"{name}: {probe} asks {about.get('httpGet')}, not {wanted}"
                if not ours and "exec" not in about:
                    yield f"{name}: {probe} is no command: a busy Redis still takes connections"
            startup = container.get("startupProbe", {})
            budget = startup.get("periodSeconds", 10) * startup.get("failureThreshold", 3)
            least = _LEAST_STARTUP_S.get(container["name"], _LEAST_STARTUP_OTHERS_S)
            if budget < least:
                yield f"{name}: startup may take {budget} s, less than {least:.0f} s"


def spread(manifests: Manifests) -> Iterator[str]:
    """Replicas are spread over nodes, with a budget that drains respect and that lets them end.

    A StatefulSet replaces pods that never became ready.
    """
    budgets = manifests.of("PodDisruptionBudget")
    for workload in workloads(manifests):
        replicas = workload.spec.get("replicas")
        covering = [one for one in budgets if selected(one["spec"]["selector"], workload.labels)]
        constraints = workload.pod.get("topologySpreadConstraints", ())
        if replicas is None or replicas > 1:  # None: something scales it
            if len(covering) != 1:
                yield f"{workload.name}: several replicas and {len(covering)} PodDisruptionBudgets"
            if not constraints:
                yield f"{workload.name}: several replicas and no topologySpreadConstraints"
        for constraint in constraints:
            if not selected(constraint["labelSelector"], workload.labels):
                yield f"{workload.name}: a topologySpreadConstraint selects other pods"
            strict = constraint["whenUnsatisfiable"] == "DoNotSchedule"
            if strict and constraint.get("nodeTaintsPolicy") != "Honor":
                yield f"{workload.name}: tainted nodes count as empty ones: nodeTaintsPolicy"
        for budget in covering:
            least, most = (budget["spec"].get(key) for key in ("minAvailable", "maxUnavailable"))
            too_many = isinstance(least, int) and replicas is not None and least >= replicas
            if too_many or least == "100%" or most in (0, "0%"):
                yield f"{workload.name}: its PodDisruptionBudget lets no node drain"
        ordered = workload.spec.get("podManagementPolicy", "OrderedReady") == "OrderedReady"
        if workload.manifest["kind"] == "StatefulSet" and ordered:
            yield f"{workload.name}: podManagementPolicy is not Parallel: a broken pod would stay"


def redis(manifests: Manifests) -> Iterator[str]:
    """Redis refuses writes before the kernel kills it; its users are where it looks for them."""
    found = manifests.find("StatefulSet", "redis")
    if found is None:
        return
    workload = Workload(found)
    [container] = workload.containers
    name = workload.volumes["redis-config"]["configMap"]["name"]
    text = manifests.get("ConfigMap", name)["data"]["redis.conf"]
    conf = dict(re.findall(r"^([\w-]+) (.*)$", text, re.MULTILINE))
    if conf.get("maxmemory-policy") != "noeviction":
        yield f"{workload.name}: maxmemory-policy is not noeviction"
    for key in ("timeout", "tcp-keepalive", "maxclients"):
        if int(conf.get(key, "0")) == 0:
            yield f"{workload.name}: no {key}: connections of nobody stay for ever"
    most, limit = amount(conf["maxmemory"]), amount(container["resources"]["limits"]["memory"])
    forks = "--appendonly" in container.get("args", ()) or workload.spec["replicas"] > 1
    share = 0.5 if forks else 0.8  # pages that change during a fork are in memory twice
    if not 0 < most <= share * limit:
        yield f"{workload.name}: maxmemory {most} B is not at most {share} of the limit {limit}"
    if not any(conf["aclfile"] in init["args"] for init in workload.pod["initContainers"]):
        yield f"{workload.name}: no init container writes aclfile {conf['aclfile']}"


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


def exposure(manifests: Manifests) -> Iterator[str]:
    """An entrance comes with TLS, a token and a name, and with TLS behind it.

    Whoever comes to the gateway shows a token of his own, for which he signs with the host's name.
    """
    services = entered(manifests)
    if not services:
        return
    for ingress in manifests.of("Ingress"):
        name, spec = f"Ingress {ingress['metadata']['name']}", ingress["spec"]
        sealed = {host for tls in spec.get("tls", ()) for host in tls.get("hosts", ())}
        for rule in spec["rules"]:
            if rule.get("host") not in sealed:
                yield f"{name}: {rule.get('host', 'every host')} is let in without TLS"
    for route in manifests.of("HTTPRoute"):
        for parent in route["spec"]["parentRefs"]:
            if parent.get("sectionName") != "https":
                yield f"HTTPRoute {route['metadata']['name']}: lets in without TLS"
    if "coordinator" in services:
        coordinator = Workload(manifests.get("Deployment", "coordinator"))
        container = coordinator.containers[0]
        file = environment(manifests, container).get("FEDSTREAM_HTTP__TOKEN_FILE", "")
        mount = mount_of(container, file)
        volume = coordinator.volumes[mount["name"]] if mount else {}
        if volume.get("secret", {"optional": True}).get("optional"):
            yield (
                f"{coordinator.name}: {services['coordinator']} leads to it, and it asks for no "
                "token of a Secret"
            )
    if "gateway" in services:
        yield from _names(manifests)
    for workload in workloads(manifests):
        if workload.labels.get("app.kubernetes.io/name") == "fedstream":
            url = environment(manifests, workload.containers[0]).get("FEDSTREAM_REDIS__URL", "")
            if urlsplit(url).scheme != "rediss":
                yield f"{workload.name}: talks to Redis without TLS ({url or 'as run.toml says'})"


def _names(manifests: Manifests) -> Iterator[str]:
    """Behind an entrance, a gateway doesn't see the certificate that its names would be in."""
    gateway = Workload(manifests.get("StatefulSet", "gateway"))
    try:
        names = {*read(manifests, gateway, gateway.containers[0]).gateway.names}
    except ConfigError:
        return  # told by `settings`
    for host in sorted(hosts(manifests, "gateway") ^ names):
        yield f"{gateway.name}: gateway.names and the hosts that lead to it differ in {host!r}"


def sites(manifests: Manifests) -> Iterator[str]:
    """Each site and gateway has a user in Redis, a Secret of its own, and coordinators."""
    for workload in workloads(manifests):
        container = workload.containers[0]
        if container.get("args") not in (["trainer"], ["gateway"]):
            continue
        coordinator = Workload(manifests.get("Deployment", "coordinator"))
        try:
            found = read(manifests, workload, container)
            settings = read(manifests, coordinator, coordinator.containers[0]).coordinator
        except ConfigError:
            continue  # told by `settings`
        is_gateway = container["args"] == ["gateway"]
        site = found.gateway.site if is_gateway else found.trainer.site
        if site == POOL:
            continue
        if site not in served(settings.sites, settings.trusted_sites):
            yield f"{workload.name}: coordinator.sites does not name {site!r}"
        secret, _ = secret_at(workload, container, found.redis.password_file or "") or (None, "")
        have = {
            other.name: {
                about["name"]
                for volume in other.volumes.values()
                for kind, about in sources(volume)
                if kind == "Secret"
            }
            for other in workloads(manifests)
        }
        for other, secrets in have.items():
            same = other in (workload.name, "StatefulSet redis")
            if secret in secrets and not same and not is_gateway:  # that is the operator's own
                yield f"{workload.name}: {other} has the Secret of its site, {secret!r}"
        if secret not in have.get("StatefulSet redis", {secret}):
            yield f"{workload.name}: Redis's users are made without the password of {secret!r}"


def images(manifests: Manifests) -> Iterator[str]:
    """Every image is one of k8s/images, with its place and tag."""
    table = yaml.safe_load((K8S / "images" / "kustomization.yaml").read_text())["images"]
    known = {f"{one.get('newName', one['name'])}:{one['newTag']}" for one in table}
    for workload in with_jobs(manifests):
        for container in workload.all_containers:
            if container["image"] not in known:
                yield f"{workload.name}: image {container['image']!r} is not one of k8s/images"


def amount(text: str) -> int:
    """Bytes of a quantity, as Kubernetes or Redis write it."""
    found = re.fullmatch(r"(\d+)([A-Za-z]*)", str(text))
    if found is None:
        raise ValueError(f"{text!r} is no amount of memory")
    return int(found[1]) * _UNITS[found[2]]


Check = Callable[[Manifests], Iterator[str]]
CHECKS: Mapping[str, Check] = {
    "schemas": schemas,  # first: the others take for granted that objects have their form
    "references": references,
    "settings": settings,
    "storage": storage,
    "probes": probes,
    "spread": spread,
    "redis": redis,
    "exposure": exposure,
    "sites": sites,
    "images": images,
}


def findings(manifests: Manifests) -> Iterator[str]:
    """Faults of one rendering; of objects that have not their form just that."""
    for name, check in CHECKS.items():
        said = [f"{name}: {line}" for line in check(manifests)]
        yield from said
        if said and check is schemas:
            return
