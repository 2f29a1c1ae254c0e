"""What is rendered: every overlay as it is, and every component on the base."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tests.k8s.cluster.manifests import Manifests, rendered

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"

# What an overlay of one's own may put on top of production (device-owners takes the place of what
# KEDA scales).
_WITH = {
    "ingress": ("redis-tls",),
    "gateway-ingress": ("redis-tls", "gateway"),
    "gateway-route": ("redis-tls", "gateway"),
    "gateway-scaling": ("monitoring", "gateway"),
}
ADDITIONS = (
    "redis-aof", "redis-sentinel", "external-redis", "gpu", "no-data", "site", "sinks", "gateway"
)  # fmt: skip


def overlays() -> list[str]:
    """Their names."""
    return _folders(K8S / "overlays")


def components() -> list[str]:
    """Their names."""
    return _folders(K8S / "components")


def _folders(where: Path) -> list[str]:
    return sorted(path.parent.name for path in where.glob("*/kustomization.yaml"))


def combinations() -> dict[str, tuple[str, ...]]:
    """Components as they are put on the base, by the name of the combination.

    Each alone, but for what it is refused without.
    """
    return {name: (*_WITH.get(name, ()), name) for name in components()}


def renderings() -> Mapping[str, Callable[[], Manifests]]:
    """What renders each, by its name. Raises AssertionError with what kubectl said."""
    production = "overlays/production"
    return (
        {f"overlay {name}": partial(rendered, K8S / "overlays" / name) for name in overlays()}
        | {f"base with {name}": partial(on_base, *parts) for name, parts in combinations().items()}
        | {f"production with {name}": partial(_with, production, (name,)) for name in ADDITIONS}
    )


def on_base(*names: str) -> Manifests:
    """The base with these components, and the images. Raises AssertionError."""
    return _with("base", names)


def _with(resource: str, names: Sequence[str]) -> Manifests:
    parts = [f"- K8S/components/{name}" for name in names]
    lines = ["namespace: fedstream", f"resources: [K8S/{resource}]", "components:", *parts]
    return kustomized("\n".join([*lines, "- K8S/images"]))


def kustomized(text: str) -> Manifests:
    """A kustomization's rendering; it names the folder k8s as K8S. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder).resolve()
        up = os.path.relpath(K8S, here)  # kustomize takes folders by relative paths alone
        (here / "kustomization.yaml").write_text(text.replace("K8S", up))
        return rendered(here)
