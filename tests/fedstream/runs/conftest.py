"""Runs that the tests of this room read: recorded journals, and a simulation."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedstream.settings.config import read
from fedstream.simulation.run import run
from tests.journals import GOLDEN


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded journals, one folder for each strategy."""
    folder = tmp_path_factory.mktemp("golden")
    for packed in GOLDEN.glob("*/*.gz"):
        into = folder / packed.parent.name
        into.mkdir(exist_ok=True)
        (into / packed.stem).write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run of 30 versions by fedasync, measured every 10; its devices at the end."""
    out = tmp_path_factory.mktemp("simulated") / "fedasync"
    keys = ["run.versions=30", "simulation.threads=1", "solver.lr=0.05"]
    settings = read(None, [*keys, "evaluator.per_device=last"])
    run(settings, out, journal=True, quiet=True)
    return out
