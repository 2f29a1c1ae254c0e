"""Manifests as a cluster would get them: rendered by kubectl, read, and found by kind and name."""

from __future__ import annotations

import base64
import math
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import yaml

Manifest: TypeAlias = dict[str, Any]  # one object, as YAML has it

_RENDERED_WITHIN_S = 100.0


class Unsupported(Exception):
    """A manifest wants what is not built here."""


def kubectl() -> Path | None:
    """Where kubectl is; None without it."""
    found = shutil.which("kubectl")
    return Path(found) if found else None


def rendered(folder: Path) -> Manifests:
    """What ``kubectl apply -k`` would send. Raises CalledProcessError with what kubectl said."""
    done = subprocess.run(
        [str(kubectl()), "kustomize", str(folder)],
        capture_output=True, text=True, timeout=_RENDERED_WITHIN_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise AssertionError(f"kubectl kustomize {folder}: {done.stderr.strip()}")
    return read(done.stdout)


def read(text: str) -> Manifests:
    """The objects of a YAML text."""
    return Manifests(one for one in yaml.load_all(text, yaml.CSafeLoader) if one)


class Manifests:
    """Objects by kind and name. One namespace is enough here."""

    def __init__(self, objects: Iterable[Manifest]) -> None:
        self._by: dict[tuple[str, str], Manifest] = {}
        for one in objects:
            key = (one["kind"], one["metadata"]["name"])
            if key in self._by:
                raise Unsupported(f"two objects are {key[0]} {key[1]!r}")
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

    def put(self, one: Manifest) -> None:
        """Adds an object, or replaces the one of the same name."""
        self._by[one["kind"], one["metadata"]["name"]] = one

    def drop(self, kind: str, name: str) -> None:
        """Takes an object out. Raises KeyError if it is not there."""
        del self._by[kind, name]

    @property
    def namespace(self) -> str:
        """Where the objects live: the one that most are in."""
        names = [one["metadata"].get("namespace", "default") for one in self]
        return max(names, key=names.count, default="default")


def texts(one: Manifest) -> dict[str, str]:
    """What a ConfigMap or Secret holds, decoded."""
    if one["kind"] == "Secret":
        coded = {
            key: base64.b64decode(text, validate=True).decode()
            for key, text in (one.get("data") or {}).items()
        }
        return coded | (one.get("stringData") or {})
    return dict(one.get("data") or {})


def share(value: int | str, whole: int, *, up: bool) -> int:
    """A number as it is, or a percentage of ``whole``, rounded: ``maxSurge`` and its like."""
    if isinstance(value, int):
        return value
    part = int(value.removesuffix("%")) * whole / 100
    return math.ceil(part) if up else math.floor(part)


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector is for a pod of these labels. An empty one selects nothing here.

    A Service's selector is labels alone, a workload's has ``matchLabels``.
    """
    if "matchExpressions" in selector:
        raise Unsupported("a selector with matchExpressions")
    wanted = selector.get("matchLabels", selector)
    return bool(wanted) and all(labels.get(name) == value for name, value in wanted.items())
