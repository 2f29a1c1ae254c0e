"""What is wrong with a user's task is said in a line, before anything begins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedstream.local.launcher import Interpreters
from tests.fedstream.conftest import Command

TASK = """
import torch
from torch.utils.data import TensorDataset
from fedstream import Task


class Blobs(Task):
    devices = 4

    def model(self):
        return torch.nn.Linear(2, 2)

    def device_data(self, device):
        x = torch.linspace(-1, 1, 20).reshape(10, 2)
        return TensorDataset(x, (x[:, 0] > 0).long())

    def test_data(self):
        return self.device_data(0)


class Dict(Blobs):
    def model(self):
        return {"a": 1}


class Class(Blobs):
    def model(self):
        return torch.nn.Linear


class Empty(Blobs):
    def device_data(self, device):
        return []

    def test_data(self):
        return None


class Nothing(Blobs):
    def device_data(self, device):
        return None


class NoTest(Blobs):
    def test_data(self):
        return 3


class EmptyTest(Blobs):
    def test_data(self):
        return []


class Metrics(Blobs):
    def metrics(self, model, data):
        return {"accuracy": 1 / 0}


class NoNumbers(Blobs):
    def metrics(self, model, data):
        return 3
"""


@pytest.fixture(autouse=True)
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of these runs gets as far as to need its services."""
    monkeypatch.setattr("fedstream.local.run.new_launcher", lambda: nullcontext(Interpreters()))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "own_wrong_task.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    sys.modules.pop("own_wrong_task", None)


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("Dict", "model() returned dict: it must return an untrained torch.nn.Module"),
        ("Class", "model() returned the class Linear"),
        ("Empty", "device 0 has no data"),
        ("Nothing", "device 0: device_data() returned NoneType, which has no length"),
        ("NoTest", "test_data() returned int, which has no length"),
        ("EmptyTest", "there is nothing to evaluate: the data set is empty"),
    ],
)
def test_incomplete_task_is_reported_before_the_start(
    command: Command, folder: Path, task: str, said: str
) -> None:
    ended, out, error = command("run", "--task", f"own_wrong_task.py:{task}", "--out", "out")
    assert (ended, out, error.count("\n")) == (2, "", 1)
    assert said in error
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (("--data-root", "/data"), "task.data_root (--data-root)"),
        (("--set", "task.partition.p=3"), "task.partition"),
        (("--set", "task.download=true"), "task.download"),
        (("--set", "task.seed=1"), "task.seed"),
    ],
)
def test_keys_without_effect_on_own_tasks_are_rejected(
    command: Command, folder: Path, options: tuple[str, str], key: str
) -> None:
    given = ("simulate", "--task", "own_wrong_task.py:Blobs", "--out", "out")
    ended, out, error = command(*given, *options)
    assert (ended, out) == (2, "")
    assert f"{key} has no effect on " in error
    assert error.count("\n") == 1
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("Metrics", ": ZeroDivisionError: division by zero at"),
        ("NoNumbers", "metrics() returned int: it must return a dict from names to numbers"),
    ],
)
def test_metrics_that_raise_fail_a_simulation(
    command: Command, folder: Path, task: str, said: str
) -> None:
    given = ("simulate", "--task", f"own_wrong_task.py:{task}", "--out", "out")
    for keys, code in (((), 2), (("--set", "run.dry_step=false"), 1)):
        ended, _, error = command(*given, *keys)
        assert ended == code
        assert said in error.splitlines()[-1]
