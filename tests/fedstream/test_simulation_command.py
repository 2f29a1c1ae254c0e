"""`fedstream simulate`, as a command."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


def fedstream(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedstream", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "run"
    done = fedstream(
        "simulate", "--updates", "40", "--out", out, "--json", "--set", "simulation.threads=1"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads((out / "summary.json").read_text())
    return out


def test_it_leaves_what_a_run_leaves(folder: Path) -> None:
    from safetensors.numpy import load_file

    numbers = json.loads((folder / "summary.json").read_text())
    assert numbers["accuracy"] > 0.3
    assert (numbers["versions"], numbers["state"]) == (40, "finished")
    assert numbers["max_staleness"] <= 4
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["version"]) for row in rows] == list(range(41))
    assert rows[40]["accuracy"]
    assert (folder / "curves.png").stat().st_size > 10_000
    assert load_file(folder / "model.safetensors")["0.weight"].shape == (64, 64)


def test_replay_accepts_its_journal(folder: Path) -> None:
    done = fedstream("replay", folder)
    assert done.returncode == 0, done.stderr
    assert "40 of 40 versions identical" in done.stdout


def test_its_configuration_gives_the_same_run_again(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    done = fedstream("simulate", "--config", folder / "run.toml", "--out", again, "--no-journal")
    assert done.returncode == 0, done.stderr
    assert "finished (version 40 reached)" in done.stdout
    assert not (again / "journal").exists()
    assert (again / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()
    # not their bytes: safetensors writes what it says of the model in any order
    model, first = (load_file(run / "model.safetensors") for run in (again, folder))
    assert model.keys() == first.keys()
    assert all(torch.equal(model[name], first[name]) for name in model)


def test_a_folder_with_a_run_is_refused(folder: Path) -> None:
    done = fedstream("simulate", "--updates", "2", "--out", folder)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "holds a run already" in done.stderr


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("simulation.staleness.kind=old", "must be one of latency, none, recent, uniform"),
        ("simulation.staleness.most=-1", "simulation.staleness.most"),
        ("simulation.arrivals.weights=[0.5]", "simulation.arrivals"),
        ("simulation.batch=true", "did you mean simulation.batched"),
        ("strategy.name=scaffold", "solver.kind"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(key: str, said: str, tmp_path: Path) -> None:
    done = fedstream("simulate", "--out", tmp_path / "out", "--set", key)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert said in done.stderr
    assert not (tmp_path / "out").exists()
