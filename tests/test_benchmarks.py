"""Benchmarks leave no processes behind."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import flat

# A crowd that is told to stop while it forks; its members end by themselves, but later.
STOPPED = """
import os, signal, sys, time
from benchmarks import crowd

fork = os.fork

def forking():
    if pid := fork():
        os.kill(os.getpid(), signal.SIGTERM)
    return pid

os.fork = forking
crowd._serve = lambda words: time.sleep(60) or 0
sys.argv = ["crowd", "a", "b", "c"]
crowd.main()
"""


@pytest.mark.process
def test_crowd_that_is_told_to_stop_leaves_nobody() -> None:
    """Its members have its standard output, so that ends only with the last of them."""
    done = subprocess.run(
        [sys.executable, "-c", STOPPED], cwd=Path(__file__).parents[1], capture_output=True,
        text=True, timeout=40, check=False,
    )  # fmt: skip
    assert (done.returncode, len(done.stdout.split())) == (0, 3), done.stderr


@pytest.mark.parametrize("fails_at", range(len(flat.SERVICES) + 1))
def test_deployment_that_cannot_start_is_stopped(
    monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    started: list[str] = []
    ended: list[str] = []

    def start(command: list[str], **_: Any) -> SimpleNamespace:
        if len(started) == fails_at:
            raise OSError("no more processes")
        name = command[2]
        started.append(name)
        return SimpleNamespace(
            send_signal=lambda _: None, wait=lambda _: ended.append(name), stdout=None
        )

    server = SimpleNamespace(url="redis://127.0.0.1:1")
    monkeypatch.setattr(flat, "RedisServer", lambda: nullcontext(server))
    monkeypatch.setattr("subprocess.Popen", start)
    with pytest.raises(OSError, match="no more processes"):
        flat.measured(flat.CELLS[0], 1.0)
    assert (len(started), ended) == (fails_at, started)
