"""The manifests in k8s/, rendered by kubectl: overlays, and components on the base."""

from __future__ import annotations

import base64
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]  # one object, as YAML has it

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"

_RENDERED_WITHIN_S = 100.0


def kubectl() -> Path | None:
    """Where kubectl is; None without it."""
    found = shutil.which("kubectl")
    return Path(found) if found else None


def rendered(folder: Path) -> Manifests:
    """Objects that ``kubectl apply -k`` would send. Raises AssertionError with kubectl's error."""
    done = subprocess.run(
        [str(kubectl()), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=_RENDERED_WITHIN_S,
        check=False,
    )
    if done.returncode:
        raise AssertionError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    return Manifests(one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one)


class Manifests:
    """Objects by kind and name. One namespace is enough here."""

    def __init__(self, objects: Iterable[Manifest]) -> None:
        self._by: dict[tuple[str, str], Manifest] = {}
        for one in objects:
            key = (one["kind"], one["metadata"]["name"])
            if key in self._by:
                raise ValueError(f"two objects are {key[0]} {key[1]!r}")
            self._by[key] = one

    def __iter__(self) -> Iterator[Manifest]:
        return iter(self._by.values())

    def of(self, *kinds: str) -> list[Manifest]:
        """All objects of these kinds."""
        return [one for one in self if one["kind"] in kinds]

    def find(self, kind: str, name: str) -> Manifest | None:
        """One object; None if there is none."""
        return self._by.get((kind, name))

    def get(self, kind: str, name: str) -> Manifest:
        """One object that must be there. Raises KeyError."""
        return self._by[kind, name]


def texts(one: Manifest) -> dict[str, str]:
    """What a ConfigMap or Secret holds, decoded."""
    if one["kind"] == "Secret":
        coded = {
            key: base64.b64decode(text, validate=True).decode()
            for key, text in (one.get("data") or {}).items()
        }
        return coded | (one.get("stringData") or {})
    return dict(one.get("data") or {})


# A component beside k8s/components: it comes after those that bring pods, which it changes too.
PRIVATE = "private"

# Components that others refuse to be without.
NEEDS: Mapping[str, tuple[str, ...]] = {
    "ingress": ("redis-tls",),
    "route": ("redis-tls",),
    "gateway-ingress": ("redis-tls", "gateway"),
    "gateway-route": ("redis-tls", "gateway"),
}
# Components that take each other's place.
APART = [
    {"redis-aof", "redis-sentinel"},
    {"redis-aof", "external-redis"},
    {"redis-sentinel", "external-redis"},
    {"redis-tls", "external-redis"},
    {"device-owners", "keda"},
    {"device-owners", "gpu"},
]
ADDITIONS = ("gpu", "no-data", "site", "sinks", "gateway", "backup", PRIVATE)


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
    production, owners = "overlays/production-aof", ("device-owners", "site", "gateway", PRIVATE)
    return (
        {f"overlay {name}": partial(rendered, K8S / "overlays" / name) for name in overlays()}
        | {f"base with {name}": partial(on_base, *parts) for name, parts in combinations().items()}
        | {f"production with {name}": partial(_with, production, (name,)) for name in ADDITIONS}
        | {f"{PRIVATE} with owners": partial(on_base, *owners)}
        | {"helper": partial(rendered, K8S / "helper")}
    )


def on_base(*names: str) -> Manifests:
    """The base with these components, and the images. Raises AssertionError."""
    return _with("base", names)


def _with(resource: str, names: Sequence[str]) -> Manifests:
    parts = [f"- K8S/{name if name == PRIVATE else f'components/{name}'}" for name in names]
    lines = ["namespace: fedstream", f"resources: [K8S/{resource}]", "components:", *parts]
    return kustomized("\n".join([*lines, "- K8S/images"]))


def kustomized(text: str) -> Manifests:
    """A kustomization's rendering; it names the folder k8s as K8S. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder).resolve()
        up = os.path.relpath(K8S, here)  # kustomize takes folders by relative paths alone
        (here / "kustomization.yaml").write_text(text.replace("K8S", up))
        return rendered(here)
