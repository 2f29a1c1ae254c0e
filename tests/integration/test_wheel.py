"""The wheel takes one name at the top, so that a user's own files may have any other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.integration.command import BLOBS, GUARD_S, SCRIPT, TEST_GUARD_S

ROOT = Path(__file__).parents[2]
SOURCES = (
    "broker",
    "coordinator",
    "fedstream",
    "trainer",
    "updater",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
USES = "import broker, runtime, updater.models\nfrom {module} import outputs\n"
TASK = (USES + BLOBS).replace("nn.Linear(2, 2)", "nn.Linear(2, outputs)")
OWN = {  # a user's files, named like our folders
    "broker.py": "",
    "coordinator.py": "raise SystemExit('imported, though nobody asks for it')\n",
    "runtime/__init__.py": "",
    "updater/__init__.py": "",
    "updater/models.py": "",
}
FILE = (
    {**OWN, "outputs.py": "outputs = 2\n", "trainer.py": TASK.format(module="outputs")},
    "trainer.py:task",
)
PACKAGE = (
    {
        **OWN,
        "trainer/__init__.py": "",
        "trainer/models.py": "outputs = 2\n",
        "my_task.py": TASK.format(module="trainer.models"),
    },
    "my_task.py:task",
)
pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout. Built from a copy: what an earlier build left would get in."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in SOURCES:
        if (ROOT / name).is_file():
            shutil.copyfile(ROOT / name, source / name)
        else:
            unwanted = shutil.ignore_patterns("__pycache__", "results")
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    options = ("--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", built)
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, source], check=True)
    [found] = built.iterdir()
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which Python finds the wheel's files before those of this checkout."""
    target = tmp_path_factory.mktemp("site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    kept = {n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")}
    environ = {**kept, "PYTHONPATH": str(target)}
    code = "import fedstream; print(fedstream.__file__)"
    said = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environ, check=True, capture_output=True, text=True
    )
    assert said.stdout == f"{target}/fedstream/__init__.py\n"
    return environ


def write(layout: tuple[dict[str, str], str], folder: Path) -> str:
    """Puts a user's files into a folder; what --task is to be."""
    files, task = layout
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return task


def test_wheel_has_one_top_level_package_and_is_complete(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"fedstream"}
    scripts = {path.name for path in (ROOT / "broker" / "lua").iterdir()}
    assert {f"fedstream/broker/lua/{name}" for name in scripts} <= set(names)
    assert "fedstream/py.typed" in names


def test_task_in_a_package_named_like_ours_trains_live(
    installed: dict[str, str], tmp_path: Path
) -> None:
    """With a file of that name beside it: test_run.py."""
    task = write(PACKAGE, tmp_path)
    command = [str(SCRIPT), "run", "--task", task, "--versions", "3", "--trainers", "1", "--json"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=installed,
        check=False,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["versions"] == 3


def test_task_beside_files_named_like_ours_trains_in_a_simulation(
    installed: dict[str, str], tmp_path: Path
) -> None:
    task = write(FILE, tmp_path)
    # As a module the current folder comes first on the path, and in it the user's files.
    command = [sys.executable, "-m", "fedstream", "simulate", "--task", task, "--versions", "3"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=installed,
        check=False,
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
