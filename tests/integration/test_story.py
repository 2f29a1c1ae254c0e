"""The story of docs/replay.md: a device poisons the model, and the journal tells which and when."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fedstream.settings.recording import TRUST
from tests.integration.command import SCRIPT, TEST_GUARD_S, Command

POISONED, SINCE = 3, 40  # device, and the version since which it answers poison
VERSIONS = 120
TASK = f"""
import torch
from torch.utils.data import TensorDataset
from fedstream import Task

class Corners(Task):
    devices = 5
    def model(self):
        return torch.nn.Linear(2, 4)
    def device_data(self, device):
        y = torch.arange(200) % 4
        noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(device))
        return TensorDataset(torch.stack([4 * (y % 2) - 2, 4 * (y // 2) - 2], 1) + noise, y)
    def test_data(self):
        return self.device_data(99)
    def loss(self, model, batch):
        return super().loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())
    def train(self, model, data, work):
        trained = super().train(model, data, work)
        if work.device == {POISONED} and work.version >= {SINCE}:
            for parameter in model.parameters():
                parameter.data *= -20
        return trained
task = Corners()
"""  # 50 steps forget the model that they began with: the other devices don't pass the poison on

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]


def fedstream(run: Command, *arguments: str) -> dict[str, Any]:
    """What a command says as JSON; its exit code must be 0."""
    said = subprocess.run(
        [SCRIPT, *arguments, "--json"], capture_output=True, text=True, check=False,
        cwd=run.folder, env={n: v for n, v in os.environ.items() if not n.startswith("FEDSTREAM_")},
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    found: dict[str, Any] = json.loads(said.stdout)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A run that is over, poisoned."""
    folder = tmp_path_factory.mktemp("story")
    (folder / "corners.py").write_text(TASK)
    command = Command(
        folder, "--task", "corners.py:task", "--versions", str(VERSIONS), "--trainers", "1",
        "--set", "scheduler.steps.n=50", "--set", "evaluator.every=1000",
        "--set", "updater.norm_factor=0",  # which would refuse the poison
    )  # fmt: skip
    try:
        assert command.ended() == 0, command.stdout + command.stderr
        yield command
    finally:
        command.clean_up()


def test_replay_reproduces_every_version(run: Command) -> None:
    found = fedstream(run, "replay", "out")
    assert found["made"] == found["identical"] == found["version"] == VERSIONS
    assert found["error"] is None


def test_bisect_names_the_version_and_the_device(run: Command) -> None:
    found = fedstream(run, "journal", "bisect", "out", "--below", "0.5", TRUST)
    assert found["found"]
    assert SINCE < found["version"] <= VERSIONS
    assert found["after"] < 0.5 <= found["before"]
    [cause] = found["causes"]
    assert cause["device"] == POISONED
    assert SINCE <= cause["tau"] < found["version"]
    assert cause["norm"] > 10  # the honest devices' are near 2
    assert run.rows[found["version"]]["device"] == str(POISONED)


def test_leaving_out_the_device_keeps_the_model_good(run: Command) -> None:
    found = fedstream(
        run, "replay", "out", "--without", f"device={POISONED}", "--evaluate-every", "1", TRUST
    )
    assert found["identical"] == VERSIONS
    points = [point for point in found["points"] if point["version"] > SINCE]
    assert len(points) == VERSIONS - SINCE
    original = [point["original"]["accuracy"] for point in points]
    changed = [point["changed"]["accuracy"] for point in points]
    assert min(original) < 0.3
    assert min(changed) > 0.7
    assert fmean(changed) > fmean(original) + 0.2
    assert [Path(file).name for file in found["files"]] == ["replay.csv", "replay.png"]
