"""`make docs` fails on what is broken: it has to be strict, and stay so."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
BROKEN = {
    "[a page](nothere.md)": "'nothere.md', but the target is not found",
    "[an anchor](#nothere)": "'#nothere', but there is no such anchor",
    "[another page's anchor](replay.md#nothere)": "does not contain an anchor '#nothere'",
    "[from the root](/tasks.md)": "an absolute link '/tasks.md'",
    "[a file outside](../nothere.md)": "../nothere.md does not exist",
    "![a picture](https://example.org/a.png)": "loads https://example.org/a.png",
    '<script src="//example.org/a.js"></script>': "loads //example.org/a.js",
}


@pytest.mark.skipif(not MKDOCS.is_file(), reason="mkdocs is not installed: make docs")
def test_everything_broken_is_reported_and_fails(tmp_path: Path) -> None:
    """Also that nothing else is: the other pages are as they are in docs/."""
    for entry in ROOT.iterdir():  # what pages link to, and the sources of the Python reference
        if entry.name not in ("docs", "mkdocs.yml", "site"):
            (tmp_path / entry.name).symlink_to(entry)
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "tasks.md").open("a") as page:
        page.write("\n\n" + "\n\n".join(BROKEN) + "\n")
    built = subprocess.run(
        [MKDOCS, "build", "--strict"], cwd=tmp_path, check=False, capture_output=True, text=True
    )
    assert built.returncode == 1
    found = re.findall(r"^WARNING +-  (.*)$", built.stderr, re.MULTILINE)
    for expected in BROKEN.values():
        [line] = [line for line in found if expected in line]
        found.remove(line)
    assert found == []
