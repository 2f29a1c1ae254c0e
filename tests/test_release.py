"""The release workflow: what nothing here can run is held to its schema and to its own rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
PATH = ROOT / ".github" / "workflows" / "release.yaml"
TEXT = PATH.read_text()
WORKFLOW = yaml.safe_load(TEXT)
JOBS: dict[str, dict[str, Any]] = WORKFLOW["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]


def test_jobs_have_only_the_rights_they_need() -> None:
    assert WORKFLOW["permissions"] == {}
    rights = {name: job["permissions"] for name, job in JOBS.items()}
    assert rights == {
        "test": {"contents": "read"},
        "build": {"contents": "read", "id-token": "write", "attestations": "write"},
        "image": {"contents": "read", "packages": "write", "id-token": "write"},
        "publish": {"contents": "write"},
    }
    assert all("timeout-minutes" in job for job in JOBS.values())


def test_releases_are_tested_and_attested() -> None:
    assert JOBS["build"]["needs"] == "test"
    assert JOBS["publish"]["needs"] == ["build", "image"]
    assert any(step.get("run") == "bash .ci/run" for step in JOBS["test"]["steps"])
    order = [
        step["uses"].partition("@")[0] if "uses" in step else step["run"]
        for step in JOBS["build"]["steps"]
    ]
    wanted = [
        "make dist",
        "make sbom",
        "actions/attest-build-provenance",
        "actions/attest-sbom",
        "actions/upload-artifact",
    ]
    assert [one for one in order if one in wanted] == wanted
    made = next(step["with"] for step in STEPS if "attest-build" in step.get("uses", ""))
    bill = next(step["with"] for step in STEPS if "attest-sbom" in step.get("uses", ""))
    assert made["subject-path"] == "dist/*", "everything that is published"
    assert bill == {"subject-path": "dist/*.whl", "sbom-path": "dist/fedstream.cdx.json"}


def test_images_are_scanned_before_they_are_pushed_and_signed_by_digest() -> None:
    image = JOBS["image"]
    assert image["needs"] == "test"
    tags = {one["suffix"]: one["torch"] for one in image["strategy"]["matrix"]["include"]}
    assert tags == {"": "cpu", "-helper": "none"}
    scan, push, sign = (
        next(
            n for n, step in enumerate(image["steps"]) if text in step.get("uses", step.get("run"))
        )
        for text in ("anchore/scan-action", "docker push", "cosign sign")
    )
    assert scan < push < sign
    assert "RepoDigests" in image["steps"][push]["run"]
    assert image["steps"][sign]["run"] == 'cosign sign --yes "$(cat "$FILE")"'


def test_workflows_run_existing_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    wanted = re.findall(r"run: make (\w+)", TEXT)
    assert wanted == ["dist", "sbom"]
    for target in wanted:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    [bill] = {step["with"]["sbom-path"] for step in STEPS if "sbom-path" in step.get("with", {})}
    assert bill in makefile
