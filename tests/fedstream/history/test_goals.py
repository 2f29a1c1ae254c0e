"""A metric's goal, from the task to whatever reads the recording."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open

import fedstream
from fedstream.coordinator.app import status
from fedstream.core.errors import ConfigError
from fedstream.core.records import Run
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.questions import first_bisection, worsening
from fedstream.journal import opened
from tests.fedstream.conftest import Command
from tests.fedstream.views import view

TASK = """
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset
from fedstream import Task


class Line(Task):
    devices = 20

    def model(self):
        return torch.nn.Linear(3, 1)

    def device_data(self, device):
        x = torch.randn(40, 3, generator=torch.Generator().manual_seed(device))
        return TensorDataset(x, x @ torch.tensor([[1.], [2.], [3.]]) + 0.5 * device)

    def test_data(self):
        return self.device_data(10)

    def device_test_data(self, device):
        return self.device_data(device)

    def loss(self, model, batch):
        x, y = batch
        return mse_loss(model(x), y)

    def metrics(self, model, data):
        x, y = data.tensors
        rmse = float((model(x) - y).pow(2).mean().sqrt())
        return {self.name: rmse}

    name = "rmse"


class Misfit(Line):
    name = "misfit"
    goal = {"misfit": "min"}


class Undeclared(Line):
    name = "misfit"


class Both(Line):
    def metrics(self, model, data):
        found = super().metrics(model, data)
        return found | {"accuracy": 1 / (1 + found["rmse"])}


class OnDevices(Line):
    def test_data(self):
        return None


class Odd(Misfit):
    def metrics(self, model, data):
        return super().metrics(model, data) | {"mse": float("nan")}
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("goals") / "lines_of_goals.py"
    file.write_text(TASK)
    return file


@pytest.fixture
def simulated(command: Command, tasks: Path, tmp_path: Path) -> Path:
    """A folder with a run of each task."""
    for task in ("Line", "Misfit", "Undeclared"):
        code, _, said = command(
            "simulate",
            "--task",
            f"{tasks}:{task}",
            "--versions",
            "40",
            "--out",
            tmp_path / task,
            "--set",
            "simulation.threads=1",
            "--set",
            "simulation.evaluate_every=10",
            "--set",
            "solver.lr=0.05",
            "--set",
            "evaluator.per_device=last",
        )
        assert code == 0, said
    return tmp_path


def test_a_low_value_is_the_best_where_the_name_or_the_task_says_so(simulated: Path) -> None:
    for task, metric in (("Line", "rmse"), ("Misfit", "misfit")):
        run = fedstream.open(simulated / task)
        numbers = run.summary
        measured = {one.version: one.metrics[metric] for one in run.measurements}
        best = min(measured, key=measured.__getitem__)
        assert 0 < measured[best] < measured[0] / 2
        assert numbers["best"][metric] == {
            "version": best,
            "value": pytest.approx(measured[best], rel=1e-5),
        }
        served = numbers["metrics"]
        assert served[f"device_worst_tenth_{metric}"] > served[f"device_mean_{metric}"]
        found = fedstream.compare([run])
        assert (found.goal, found.rows[0]["best_version"]) == ("min", best)
        assert f"{metric}" in repr(run)
        assert f"best {measured[best]:.4f} at version {best}" in repr(run)


def test_an_older_summary_gets_its_best_from_the_table(simulated: Path) -> None:
    file = simulated / "Line" / "summary.json"
    numbers = json.loads(file.read_text())
    del numbers["best"]
    numbers["failing"] = {"3": {"tasks": 2, "reason": "raised OSError"}}
    file.write_text(json.dumps(numbers))
    run = fedstream.open(simulated / "Line")
    points = {one.version: one.metrics["rmse"] for one in run.measurements}
    at = min(points, key=points.__getitem__)
    assert run.summary["best"] == {"rmse": {"version": at, "value": points[at]}}
    assert "failing    device 3 failed 2 tasks in a row (raised OSError)" in repr(run)


def test_a_recording_carries_the_goal_in_its_journal(simulated: Path, command: Command) -> None:
    code, said, _ = command("list", simulated)
    assert code == 0
    rows = {line.split()[0]: " ".join(line.split()[6:-3]) for line in said.splitlines()}
    numbers = fedstream.open(simulated / "Misfit").summary
    last, best = numbers["metrics"]["misfit"], numbers["best"]["misfit"]
    assert rows["Misfit"] == f"misfit {last:.4f} {best['value']:.4f} at {best['version']}"
    assert rows["Undeclared"] == f"misfit {last:.4f} -"
    (simulated / "Misfit" / "summary.json").unlink()
    run = fedstream.open(simulated / "Misfit")
    assert run.summary["goal"] == {"misfit": "min"}
    assert fedstream.compare([run]).goal == "min"
    page = RecordedRun(simulated / "Misfit")
    assert page.goal_of("misfit") == "min"
    with (simulated / "Misfit" / "metrics.csv").open("a") as file:  # measured once more, and bad
        file.write("40,40,1,40,0,1,3,task,1,,,100,100,100,100\n")
    again = RecordedRun(simulated / "Misfit")
    worse = worsening(again)
    assert worse is not None
    assert (worse.goal, worse.worst, worse.is_grave) == ("min", 100.0, True)
    assert first_bisection(again)["side"] == "above"


@pytest.mark.parametrize(
    ("task", "sets", "main"),
    [
        ("Both", (), "accuracy"),
        ("Both", ("run.stop.metric=rmse", "run.stop.target=0"), "rmse"),
        ("OnDevices", ("evaluator.per_device=always",), "device_mean_rmse"),
    ],
)
def test_the_main_metric_is_the_same_one_everywhere(
    command: Command, tasks: Path, tmp_path: Path, task: str, sets: Sequence[str], main: str
) -> None:
    """By summary and journal: the metric that may stop the run, or one of the devices alone."""
    sets = (*sets, "simulation.threads=1", "simulation.evaluate_every=5", "solver.lr=0.05")
    options = [option for one in sets for option in ("--set", one)]
    folder, task = tmp_path / "run", f"{tasks}:{task}"
    code, said, wrong = command(
        "simulate", "--task", task, "--versions", "20", "--out", folder, *options
    )
    assert code == 0, wrong
    best = fedstream.open(folder).summary["best"][main]
    assert f"(best {best['value']:.4f} at version {best['version']})" in said
    with safe_open(folder / "best.safetensors", "numpy") as file:
        assert float(file.metadata()[main]) == best["value"]
    for _ in ("with summary.json", "by the journal"):
        run = fedstream.open(folder)
        assert run.summary["main_metric"] == main
        known = run.summary["best"][main]  # rounded in metrics.csv
        assert known == {**best, "value": pytest.approx(best["value"], rel=1e-5)}
        assert f"best {known['value']:.4f} at version {best['version']}" in repr(run)
        assert fedstream.compare([run]).metric == main
        assert RecordedRun(folder).metrics[0] == main
        code, said, _ = command("list", tmp_path, "--json")
        [row] = json.loads(said)
        assert (row["metric"], row["best_version"]) == (main, best["version"])
        assert row["best"] == known["value"]
        (folder / "summary.json").unlink(missing_ok=True)


def test_a_run_in_redis_carries_the_goal() -> None:
    run = replace(view().run, goal={"misfit": "min"}, stop_metric="misfit")
    record = [one if isinstance(one, bytes) else one.encode() for one in run.record()]
    assert Run.parsed(tuple(record)) == run
    assert status("demo", replace(view(), run=run))["goal"] == {"misfit": "min"}
    at = record.index(b"goal")
    assert Run.parsed((*record[:at], *record[at + 2 :])).goal == {}  # by an older release


@pytest.mark.process
def test_a_metric_that_is_never_a_number_is_told_and_the_run_finishes(
    tasks: Path, tmp_path: Path
) -> None:
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "fedstream",
            "run",
            "--task",
            f"{tasks}:Odd",
            "--versions",
            "20",
            "--set",
            "solver.lr=0.05",
            "--out",
            tmp_path / "run",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "\nmse is not a number at version " in ended.stdout
    assert (
        "\nwarning    never a finite number: mse; look for NaN in the test data and in metrics()\n"
        in ended.stdout
    )
    numbers = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (numbers["goal"], numbers["never_finite"]) == ({"misfit": "min"}, ["mse"])
    assert numbers["best"].keys() == {"misfit"}
    assert f"misfit     {numbers['metrics']['misfit']:.4f} (best " in ended.stdout
    with opened(tmp_path / "run") as chain:
        assert chain[-1].head.goal == {"misfit": "min"}


def test_an_unknown_goal_is_asked_for_and_never_guessed(simulated: Path, command: Command) -> None:
    folder = simulated / "Undeclared"
    numbers = json.loads((folder / "summary.json").read_text())
    assert numbers["best"] == {}
    assert "device_worst_tenth_misfit" not in numbers["metrics"]
    assert worsening(RecordedRun(folder)) is None
    asked = 'unknown: set Task.goal = {"misfit": "min"} or "max", or give --goal min or --goal max'
    code, said, _ = command("compare", folder, "--out", simulated / "one")
    assert code == 0
    assert "no best: whether a low or a high misfit is good is " + asked in said
    code, said, _ = command(
        "compare", folder, "--goal", "min", "--out", simulated / "two", "--json"
    )
    assert json.loads(said)["runs"][0]["best_version"] > 0
    with pytest.raises(ConfigError, match=r"--target 0\.5: whether a low or a high misfit"):
        fedstream.compare([folder], target=0.5)
    both = [folder, simulated / "Misfit"]
    assert fedstream.compare(both).goal == "min"  # one run, perhaps an older one, says nothing
    numbers["goal"] = {"misfit": "max"}
    (folder / "summary.json").write_text(json.dumps(numbers))
    assert fedstream.compare(both).goal is None
    with pytest.raises(ConfigError, match=r"--target 0\.5: the runs' tasks disagree whether"):
        fedstream.compare(both, target=0.5)
    shutil.rmtree(folder)


def test_a_sweep_goes_by_the_goal(command: Command, tasks: Path, tmp_path: Path) -> None:
    def sweep(task: str, metric: str, *more: str) -> tuple[int, str, str]:
        return command(
            "sweep",
            "--task",
            f"{tasks}:{task}",
            "--metric",
            metric,
            "--repeats",
            "1",
            "--jobs",
            "1",
            "--versions",
            "20",
            "--set",
            "simulation.threads=1",
            "--over",
            "solver.lr=0.0001,0.05",
            "--out",
            tmp_path / task,
            "--json",
            *more,
        )

    for task, metric in (("Line", "rmse"), ("Misfit", "misfit")):
        code, said, why = sweep(task, metric)
        assert code == 0, why
        assert [one["keys"]["solver.lr"] for one in json.loads(said)] == [0.05, 0.0001]
    code, _, why = sweep("Undeclared", "misfit")
    assert code == 2
    assert "--metric misfit: whether a low or a high misfit is good is unknown: set Task.g" in why
    code, said, _ = sweep("Undeclared", "misfit", "--goal", "max")
    assert [one["keys"]["solver.lr"] for one in json.loads(said)] == [0.0001, 0.05]
