"""A poisoned journal, written once for all modules that look for the poison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fedstream.recordings.scribes import (
    Digits,
)


@pytest.fixture(scope="session")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Device 7 pushes a scaled model at version 23 of 30."""
    torch.set_num_threads(1)  # more would wait for each other on models as small as this
    folder = tmp_path_factory.mktemp("poisoned")
    scribe = Digits(folder / "journal")
    for version in range(1, 31):
        scribe.learns(7 if version == 23 else version % 5, -1000.0 if version == 23 else 1.0)
        if version == 20:
            scribe.segment()
    scribe.close()
    return folder
