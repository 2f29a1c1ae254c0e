"""Every algorithm that takes deltas, live: `fedstream run`, what its journal says, and the same
arrivals simulated."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from fedstream.journal import Segment, Taken, cuts
from fedstream.journal.inspection import entries, model_at, opened
from fedstream.journal.rebuild import is_used, recovered
from fedstream.settings.config import read
from fedstream.simulation import Arrival, simulate
from tests.integration.command import SCRIPT, TEST_GUARD_S, Command, adds_up, held

pytestmark = [pytest.mark.process, pytest.mark.timeout(TEST_GUARD_S)]

VERSIONS = 10
RUNS = {  # each version is made of three updates
    "scaffold": (
        "--trainers", "2", "--set", "solver.kind=scaffold", "--set", "solver.lr=0.1",
        "--task", "digits_held.py:task",
    ),
    "fedbuff": ("--trainers", "1", "--set", "strategy.staleness.kind=polynomial"),
    "afa-cd": ("--trainers", "1", "--set", "solver.lr=0.1", "--set", "strategy.server_lr=0.5"),
    "afa-cs": ("--trainers", "1", "--set", "solver.lr=0.1", "--set", "strategy.server_lr=0.5"),
}  # fmt: skip
DIGITS = """
from fedstream import Task
from fedstream.trainer.digits import digits
from fedstream.trainer.task import TaskSettings

class Digits(Task):
    _as = digits(TaskSettings())
    devices, model, device_data, test_data = 10, _as.model, _as.device_data, _as.test_data
task = Digits()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Command]]:
    """All of them side by side: each spends most of its time starting."""
    folders = {name: tmp_path_factory.mktemp(name) for name in RUNS}
    (folders["scaffold"] / "digits_held.py").write_text(held(DIGITS, 4))
    commands = {
        name: Command(
            folders[name], "--strategy", name, "--versions", str(VERSIONS),
            "--set", "strategy.buffer_size=3", "--set", "journal.segment_versions=4", *more,
        )
        for name, more in RUNS.items()
    }  # fmt: skip
    yield commands
    for command in commands.values():
        command.clean_up()


def finished(command: Command, name: str) -> dict[str, Any]:
    """The summary of a run that came to its end, and whose replay is identical."""
    command.go()
    assert command.ended() == 0, command.stdout + command.stderr
    summary = command.summary
    assert adds_up(summary)
    assert (summary["strategy"], summary["state"]) == (name, "finished")
    tasks = summary["tasks"]
    assert (summary["versions"], tasks["applied"]) == (VERSIONS, VERSIONS)
    assert tasks["buffered"] == 2 * VERSIONS
    assert tasks["refused"] == tasks["dead"] == 0
    assert summary["accuracy"] > 0.3  # it has learned: guessing is 0.1
    said = subprocess.run(
        [SCRIPT, "replay", str(command.out), "--json"], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    replayed = json.loads(said.stdout)
    assert (replayed["made"], replayed["identical"]) == (VERSIONS, VERSIONS)
    return summary


def test_a_scaffold_run_whose_updater_is_killed_goes_on_to_the_same_bits(
    runs: dict[str, Command],
) -> None:
    command = runs["scaffold"]
    command.reaches(4)
    pid = command.pid("updater")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    restarts = finished(command, "scaffold")["restarts"]
    assert {name for name, times in restarts.items() if times} == {"updater"}
    with opened(command.out) as chain:
        assert {segment.head.epoch for segment in chain} == {1, 2}
        assert chain[-1].head.needs
        progress = recovered(chain[-1]).progress
    assert progress is not None
    vectors, c = progress.state.memory.devices, progress.state.model.controls
    assert vectors is not None
    assert np.any(c)
    assert c == pytest.approx(np.mean([vectors[n] for n in range(len(vectors))], axis=0), abs=1e-4)


@pytest.mark.parametrize("name", [name for name in RUNS if name != "scaffold"])
def test_a_run_ends_and_its_replay_is_identical(runs: dict[str, Command], name: str) -> None:
    command = runs[name]
    summary = finished(command, name)
    assert set(summary["restarts"].values()) == {0}
    with opened(command.out) as chain:
        assert len(chain) > 2
        assert all(bool(segment.head.needs) == (name == "afa-cs") for segment in chain[1:])


def arrivals_of(chain: list[Segment]) -> list[Arrival]:
    """What arrived, as the journal has it."""
    taken = [
        message
        for segment, cut in cuts(chain)
        for _, message in entries(segment, cut)
        if isinstance(message, Taken) and is_used(message)
    ]
    taus = [message.upload.tau for message in taken]
    return [
        Arrival(
            n=n, device=message.upload.device, seed=message.upload.seed or 0,
            steps=message.upload.steps, epochs=None, tau=message.upload.tau,
            version=message.version - (message.digest is not None),
            makes=message.digest is not None, oldest=min(taus[n:]), time=float(n),
        )
        for n, message in enumerate(taken)
    ]  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_the_same_arrivals_simulated_give_the_same_model(
    runs: dict[str, Command], name: str
) -> None:
    """Live through Redis, or in one process in virtual time: one code path, the same bits."""
    command = runs[name]
    finished(command, name)
    settings = read(command.out / "run.toml", ["simulation.batched=false", "simulation.threads=1"])
    with opened(command.out) as chain:
        simulated = simulate(settings, arrivals=arrivals_of(chain))
        assert simulated.versions[-1].version == VERSIONS
        assert simulated.model.digest() == model_at(chain, VERSIONS)[1]
