"""Sites and gateways: each has a user in Redis, and coordinators that serve it."""

from __future__ import annotations

from collections.abc import Iterator

from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import GATEWAY, POOL
from fedstream.coordinator.sites import served
from fedstream.operate.acl import variable
from tests.k8s.cluster.manifests import Manifest, Manifests
from tests.k8s.policy.settings import read
from tests.k8s.policy.workloads import Workload, workloads


def sites(manifests: Manifests) -> Iterator[str]:
    """Whose password others have is no site; a gateway is the operator's own."""
    coordinator = Workload(manifests.get("Deployment", "coordinator"))
    for workload in workloads(manifests):
        container = workload.containers[0]
        if container.get("args") not in (["trainer"], ["gateway"]):
            continue
        try:
            found = read(manifests, workload, container)
            settings = read(manifests, coordinator, coordinator.containers[0]).coordinator
        except ConfigError:
            continue  # said by `settings`
        is_gateway = container["args"] == ["gateway"]
        site = found.gateway.site if is_gateway else found.trainer.site
        if site == POOL:
            continue
        if site not in served(settings.sites, settings.trusted_sites):
            yield f"{workload.name}: coordinator.sites does not name {site!r}"
        secret = _secret(container, "FEDSTREAM_REDIS__PASSWORD")
        for other in workloads(manifests):
            shares = [one for one in other.containers if secret in _secrets(one)]
            if other.name != workload.name and shares and not is_gateway:
                yield f"{workload.name}: {other.name} has the Secret of its site, {secret!r}"
        if (redis := manifests.find("StatefulSet", "redis")) is None:
            continue
        name = "FEDSTREAM_PASSWORD_GATEWAY" if site == GATEWAY else variable(site)
        given = {_secret(one, name) for one in Workload(redis).all_containers}
        if secret not in given:
            yield f"{workload.name}: Redis's users are made without {name} of {secret!r}"


def _secret(container: Manifest, name: str) -> str | None:
    """The Secret that a variable comes from."""
    for entry in container.get("env", ()):
        if entry["name"] == name and "secretKeyRef" in entry.get("valueFrom", {}):
            return str(entry["valueFrom"]["secretKeyRef"]["name"])
    return None


def _secrets(container: Manifest) -> set[str | None]:
    return {_secret(container, entry["name"]) for entry in container.get("env", ())}
