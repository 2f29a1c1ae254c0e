"""What is checked of the files in k8s/ before they are rendered."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.k8s.policy.targets import K8S


def sources(root: Path = K8S) -> Iterator[str]:
    """Images have names here, and their places and tags in ``images`` alone."""
    table = yaml.safe_load((root / "images" / "kustomization.yaml").read_text())["images"]
    names = {entry["name"] for entry in table}
    used = set()
    for path in sorted(root.rglob("*.yaml")):
        where = path.relative_to(root)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            found = re.match(r"\s*(?:- )?image:\s*([^\s#]+)", line)
            if found is None:
                continue
            used.add(found[1])
            if found[1] not in names:
                yield f"{where}:{number}: image {found[1]!r} is not one of images/: {sorted(names)}"
        if where.parts[0] != "images" and re.search(r"^images:", path.read_text(), re.MULTILINE):
            yield f"{where}: images are named in images/ alone"
    for name in names - used:
        yield f"images/: nobody uses {name!r}"
