"""Sites and gateways: each has a user in Redis, and coordinators that serve it."""

from __future__ import annotations

from collections.abc import Iterator

from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import POOL
from fedstream.coordinator.sites import served
from tests.k8s.cluster.manifests import Manifests
from tests.k8s.policy.settings import read
from tests.k8s.policy.workloads import Workload, secret_at, sources, workloads


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
        secret, _ = secret_at(workload, container, found.redis.password_file or "") or (None, "")
        redis = manifests.find("StatefulSet", "redis")
        for other in workloads(manifests):
            has = other.name not in (workload.name, "StatefulSet redis") and secret in _secrets(
                other
            )
            if has and not is_gateway:
                yield f"{workload.name}: {other.name} has the Secret of its site, {secret!r}"
        if redis is not None and secret not in _secrets(Workload(redis)):
            yield f"{workload.name}: Redis's users are made without the password of {secret!r}"


def _secrets(workload: Workload) -> set[str]:
    """The Secrets that a workload's pods have."""
    return {
        about["name"]
        for volume in workload.volumes.values()
        for kind, about in sources(volume)
        if kind == "Secret"
    }
