"""`fedstream sweep`, as a command."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from fedstream.core.errors import FedstreamError
from fedstream.sweep.parallel import each
from tests.fedstream.conftest import Command

TASK = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task


class Mine(Task):
    devices = 3

    def model(self):
        return torch.nn.Linear(5, 2)

    def device_data(self, device):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(device))
        return TensorDataset(x, (x[:, 0] > 0).long())

    def test_data(self):
        return self.device_data(99)
"""
FRAGILE = f"""
from pathlib import Path
{TASK}

class Fragile(Mine):
    def __init__(self, fixed: str):
        self.fixed = Path(fixed)

    def train(self, model, data, work):
        if work.solver.lr == 0.1 and not self.fixed.exists():
            raise ValueError("not with 0.1")
        return super().train(model, data, work)
"""
OPTIONS = ("--set", "simulation.threads=1", "--versions", "12", "--jobs", "1")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("swept") / "swept_task.py"
    file.write_text(TASK)
    return f"{file}:Mine"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sweep") / "out"


def test_a_sweep_finds_the_best_and_a_longer_one_adds_to_it(
    command: Command, task: str, out: Path, tmp_path: Path
) -> None:
    arguments = ("sweep", "--task", task, *OPTIONS, "--out", out)
    # A step of 1e-6 learns nothing.
    code, said, _ = command(*arguments, "--over", "solver.lr=1e-6,1", "--repeats", "2")
    assert code == 0
    assert "2 configurations, 4 runs, 0 of them done already" in said
    assert "solver.lr = 1e-06, repeat 0: accuracy" in said
    best = tomllib.loads((out / "best.toml").read_text())
    assert best["solver"]["lr"] == 1
    assert (out / "best.toml").read_text().startswith("# The best of 2 configurations: last accu")
    assert (out / "sweep.png").stat().st_size > 10_000

    code, said, _ = command(*arguments, "--over", "solver.lr=1e-6,1,0.5", "--repeats", "2")
    assert code == 0
    assert "3 configurations, 6 runs, 4 of them done already" in said
    assert len((out / "runs.jsonl").read_text().splitlines()) == 6

    code, said, _ = command(*arguments, "--over", "solver.lr=1,1e-6", "--repeats", "2", "--json")
    first, second = json.loads(said)
    assert (first["keys"], first["runs"]) == ({"solver.lr": 1}, 2)
    assert second["mean"] < first["mean"]

    code, said, _ = command(
        "simulate", "--config", out / "best.toml", "--out", tmp_path / "again", "--json"
    )
    assert json.loads(said)["accuracy"] == pytest.approx(first["values"][0])  # its first repeat


def test_a_configuration_that_is_wrong_is_named_before_anything_runs(
    command: Command, task: str, tmp_path: Path
) -> None:
    over = ("--over", "strategy.name=fedbuff,fedasync", "--over", "strategy.buffer_size=2,4")
    code, _, said = command("sweep", "--task", task, *OPTIONS, "--out", tmp_path / "out", *over)
    assert code == 2
    assert said.startswith(
        "fedstream: with strategy.name = fedasync: strategy.buffer_size = 2 (from --over): "
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--over", "solver.lr=1,2", "--goal", "most"), "--goal most: must be max or min"),
        (("--over", "task.seed=1,2"), "task.seed has no effect"),
        (("--over", "solver.lrr=1,2"), "fedstream: solver.lrr = 1 (from --over): unknown key"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    wrong: tuple[str, ...], why: str, command: Command, task: str, tmp_path: Path
) -> None:
    code, _, said = command("sweep", "--task", task, "--out", tmp_path / "out", *wrong)
    assert code == 2
    assert why in said


def test_a_sweep_in_which_every_run_fails_says_why(
    command: Command, task: str, tmp_path: Path
) -> None:
    arguments = ("sweep", "--task", task, *OPTIONS, "--out", tmp_path / "out", "--repeats", 1)
    wild = ("--over", "solver.lr=1e30,1e31", "--set", "solver.weight_decay=1e9")
    code, _, said = command(*arguments, *wild)
    assert code == 1
    assert "every run failed; the first one: 100 updates in a row were refused (not finite)" in said
    assert not (tmp_path / "out" / "best.toml").exists()


def test_a_configuration_whose_task_raises_fails_alone_and_is_tried_again(
    command: Command, tmp_path: Path
) -> None:
    file, fixed = tmp_path / "fragile.py", tmp_path / "fixed"
    file.write_text(FRAGILE)
    asked = ("--repeats", 1, "--set", f"task.args.fixed={fixed}", "--over", "solver.lr=0.1,0.5")
    arguments = ("sweep", "--task", f"{file}:Fragile", *OPTIONS, *asked, "--out", tmp_path / "out")
    code, said, wrong = command(*arguments)
    assert code == 1
    assert "[1/2] solver.lr = 0.1, repeat 0: raised (" in said
    assert "[2/2] solver.lr = 0.5, repeat 0: accuracy" in said
    assert "ValueError: not with 0.1" in wrong
    assert wrong.startswith("fedstream: the task raised in 1 of 2 runs; the first one: ")
    assert wrong.endswith(": the same command tries them again\n")
    with (tmp_path / "out" / "results.csv").open() as table:
        best, failed = csv.DictReader(table)
    assert (best["solver.lr"], best["failed"], best["reason"]) == ("0.5", "0", "")
    assert (failed["solver.lr"], failed["failed"], failed["updates"]) == ("0.1", "1", "")
    assert "ValueError: not with 0.1" in failed["reason"]
    assert tomllib.loads((tmp_path / "out" / "best.toml").read_text())["solver"]["lr"] == 0.5

    fixed.touch()
    code, said, _ = command(*arguments)
    assert code == 0
    assert "2 configurations, 2 runs, 1 of them done already" in said
    assert "raised" not in said


def test_a_metric_that_nobody_measures_is_refused_before_a_run_is_over(
    command: Command, task: str, tmp_path: Path
) -> None:
    arguments = ("sweep", "--task", task, *OPTIONS, "--out", tmp_path / "out", "--repeats", "1")
    code, said, _ = command(*arguments, "--over", "solver.lr=0.5")
    assert code == 0
    assert said.startswith("1 configuration, 1 run, 0 of them done already\n")
    done = (tmp_path / "out" / "runs.jsonl").read_text()
    code, said, wrong = command(*arguments, "--over", "solver.lr=0.1", "--metric", "f1")
    assert code == 2
    assert wrong.startswith("fedstream: --metric f1: the task measures accuracy, loss")
    assert "[1/1]" not in said
    assert (tmp_path / "out" / "runs.jsonl").read_text() == done


def _killed(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.process
def test_a_killed_process_ends_the_sweep_with_advice() -> None:
    with pytest.raises(FedstreamError, match=r"was killed.* the same command continues"):
        list(each(_killed, [1, 2], processes=2, threads=1))


@pytest.mark.process
def test_an_interrupted_sweep_keeps_what_has_finished(
    command: Command, task: str, tmp_path: Path, python: Path
) -> None:
    over = ("--over", "solver.lr=0.1,0.2,0.3,0.4", "--repeats", "25")
    arguments = ("sweep", "--task", task, *OPTIONS, "--out", tmp_path / "out", *over)
    sweep = subprocess.Popen(
        [python, "-m", "fedstream", *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert sweep.stdout is not None
    with sweep:
        while not sweep.stdout.readline().startswith("[3/100]"):
            assert sweep.poll() is None
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(60) == 130
    stored = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    runs = [json.loads(text) for text in stored]
    assert 3 <= len(runs) < 100
    first = sum(run["repeat"] == 0 for run in runs)
    assert (tmp_path / "out" / "results.csv").is_file()
    one = (*arguments[:-2], "--repeats", "1")
    code, said, _ = command(*one)
    assert code == 0
    assert f"4 configurations, 4 runs, {first} of them done already" in said
