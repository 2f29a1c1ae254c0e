"""All checks of rendered objects, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tests.k8s.cluster.manifests import Manifests
from tests.k8s.policy.exposure import exposure
from tests.k8s.policy.networks import networks
from tests.k8s.policy.pods import images, probes, redis, repairable, restricted, spread
from tests.k8s.policy.references import references
from tests.k8s.policy.schemas import schemas
from tests.k8s.policy.settings import settings
from tests.k8s.policy.sites import sites

Check = Callable[[Manifests], Iterator[str]]

CHECKS: Mapping[str, Check] = {
    "schemas": schemas,  # first: the others take for granted that objects have their form
    "references": references,
    "settings": settings,
    "restricted": restricted,
    "probes": probes,
    "spread": spread,
    "repairable": repairable,
    "redis": redis,
    "networks": networks,
    "exposure": exposure,
    "sites": sites,
    "images": images,
}


def findings(manifests: Manifests) -> Iterator[str]:
    """What the checks say of one rendering; of objects that have not their form just that."""
    for name, check in CHECKS.items():
        said = [f"{name}: {line}" for line in check(manifests)]
        yield from said
        if said and check is schemas:
            return
