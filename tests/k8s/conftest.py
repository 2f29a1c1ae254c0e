"""What stands in the way of running the manifests here: told, or in CI a failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn, Protocol

import pytest
import yaml

from tests.k8s.cluster import image
from tests.k8s.cluster.forks import Zygote
from tests.k8s.cluster.image import Image
from tests.k8s.cluster.manifests import Manifests, kubectl, rendered
from tests.k8s.policy.targets import K8S


def missing(what: str) -> NoReturn:
    """Skips the test; in CI it fails."""
    if os.environ.get("FEDSTREAM_CI") == "1":
        pytest.fail(f"{what}; in CI it has to be there")
    pytest.skip(what)


@pytest.fixture(scope="session")
def images() -> Iterator[dict[str, Image]]:
    """The manifests' images, as what is installed here."""
    if sys.platform != "linux":
        pytest.skip("pods have addresses in 127.0.0.0/8, which only Linux gives away")
    redis = image.redis()
    if redis is None:
        missing("the users' rights need a redis-server of 7.0 or later with its redis-cli")
    with closing(Zygote()) as zygote:
        yield {"fedstream": image.fedstream(zygote), "redis": redis}


class Kustomized(Protocol):
    """Renders an overlay with components, settings and a task of the test's own on top of it."""

    def __call__(self, overlay: str, *components: str, task: str, **settings: str) -> Manifests:
        """``task`` is the module's text, ``settings`` are configuration keys."""


@pytest.fixture
def kustomized(tmp_path: Path) -> Kustomized:
    """Needs kubectl."""
    if kubectl() is None:
        missing("kubectl is not on PATH: it renders the manifests")
    up = os.path.relpath(K8S, (tmp_path / "layers" / "one").resolve())  # no others are taken

    def render(overlay: str, *components: str, task: str, **settings: str) -> Manifests:
        chosen = {
            "kind": "Kustomization", "resources": [f"{up}/overlays/{overlay}"],
            "components": [f"{up}/components/{name}" for name in components],
        }  # fmt: skip
        literals = [f"FEDSTREAM_{name}={value}" for name, value in settings.items()]
        added = {
            "kind": "Kustomization", "namespace": "fedstream", "resources": ["../chosen"],
            "configMapGenerator": [
                {"name": "fedstream-settings", "behavior": "merge", "literals": literals},
                {"name": "fedstream-task", "behavior": "replace", "files": ["task.py"]},
            ],
        }  # fmt: skip
        for name, content in (("chosen", chosen), ("added", added)):
            folder = tmp_path / "layers" / name
            folder.mkdir(parents=True)
            (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
        (folder / "task.py").write_text(task)
        return rendered(folder)

    return render
