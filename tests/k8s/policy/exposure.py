"""Where others are let in: TLS, a token and a name on the way in, TLS behind it."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from fedstream.broker.errors import ConfigError
from tests.k8s.cluster.manifests import Manifests
from tests.k8s.policy.settings import read
from tests.k8s.policy.workloads import (
    Workload,
    entered,
    environment,
    hosts,
    mount_of,
    workloads,
)


def exposure(manifests: Manifests) -> Iterator[str]:
    """What an entrance must come with; nothing is wanted where there is none.

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
        return  # said by `settings`
    for host in sorted(hosts(manifests, "gateway") ^ names):
        yield f"{gateway.name}: gateway.names and the hosts that lead to it differ in {host!r}"
