"""Schemas: the oldest and the newest Kubernetes that the manifests are for, and custom resources.

Kubernetes' come with the package kubernetes-validate; those of KEDA and of the Prometheus operator
are in ``tests/k8s/schemas``, written by us for just the parts that we use.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import kubernetes_validate
from jsonschema import Draft202012Validator

from tests.k8s.cluster.manifests import Manifest, Manifests

VERSIONS = ("1.30", "1.37")  # lifecycle.preStop.sleep came with the first
_OWN = Path(__file__).parents[1] / "schemas"
_checked: dict[str, tuple[str, ...]] = {}  # an object is the same in most renderings


def schemas(manifests: Manifests) -> Iterator[str]:
    """What the API server would not take; unknown fields, which it would drop, among it."""
    for one in manifests:
        text = json.dumps(one, sort_keys=True)
        if text not in _checked:
            _checked[text] = tuple(_wrong(one))
        yield from _checked[text]


def _wrong(one: Manifest) -> Iterator[str]:
    name = f"{one['kind']} {one['metadata']['name']}"
    own = _own(one["kind"].lower(), one["apiVersion"])
    if own is not None:
        for error in own.iter_errors(one):
            yield f"{name}: {error.json_path}: {error.message}"
        return
    for version in VERSIONS:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(str(part) for part in error.path)
            yield f"{name}: Kubernetes {version}: {path}: {error.message}"
        except kubernetes_validate.SchemaNotFoundError as error:
            yield f"{name}: {error.message}"


@cache
def _own(kind: str, api: str) -> Draft202012Validator | None:
    path = _OWN / f"{kind}-{api.partition('/')[0].split('.')[0]}.json"
    if not path.is_file():
        return None
    schema = json.loads(path.read_text())
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)
