"""Faults that a strict reading of the journal found: each came back wrong before it was mended."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.updater.breaking import Disk, End


@pytest.fixture(autouse=True)
def idle_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets for how many milliseconds the queue is empty before the updater is idle: 20."""

    def idle_after(milliseconds: int) -> None:
        monkeypatch.setattr("fedstream.updater.loop.BLOCK_MS", milliseconds)

    idle_after(20)
    return idle_after


@pytest.fixture
def never_idle(idle_after: Callable[[int], None]) -> None:
    """The updater is never idle, unless ``idle_after`` is told otherwise."""
    idle_after(3_600_000)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk that the journal is on."""
    disk = Disk()
    monkeypatch.setattr(os, "pwritev", disk.pwritev)
    return disk


@pytest.fixture
def end(folder: Path, tmp_path: Path) -> End:
    """The end of the journal."""
    return End(folder, tmp_path / "aside")
