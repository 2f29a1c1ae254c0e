"""checkov's policies over rendered manifests, less the exceptions of k8s/checkov.yaml.

checkov lives in an environment of its own (``make .venv-checkov/installed``): what it depends on
fights with what we do. It fetches nothing and tells nobody.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.cluster.manifests import Manifests
from tests.k8s.policy.targets import K8S, ROOT

PROGRAM = ROOT / ".venv-checkov" / "bin" / "checkov"
EXCEPTIONS = K8S / "checkov.yaml"
_WITHIN_S = 150.0


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
    """Runs it over all renderings. An exception that none of them needs is reported."""
    with tempfile.TemporaryDirectory() as folder:
        for name, manifests in renderings.items():
            file = Path(folder) / f"{name.replace(' ', '-').replace(',', '')}.yaml"
            file.write_text(yaml.dump_all(list(manifests), Dumper=yaml.CSafeDumper))
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
        str(PROGRAM), "--directory", str(folder), "--framework", "kubernetes",
        "--skip-download", "--compact", "--soft-fail", "--output", "json",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_WITHIN_S, check=False,
        env={**os.environ, **quiet}, cwd=folder,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"checkov ended with {done.returncode}: {done.stderr[-2000:]}")
    said: dict[str, Any] = json.loads(done.stdout)
    if said["summary"]["passed"] == 0:
        raise RuntimeError(f"checkov checked nothing: {done.stdout[-2000:]}")
    return said
