"""Runs from Python whose processes start in a tenth of the time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def quick(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``fedstream.run`` in this process starts the run's processes with that Python."""
    monkeypatch.setattr(sys, "executable", str(python))


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """SIGINT interrupts, even if the tests were started in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
