"""What is rendered: every overlay as it is, and every component on the base."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from tests.k8s.cluster.manifests import Manifest, Manifests, rendered

ROOT = Path(__file__).parents[3]
K8S = ROOT / "k8s"

# Components that others refuse to be without.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "ingress": ("redis-tls",),
    "gateway-ingress": ("redis-tls", "gateway"),
    "gateway-route": ("redis-tls", "gateway"),
}
# Components that take each other's place.
APART = [
    {"redis-aof", "redis-sentinel"}, {"redis-aof", "external-redis"},
    {"redis-sentinel", "external-redis"}, {"redis-tls", "external-redis"},
    {"device-owners", "keda"}, {"device-owners", "gpu"},
]  # fmt: skip
ADDITIONS = ("gpu", "no-data", "site", "sinks", "gateway", "backup")


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
    return {name: (*NEEDS.get(name, ()), name) for name in components()}


def together(number: int) -> list[tuple[str, ...]]:
    """The sets of so many components that do not exclude each other."""
    found = itertools.combinations(components(), number)
    return [names for names in found if not any(pair <= {*names} for pair in APART)]


def largest() -> list[tuple[str, ...]]:
    """The sets of components that no other component can be added to."""
    found: list[set[str]] = [set(components())]
    for pair in APART:
        parted = [those - {name} for those in found if pair <= those for name in pair]
        found = [those for those in found if not pair <= those] + parted
    return sorted({tuple(sorted(one)) for one in found if not any(one < other for other in found)})


def differences(orders: Iterable[Sequence[str]]) -> Iterator[str]:
    """The objects that differ between the first order of components and another one."""
    first, *others = orders
    expected = _objects(first)
    for order in others:
        found = _objects(order)
        for key in expected.keys() | found.keys():
            if expected.get(key) != found.get(key):
                yield f"{' '.join(key)}: with {', '.join(first)} and with {', '.join(order)}"


def _objects(order: Sequence[str]) -> dict[tuple[str, str], Any]:
    return {_key(one): _in_order(one) for one in on_base(*order)}


def _key(one: Manifest) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def _in_order(value: Any) -> Any:
    """An object with lists of named things by name: their order means nothing to Kubernetes."""
    if isinstance(value, dict):
        return {key: _in_order(inner) for key, inner in value.items()}
    if isinstance(value, list):
        items = [_in_order(one) for one in value]
        named = all(isinstance(one, dict) and "name" in one for one in items)
        return sorted(items, key=itemgetter("name")) if named else items
    return value


def renderings() -> Mapping[str, Callable[[], Manifests]]:
    """What renders each, by its name. Raises AssertionError with what kubectl said."""
    production = "overlays/production-aof"
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
