"""Linters of others over rendered manifests: kubernetes-validate, and checkov less its exceptions.

Schemas are those of the oldest and the newest Kubernetes that the manifests are for. Those of KEDA,
the Prometheus operator and the Gateway API are in ``tests/k8s/schemas``, for just the parts that we
use. checkov lives in an environment of its own (``make .venv-checkov/installed``), since its
dependencies exclude ours; its exceptions are in ``k8s/checkov.yaml``. It fetches nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import utils

from tests.k8s.manifests import K8S, ROOT, Manifest, Manifests

VERSIONS = ("1.30", "1.37")  # lifecycle.preStop.sleep came with the first
PROGRAM = ROOT / ".venv-checkov" / "bin" / "checkov"
EXCEPTIONS = K8S / "checkov.yaml"
_OWN = Path(__file__).parents[1] / "schemas"
_CHECKOV_WITHIN_S = 150.0
# It reads the same megabyte of definitions for every object.
utils.schema_contents = cache(utils.schema_contents)
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


@dataclass(frozen=True)
class Verdict:
    """What checkov said of several renderings."""

    wrong: tuple[str, ...]
    passed: int
    excepted: Mapping[str, int]  # failures let pass, by check


def exceptions() -> dict[str, str]:
    """Checks that may fail, and why. Raises ValueError for one without a reason."""
    found: dict[str, str] = {}
    for entry in yaml.safe_load(EXCEPTIONS.read_text()):
        if set(entry) != {"check", "reason"} or len(entry["reason"].split()) < 5:
            raise ValueError(f"{EXCEPTIONS.name}: {entry}: a check and its reason are wanted")
        found[entry["check"]] = entry["reason"]
    return found


def checkov(renderings: Mapping[str, Manifests], allowed: Mapping[str, str]) -> Verdict:
    """Runs it over all renderings. An exception that none of them needs is reported.

    Most objects are the same in many renderings: it sees each once, in the first that has it.
    """
    seen: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        for name, manifests in renderings.items():
            texts = {json.dumps(one, sort_keys=True): one for one in manifests}
            fresh = [one for text, one in texts.items() if text not in seen]
            seen |= texts.keys()
            file = Path(folder) / f"{name.replace(' ', '-').replace(',', '')}.yaml"
            file.write_text(yaml.dump_all(fresh, Dumper=yaml.CSafeDumper))
        said = _run(Path(folder))
    excepted = dict.fromkeys(allowed, 0)
    wrong: dict[str, None] = {}
    for failure in said["results"]["failed_checks"]:
        if failure["check_id"] in allowed:
            excepted[failure["check_id"]] += 1
            continue
        where = Path(failure["file_path"]).stem
        wrong[f"{where}: {failure['check_id']} {failure['check_name']}: {failure['resource']}"] = (
            None
        )
    for error in said["results"].get("parsing_errors", ()):
        wrong[f"{error} can't be read"] = None
    for check, times in excepted.items():
        if not times:
            wrong[f"{EXCEPTIONS.name}: nothing needs the exception {check} any more"] = None
    return Verdict(tuple(wrong), said["summary"]["passed"], excepted)


def _run(folder: Path) -> dict[str, Any]:
    quiet = {"BC_SKIP_MAPPING": "TRUE", "CHECKOV_RUN_SCA_PACKAGE_SCAN": "false"}
    command = [
        str(PROGRAM),
        "--directory",
        str(folder),
        "--framework",
        "kubernetes",
        "--skip-download",
        "--compact",
        "--soft-fail",
        "--output",
        "json",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_CHECKOV_WITHIN_S,
        check=False,
        env={**os.environ, **quiet},
        cwd=folder,
    )
    if done.returncode:
        raise RuntimeError(f"checkov ended with {done.returncode}: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    if said["summary"]["passed"] == 0:
        raise RuntimeError(f"checkov checked nothing: {done.stdout[-2000:]}")
    return said
