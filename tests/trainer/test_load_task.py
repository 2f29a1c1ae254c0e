"""Finding a task by name, and saying in one line what is wrong when it cannot be found."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.broker.errors import ConfigError, DataError
from fedstream.trainer import torchvision_ops
from fedstream.trainer.loading import load_task
from fedstream.trainer.task import Task, TaskSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRAM = """
from torch import nn
from fedstream.trainer.task import Task

class Mine(Task):
    devices = 4
    def model(self): return nn.Linear(2, 2)
    def device_data(self, device): return [(0, 0)]

class Unfinished(Task):
    def model(self): return nn.Linear(2, 2)

task = Mine()
number = 3
def needs(argument): return task
def fails(): return 1 / 0
def leaves(): raise SystemExit("no data here: set DATA")
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Writes a user's program; path and modules are as before afterwards."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    before = set(sys.modules)

    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    yield write
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize("attribute", ["task", "Mine"])
def test_file_may_define_an_instance_or_a_callable(
    write: Callable[[str, str], Path], attribute: str
) -> None:
    file = write("own_program.py", PROGRAM)
    task = load_task(f"{file}:{attribute}", TaskSettings())
    assert isinstance(task, Task)
    assert task.devices == 4
    assert load_task(f"own_program:{attribute}", TaskSettings()).devices == 4


@pytest.mark.process
def test_program_can_import_neighbours_and_be_spawned(
    write: Callable[[str, str], Path],
) -> None:
    write("its_neighbour.py", PROGRAM)
    file = write("with_neighbour.py", "from its_neighbour import Mine\nclass Own(Mine): pass\n")
    pickled = pickle.dumps(load_task(f"{file}:Own", TaskSettings()))
    child = (
        f"import pickle, sys; sys.path[:] = {sys.path}; "  # which is what spawn hands over
        f"print(type(pickle.loads({pickled!r})).__module__)"
    )
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "with_neighbour"


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("nothing", "defines no 'nothing'"),
        ("number", "is of type int: expected a fedstream.Task"),
        ("needs", r"needs\(\) raised TypeError: .*argument"),
        ("fails", r"fails\(\) raised ZeroDivisionError: .* at .*wrong_program.py:16"),
        (
            "leaves",
            r"leaves\(\) raised SystemExit: no data here: set DATA at ",
        ),
        ("Unfinished", r"Unfinished\(\) raised TypeError: .*device_data"),
    ],
)
def test_attribute_that_is_not_a_task_is_an_error(
    write: Callable[[str, str], Path], attribute: str, words: str
) -> None:
    file = write("wrong_program.py", PROGRAM)
    with pytest.raises(ConfigError, match=words) as caught:
        load_task(f"{file}:{attribute}", TaskSettings())
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_unimportable_program_is_an_error(write: Callable[[str, str], Path]) -> None:
    raising = write("raising_program.py", "x = 1\nraise RuntimeError('no\\nluck')\n")
    with pytest.raises(ConfigError, match=r"RuntimeError: no luck at .*raising_program.py:2"):
        load_task(f"{raising}:task", TaskSettings())
    broken = write("broken_program.py", "def :\n")
    with pytest.raises(ConfigError, match=r"SyntaxError: .*broken_program.py, line 1"):
        load_task(f"{broken}:task", TaskSettings())
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'not_there'"):
        load_task("not_there.at_all:task", TaskSettings())


def test_unknown_names_are_errors(write: Callable[[str, str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/missing.py"):
        load_task(f"{tmp_path}/missing.py:task", TaskSettings())
    with pytest.raises(
        ConfigError, match=r"unknown task 'digit'; choose one of digits, mnist, .*:attribute"
    ):
        load_task("digit", TaskSettings())
    for taken in ("calendar.py", "two.dots.py"):
        with pytest.raises(ConfigError, match="rename the file"):
            load_task(f"{write(taken, PROGRAM)}:task", TaskSettings())


def test_fedstream_errors_in_user_code_are_kept(
    write: Callable[[str, str], Path],
) -> None:
    text = "from fedstream.broker.errors import DataError\n"
    text += "def task(): raise DataError('no pictures')\n"
    with pytest.raises(DataError, match=r"^no pictures$"):
        load_task(f"{write('without_data.py', text)}:task", TaskSettings())


class Tiny(Task):
    """The class of x is its larger component; the model is the identity."""

    def model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.9))
        nn.init.eye_(model[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(model[0].bias)  # type: ignore[arg-type]
        return model

    def device_data(self, device: int) -> TensorDataset:
        x = torch.eye(2).repeat(400, 1)  # more than one batch of evaluation
        y = torch.tensor([0, 1]).repeat(400)
        y[:80] = 1 - y[:80]
        return TensorDataset(x, y)


def test_default_metrics_use_all_data_without_dropout() -> None:
    task = Tiny()
    found = task.metrics(task.model().train(), task.device_data(0))
    right, wrong = torch.log(1 + torch.exp(torch.tensor([-1.0, 1.0]))).tolist()
    assert found == pytest.approx({"accuracy": 0.9, "loss": 0.9 * right + 0.1 * wrong})
    with pytest.raises(DataError, match="nothing to evaluate"):
        task.metrics(task.model(), TensorDataset(torch.zeros(0, 2), torch.zeros(0)))


@pytest.mark.process
def test_settings_are_read_without_importing_torch() -> None:
    modules = ("task", "solvers", "devices", "partitions")
    imports = "; ".join(f"import fedstream.trainer.{name}" for name in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_torchvision_imports_after_declaring_operators() -> None:
    torchvision_ops.declare_missing()
    torchvision_ops.declare_missing()
    assert hasattr(torch.ops.torchvision, "nms")
    assert hasattr(torch.ops.torchvision, "qnms")
    pytest.importorskip("sympy")  # torch itself needs it for what torchvision imports
    pytest.importorskip("torchvision.datasets")


def test_concurrent_loads_declare_an_operator_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"torchvision::of_this_test_{uuid4().hex}"  # it stays defined
    monkeypatch.setattr(torchvision_ops, "_OPERATORS", (name,))
    define, defined = torch.library.define, []

    def slowly(name: str, schema: str) -> None:
        """Gives the other threads the time to come here too."""
        defined.append(name)
        time.sleep(0.1)
        define(name, schema)

    monkeypatch.setattr(torch.library, "define", slowly)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(torchvision_ops.declare_missing) for _ in range(4)]:
            done.result()
    assert defined == [name]


def test_without_torchvision_nothing_is_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision_ops, "find_spec", lambda _: None)
    monkeypatch.setattr(torch, "ops", SimpleNamespace())  # would raise if it were asked
    torchvision_ops.declare_missing()
