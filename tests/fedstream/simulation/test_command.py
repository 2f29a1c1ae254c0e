"""`fedstream simulate`, as a command."""

from __future__ import annotations

import csv
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import fedstream as api
from fedstream import simulation
from fedstream.core.layout import Model
from fedstream.journal import opened
from fedstream.journal.inspection import model_at
from fedstream.settings.config import read
from fedstream.simulation import SimulationResult, VersionMade
from fedstream.simulation import run as simulate
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import TaskSettings, measured
from tests.fedstream.cli.test_cli import fedstream

Heard = Callable[[VersionMade, Model], object]
QUICK = ("--set", "simulation.threads=1")

TASK = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task

class Mine(Task):
    devices, wrong = 3, range(3)

    def model(self):
        return torch.nn.Linear(5, 3)

    def device_data(self, device):
        x, y = torch.zeros(8, 5), torch.arange(8) % 3
        return TensorDataset(*(self.given(x, y) if device in self.wrong else (x, y)))

class Label(Mine):
    given = lambda self, x, y: (x, y + 7)

class Later(Mine):
    wrong, trained = (), 0

    def train(self, *given):
        self.trained += 1
        if self.trained > 20:
            raise IndexError("no more")
        return super().train(*given)

class Partly(Label):
    wrong = [1]
"""


def task_in(folder: Path) -> Path:
    """A program with tasks, of a name of its own."""
    file = folder / f"tasks_of_{folder.name}.py"
    file.write_text(TASK)
    return file


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated") / "run"
    settings = read(None, ["simulation.threads=1", "run.versions=40"])
    code, numbers = simulate.run(settings, out, journal=True, quiet=True)
    assert code == 0
    assert numbers == json.loads((out / "summary.json").read_text())
    return out


def half(d: int) -> float:
    """s(0) is not 1."""
    return 0.5


def test_what_was_probably_not_meant_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = ("--set", f"strategy.staleness.kind={__name__}:half")
    arguments = (*QUICK, *name, "--versions", "2", "--no-journal", "--out", str(tmp_path / "out"))
    assert fedstream("simulate", *arguments) == 0
    told = "half': s(0) is 0.5, but an update that is not stale should weigh 1"
    assert capsys.readouterr().err.count(told) == 1
    api.simulate(
        strategy={"staleness": {"kind": half}},
        versions=2,
        journal=False,
        progress=False,
        simulation={"threads": 1},
        out=tmp_path / "again",
    )
    assert capsys.readouterr().err.count(told) == 1


def test_simulate_writes_the_same_files_as_run(folder: Path) -> None:
    from safetensors.numpy import load_file

    numbers = json.loads((folder / "summary.json").read_text())
    assert numbers["accuracy"] > 0.3
    assert (numbers["versions"], numbers["state"]) == (40, "finished")
    assert numbers["max_staleness"] <= 4
    assert numbers["precision"] == "float32"
    with (folder / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["version"]) for row in rows] == list(range(41))
    assert rows[40]["accuracy"]
    assert (folder / "curves.png").stat().st_size > 10_000
    assert load_file(folder / "model.safetensors")["0.weight"].shape == (64, 64)


def test_the_best_version_is_written_beside_the_last(folder: Path) -> None:
    best = json.loads((folder / "summary.json").read_text())["best"]["accuracy"]
    with safe_open(folder / "best.safetensors", "numpy") as file:
        about = file.metadata()
    assert (int(about["version"]), float(about["accuracy"])) == (best["version"], best["value"])
    with opened(folder / "journal") as chain:
        assert model_at(chain, best["version"])[1] == about["digest"]
    task = load_task("digits", TaskSettings())
    module, data = task.model(), task.test_data()
    module.load_state_dict(load_file(folder / "best.safetensors"))
    assert data is not None
    assert measured(task, module, data)["accuracy"] == best["value"]


def test_written_configuration_gives_the_same_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    again = tmp_path / "again"
    arguments = ("--config", str(folder / "run.toml"), "--out", str(again), "--no-journal")
    assert fedstream("simulate", *arguments) == 0
    assert "finished (version 40 reached)" in capsys.readouterr().out
    assert not (again / "journal").exists()
    assert (again / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()
    # not their bytes: safetensors writes what it says of the model in any order
    model, first = (load_file(run / "model.safetensors") for run in (again, folder))
    assert model.keys() == first.keys()
    assert all(torch.equal(model[name], first[name]) for name in model)


def test_summary_is_printed_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ("--versions", "2", "--out", str(out), "--json", *QUICK)
    assert fedstream("simulate", *arguments) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == json.loads((out / "summary.json").read_text())


def test_folder_with_a_run_is_rejected(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    arguments = ("--versions", "2", "--out", str(folder))
    assert fedstream("simulate", *arguments) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "already contains a run" in said
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("simulation.batch=true", "did you mean simulation.batched"),
        # what only shows once the task is there
        ("participation=[{{devices=[10]}}]", "participation: there is no device 10"),
        ("simulation.staleness.kind=latency", "scheduler.policy.n"),
        ("task.name={task}:Label", ": IndexError: Target "),
    ],
)
def test_error_is_one_line_and_leaves_nothing(
    key: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = ("--set", key.format(task=task_in(tmp_path)))
    out = tmp_path / "runs" / "out"
    assert fedstream("simulate", "--out", str(out), "--versions", "1", *QUICK, *given) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert (shown.err.count("\n"), shown.out) == (1, "")
    assert not out.parent.exists()


def test_later_failure_keeps_the_versions_made(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, task = tmp_path / "out", f"task.name={task_in(tmp_path)}:Later"
    assert fedstream("simulate", "--out", str(out), *QUICK, "--set", task) == 1
    assert re.search(r"device \d at version \d+: IndexError: no more", capsys.readouterr().err)
    assert sorted(path.name for path in out.iterdir()) == ["journal", "run.toml"]
    assert fedstream("replay", str(out)) == 0


def test_device_that_fails_is_named_in_the_summary(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out, task = tmp_path / "out", f"task.name={task_in(tmp_path)}:Partly"
    sets = ("--strategy", "fedavg", "--versions", "9", "--set", task)
    assert fedstream("simulate", "--out", str(out), *QUICK, *sets) == 0
    summary = json.loads((out / "summary.json").read_text())
    [(device, about)] = summary["failing"].items()
    assert summary["given_up"] == {"raised IndexError": about["tasks"]}
    assert (device, summary["updates"]) == ("1", 2 * 9), "rounds of three, of which two answer"
    said = f"failing    device 1 failed {about['tasks']} tasks in a row (IndexError: Target"
    assert said in capsys.readouterr().out


def test_signal_ends_it_with_partial_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def signalled(*given: Any, on_version: Heard, **more: Any) -> SimulationResult:
        def heard(made: VersionMade, model: Model) -> None:
            on_version(made, model)
            if made.version == 20:
                signal.raise_signal(signal.SIGINT)

        return simulation.simulate(*given, on_version=heard, **more)

    monkeypatch.setattr(simulate, "simulate", signalled)
    before = signal.getsignal(signal.SIGINT)
    arguments = ("simulate", "--out", str(tmp_path / "out"), "--versions", "1000", *QUICK)
    assert fedstream(*arguments) == 130
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["state"] == "interrupted"
    assert 20 <= summary["versions"] < 1000
    assert signal.getsignal(signal.SIGINT) == before


def test_failed_start_leaves_an_existing_folder_unchanged(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    arguments = ("--out", str(tmp_path), "--set", "simulation.staleness.kind=latency")
    assert fedstream("simulate", *arguments) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_progress_is_reported_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(simulate, "_LINE_EVERY_S", 0.0)
    monkeypatch.chdir(tmp_path)
    assert fedstream("simulate", "--versions", "12", "--out", "out") == 0
    said = capsys.readouterr()
    told = said.err.splitlines()
    assert told.pop(0) == "model      4,810 parameters trained; an update has 19,240 bytes"
    assert len(told) == 12
    assert re.fullmatch(r"version 11 of 12 · 0:\d\d left · accuracy 0\.\d{4}, loss .*", told[-2])
    assert "version 3 of" not in said.out
    quiet = ("simulate", "--versions", "12", "--out", "quiet", "--json")
    assert fedstream(*quiet) == 0
    assert capsys.readouterr().err == ""


def test_progress_is_an_occasional_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(simulate, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lines = simulate._ProgressLines(400)
    for version in range(1, 11):
        now[0] += 1.0
        lines.show(VersionMade(version, (), 1, 1, 1.0, 1, 1.0, None, {}))
    assert capsys.readouterr().err.splitlines() == [
        f"version {n} of 400 · {left} left" for n, left in ((3, "6:37"), (6, "6:34"), (9, "6:31"))
    ]
