"""Runs from Python whose processes start in a tenth of the time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded import programs


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python that starts fedstream's processes by a fork."""
    with programs(tmp_path_factory.mktemp("programs") / "bin") as folder:
        yield folder / "python"


@pytest.fixture
def quick(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fedstream.run`` in this process starts the run's processes with that Python."""
    monkeypatch.setattr(sys, "executable", str(python))
