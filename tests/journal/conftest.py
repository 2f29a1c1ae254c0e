"""Where the tests' journals are."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the journal is."""
    return tmp_path / "journal"
