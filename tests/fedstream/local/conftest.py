"""What is asked of `fedstream run` without an option."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedstream.local.request import RunRequest
from fedstream.settings.config import Settings


@pytest.fixture
def asked(tmp_path: Path) -> RunRequest:
    return RunRequest(Settings(), out=tmp_path / "out")
