"""A clone to type in, whose programs start in a tenth of the time."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from fedstream import __version__
from tests.broker.servers import redis_7
from tests.docs.elsewhere import stand_ins
from tests.docs.pages import ROOT
from tests.docs.reader import Reader
from tests.docs.shell import Shell
from tests.k8s.manifests import kubectl
from tests.trainer.test_builtin_tasks import idx

NOTHING: Mapping[str, str] = {}
BUILT = ("build", "dist", "runs", "site", "shared")  # what a clone does not have


@pytest.fixture(scope="session")
def bin_folder(tmp_path_factory: pytest.TempPathFactory, quick_programs: Path) -> Path:
    """Programs: fedstream, python and pip, the newest Redis, and what stands in for a cluster's."""
    folder = tmp_path_factory.mktemp("programs")
    for program in quick_programs.iterdir():
        (folder / program.name).symlink_to(program)
    # Where there is none, make makes the environment anew.
    (folder / "pip").symlink_to(Path(sys.executable).with_name("pip"))
    if server := redis_7():
        (folder / "redis-server").symlink_to(server)
    stand_ins(folder, kubectl(), __version__)
    return folder


@pytest.fixture
def clone(bin_folder: Path, tmp_path: Path) -> Path:
    """What `git clone` and `make` leave; files may be added."""
    folder = tmp_path / "fedstream"
    (folder / ".venv").mkdir(parents=True)
    (folder / ".venv" / "bin").symlink_to(bin_folder)
    for entry in ROOT.iterdir():
        if entry.name not in BUILT and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    (folder / ".venv" / "installed").touch()
    return folder


@pytest.fixture
def reader(clone: Path, bin_folder: Path) -> Iterator[Callable[..., Reader]]:
    """Opens a page: its path, the reader's environment, and what stands for something else."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("FEDSTREAM_", "KUBE"))}
    environ = kept | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:

        def opened(
            page: str, given: Mapping[str, str] = NOTHING, instead: Mapping[str, str] = NOTHING
        ) -> Reader:
            shell = Shell(clone, clone.parent / "terminal", environ | dict(given))
            return Reader(page, stack.enter_context(shell), instead)

        yield opened


@pytest.fixture(scope="session")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as MNIST's: every pixel of an image is twenty times its class."""
    root = tmp_path_factory.mktemp("data")
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    labels = np.tile(np.arange(10, dtype=np.uint8), 40)
    images = np.repeat(20 * labels, 28 * 28).reshape(-1, 28, 28)
    for name, part in (("train", slice(None)), ("t10k", slice(100))):
        (raw / f"{name}-images-idx3-ubyte").write_bytes(idx(images[part]))
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels[part]))
    return root
