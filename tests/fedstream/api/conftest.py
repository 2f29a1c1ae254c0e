"""Runs from Python whose processes start in a tenth of the time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture
def quick(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fedstream.run`` in this process starts the run's processes with that Python."""
    monkeypatch.setattr(sys, "executable", str(python))
