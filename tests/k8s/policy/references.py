"""Names that one object uses of another: each leads somewhere, and nothing lies around unused."""

from __future__ import annotations

from collections.abc import Iterator

from tests.k8s.cluster.manifests import Manifest, Manifests, texts
from tests.k8s.policy.workloads import (
    BY_THE_OPERATOR,
    Workload,
    held,
    selected,
    sources,
    with_jobs,
    workloads,
)


def references(manifests: Manifests) -> Iterator[str]:
    """Everything in :data:`_CHECKS`, and objects outside the namespace."""
    for one in manifests:
        namespace = one["metadata"].get("namespace")
        if one["kind"] != "Namespace" and namespace != "fedstream":
            yield f"{one['kind']} {one['metadata']['name']}: in namespace {namespace!r}"
    for check in _CHECKS:
        yield from check(manifests)


def _own_labels(manifests: Manifests) -> Iterator[str]:
    every = list(workloads(manifests))
    for workload in every:
        selector = workload.spec["selector"]
        matched = [one.name for one in every if selected(selector, one.labels)]
        if matched != [workload.name]:
            yield f"{workload.name}: its selector is for {matched or 'no pods'}"
        for label in ("name", "component", "part-of"):
            if f"app.kubernetes.io/{label}" not in workload.labels:
                yield f"{workload.name}: pods without label app.kubernetes.io/{label}"
        account = workload.pod.get("serviceAccountName", "default")
        if manifests.find("ServiceAccount", account) is None:
            yield f"{workload.name}: there is no ServiceAccount {account!r}"


def _volumes(manifests: Manifests) -> Iterator[str]:
    for workload in with_jobs(manifests):
        volumes, used = workload.volumes, set()
        for container in workload.all_containers:
            name = f"{workload.name}, container {container['name']}"
            paths = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
            if len(paths) != len(set(paths)):
                yield f"{name}: two mounts at one path"
            for mount in container.get("volumeMounts", ()):
                used.add(mount["name"])
                if mount["name"] not in volumes:
                    yield f"{name}: there is no volume {mount['name']!r}"
                elif "subPath" in mount:
                    source = volumes[mount["name"]].get("configMap", {}).get("name", "")
                    if mount["subPath"] not in (held(manifests, "ConfigMap", source) or ()):
                        yield f"{name}: ConfigMap {source!r} has no {mount['subPath']!r}"
        for name, volume in volumes.items():
            if name not in used:
                yield f"{workload.name}: volume {name!r} is mounted nowhere"
            yield from _source(manifests, workload, volume)


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
    found = manifests.find("PersistentVolumeClaim", claim or "") or claim in _templates(manifests)
    if claim and not found and ("PersistentVolumeClaim", claim) not in BY_THE_OPERATOR:
        yield f"{workload.name}: there is no PersistentVolumeClaim {claim!r}"


def _templates(manifests: Manifests) -> set[str]:
    """The claims of the first pod of each StatefulSet."""
    return {
        f"{template['metadata']['name']}-{one['metadata']['name']}-0"
        for one in manifests.of("StatefulSet")
        for template in one["spec"].get("volumeClaimTemplates", ())
    }


def _environment(manifests: Manifests) -> Iterator[str]:
    for workload in with_jobs(manifests):
        for container in workload.all_containers:
            name = f"{workload.name}, container {container['name']}"
            for source in container.get("envFrom", ()):
                config = source["configMapRef"]["name"]
                if held(manifests, "ConfigMap", config) is None:
                    yield f"{name}: there is no ConfigMap {config!r}"
            names = [entry["name"] for entry in container.get("env", ())]
            for twice in {one for one in names if names.count(one) > 1}:
                yield f"{name}: {twice} is set twice"
            for entry in container.get("env", ()):
                for kind, key in (("Secret", "secretKeyRef"), ("ConfigMap", "configMapKeyRef")):
                    wanted = entry.get("valueFrom", {}).get(key)
                    if wanted is None:
                        continue
                    keys = held(manifests, kind, wanted["name"])
                    if wanted.get("optional"):  # one that the operator may add
                        keys = BY_THE_OPERATOR.get((kind, wanted["name"]), keys)
                    if keys is None:
                        yield f"{name}: there is no {kind} {wanted['name']!r}"
                    elif wanted["key"] not in keys:
                        yield f"{name}: {kind} {wanted['name']!r} has no {wanted['key']!r}"


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
        governing = workload.spec.get("serviceName")
        if workload.manifest["kind"] != "StatefulSet":
            continue
        found = manifests.find("Service", governing or "")
        if found is None:
            yield f"{workload.name}: there is no Service {governing!r}"
        elif not selected({"matchLabels": found["spec"]["selector"]}, workload.labels):
            yield f"{workload.name}: its Service {governing!r} is for other pods"


def _entrances(manifests: Manifests) -> Iterator[str]:
    for ingress in manifests.of("Ingress"):
        name = f"Ingress {ingress['metadata']['name']}"
        hosts = {rule.get("host") for rule in ingress["spec"]["rules"]}
        for tls in ingress["spec"].get("tls", ()):
            if held(manifests, "Secret", tls["secretName"]) is None:
                yield f"{name}: there is no Secret {tls['secretName']!r}"
            if not set(tls["hosts"]) <= hosts:
                yield f"{name}: TLS for {tls['hosts']}, rules for {sorted(map(str, hosts))}"
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                wanted = path["backend"]["service"]
                service = manifests.find("Service", wanted["name"])
                ports = {port["name"] for port in service["spec"]["ports"]} if service else set()
                if wanted["port"].get("name") not in ports:
                    yield f"{name}: there is no port {wanted['port']} of Service {wanted['name']!r}"
                if (
                    path["path"] != "/v1" and wanted["name"] != "coordinator"
                ):  # that also has a page
                    yield f"{name}: {path['path']} lets out more than the API"
    for route in manifests.of("HTTPRoute"):
        name = f"HTTPRoute {route['metadata']['name']}"
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                service = manifests.find("Service", backend["name"])
                numbers = [port["port"] for port in service["spec"]["ports"]] if service else []
                if backend["port"] not in numbers:
                    yield f"{name}: there is no port {backend['port']} of {backend['name']!r}"
            for match in rule["matches"]:
                pages = any(one["name"] == "coordinator" for one in rule["backendRefs"])
                if match["path"]["value"] != "/v1" and not pages:
                    yield f"{name}: {match['path']['value']} lets out more than the API"


def _selectors(manifests: Manifests) -> Iterator[str]:
    every = list(workloads(manifests))
    for one in manifests.of("PodDisruptionBudget"):
        if not any(selected(one["spec"]["selector"], workload.labels) for workload in every):
            yield f"PodDisruptionBudget {one['metadata']['name']}: selects no pods"
    for one in manifests.of("NetworkPolicy"):
        yield from _policy(one, every)
    for one in manifests.of("ServiceMonitor"):
        yield from _monitor(manifests, one)


def _policy(policy: Manifest, every: list[Workload]) -> Iterator[str]:
    name, spec = f"NetworkPolicy {policy['metadata']['name']}", policy["spec"]
    own = [one for one in every if selected(spec["podSelector"], one.labels)]
    if not own:
        yield f"{name}: selects no pods"
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        if direction in spec and direction.title() not in spec["policyTypes"]:
            yield f"{name}: has {direction} and no such policyType"
        for rule in spec.get(direction, ()):
            there: list[Workload] = []
            outside = peers not in rule
            for peer in rule.get(peers, ()):
                if set(peer) != {"podSelector"}:
                    outside = True
                    continue
                found = [one for one in every if selected(peer["podSelector"], one.labels)]
                there += found
                if not found:
                    yield f"{name}: {direction} with a podSelector that selects no pods"
            listening = own if direction == "ingress" else there
            if direction == "egress" and outside:
                continue
            have = {port for one in listening for port in one.ports.values()}
            for port in rule.get("ports", ()):
                if port["port"] not in have:
                    yield f"{name}: {direction} port {port['port']}, where nobody listens"


def _monitor(manifests: Manifests, monitor: Manifest) -> Iterator[str]:
    name, spec = f"ServiceMonitor {monitor['metadata']['name']}", monitor["spec"]
    services = [
        service
        for service in manifests.of("Service")
        if selected(spec["selector"], service["metadata"].get("labels", {}))
    ]
    if [service["metadata"]["name"] for service in services] != ["metrics"]:
        yield f"{name}: is for other Services than metrics"
    ports = {port["name"] for service in services for port in service["spec"]["ports"]}
    for endpoint in spec["endpoints"]:
        if endpoint["port"] not in ports:
            yield f"{name}: there is no port {endpoint['port']!r}"


def _kept(manifests: Manifests) -> Iterator[str]:
    """What holds data is not deleted by `kubectl delete -k`."""
    for one in manifests.of("Namespace", "PersistentVolumeClaim", "PersistentVolume"):
        yield f"{one['kind']} {one['metadata']['name']}: is deleted with the overlay"
    for one in manifests.of("StatefulSet"):
        if "Delete" in one["spec"].get("persistentVolumeClaimRetentionPolicy", {}).values():
            yield f"StatefulSet {one['metadata']['name']}: its claims are deleted with it"


def _unused(manifests: Manifests) -> Iterator[str]:
    used: set[tuple[str, str]] = set()
    for workload in with_jobs(manifests):
        for volume in workload.volumes.values():
            used.update((kind, about["name"]) for kind, about in sources(volume))
            used.add(
                ("PersistentVolumeClaim", volume.get("persistentVolumeClaim", {}).get("claimName"))
            )
        for container in workload.all_containers:
            for source in container.get("envFrom", ()):
                used.add(("ConfigMap", source["configMapRef"]["name"]))
            for entry in container.get("env", ()):
                if "secretKeyRef" in entry.get("valueFrom", {}):
                    used.add(("Secret", entry["valueFrom"]["secretKeyRef"]["name"]))
    for one in manifests.of("ConfigMap", "Secret", "PersistentVolumeClaim"):
        dashboard = "grafana_dashboard" in one["metadata"].get("labels", {})  # Grafana reads it
        if not dashboard and (one["kind"], one["metadata"]["name"]) not in used:
            yield f"{one['kind']} {one['metadata']['name']}: nobody uses it"
        if one["kind"] == "ConfigMap" and not texts(one):
            yield f"ConfigMap {one['metadata']['name']}: is empty"


_CHECKS = (
    _own_labels, _volumes, _environment, _services, _entrances, _selectors, _kept, _unused,
)  # fmt: skip
