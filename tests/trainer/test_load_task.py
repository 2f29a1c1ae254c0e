"""Finding a task by name, and saying in one line what is wrong when it cannot be found."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedstream.core.errors import ConfigError, DataError
from fedstream.settings.config import read
from fedstream.trainer import in_memory
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
net = nn.Linear(2, 2)
def bare(): return net
class Tets(Mine):
    def tets_data(self): return [(0, 0)]
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
def test_program_can_import_neighbours_and_be_spawned(write: Callable[[str, str], Path]) -> None:
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
        ("needs", r"task.args.argument: required by task .*, but not given"),
        ("net", r"it is a model alone .*from the method model\(\).*own-task.md"),
        ("Tets", r"defines tets_data\(\), which nothing uses; did you mean test_data\(\)\?"),
        ("bare", r"bare\(\) returned no task: it is a model alone"),
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
    with pytest.raises(ConfigError, match=r"SyntaxError: .*broken_program.py:1"):
        load_task(f"{broken}:task", TaskSettings())
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'not_there'"):
        load_task("not_there.at_all:task", TaskSettings())


def test_unknown_names_are_errors(write: Callable[[str, str], Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"there is no file {tmp_path}/missing.py"):
        load_task(f"{tmp_path}/missing.py:task", TaskSettings())
    with pytest.raises(
        ConfigError, match=r"unknown task 'nobody'; choose one of digits, mnist, .*:attribute"
    ):
        load_task("nobody", TaskSettings())
    with pytest.raises(ConfigError, match=r"unknown task 'digit'; did you mean 'digits'\?$"):
        load_task("digit", TaskSettings())
    with pytest.raises(ConfigError, match=r"is a file: .*, as in my_task.py:task$"):
        load_task("my_task.py", TaskSettings())
    for taken in ("calendar.py", "two.dots.py"):
        with pytest.raises(ConfigError, match="rename the file"):
            load_task(f"{write(taken, PROGRAM)}:task", TaskSettings())


def test_fedstream_errors_in_user_code_are_kept(write: Callable[[str, str], Path]) -> None:
    text = "from fedstream.core.errors import DataError\n"
    text += "def task(): raise DataError('no pictures')\n"
    with pytest.raises(DataError, match=r"^no pictures$"):
        load_task(f"{write('without_data.py', text)}:task", TaskSettings())


SIZED = """
from __future__ import annotations
from typing import Annotated, Literal
from pydantic import Field
from torch import nn
from fedstream.runtime.config import Section
from fedstream.trainer.task import Task

class Corner(Section):
    x: float = 0.0

class Sized(Task):
    def __init__(self, hidden: Annotated[int, Field(ge=1)], act: Literal["relu", "tanh"] = "relu",
                 *, corners: tuple[Corner, ...] = (), schema: str = "", free=None):
        self.given = hidden, act, corners, schema, free
    def model(self): return nn.Linear(2, 2)
    def device_data(self, device): return [(0, 0)]

def small(): return Sized(1)
ready = Sized(1)
"""


def test_args_reach_a_task_as_typed_parameters(write: Callable[[str, str], Path]) -> None:
    name = f"{write('sized_task.py', SIZED)}:Sized"
    settings = read(
        None,
        [
            f"task.name={name}",
            "task.args.hidden=3",
            "task.args.act=tanh",
            "task.args.corners=[{x=1.5}]",
            "task.args.schema=a",
            "task.args.free={deep=[1, 'b']}",
        ],
    ).task
    given = load_task(name, settings).given  # type: ignore[attr-defined]
    assert given == (3, "tanh", given[2], "a", {"deep": [1, "b"]})
    assert [type(corner).__name__ for corner in given[2]] == ["Corner"]
    assert given[2][0].x == 1.5
    only = TaskSettings(args={"hidden": 2})
    assert load_task(name, only).given == (2, "relu", (), "", None)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("attribute", "args", "words"),
    [
        (
            "Sized",
            {"hidden": 1, "axt": 3},
            "task.args.axt = 3: unknown key; did you mean task.args.act?",
        ),
        (
            "Sized",
            {"hiden": 3},
            (
                "task.args.hidden: required, but not given\n"
                "task.args.hiden = 3: unknown key; did you mean task.args.hidden?"
            ),
        ),
        ("Sized", {"hidden": 0}, "task.args.hidden = 0: must be greater than or equal to 1"),
        ("Sized", {"hidden": "3"}, 'task.args.hidden = "3": must be a valid integer'),
        (
            "Sized",
            {"hidden": 1, "act": "gelu"},
            "task.args.act = \"gelu\": must be 'relu' or 'tanh'",
        ),
        (
            "Sized",
            {"hidden": 1, "corners": [{"y": 1.0}]},
            "task.args.corners[0].y = 1.0: unknown key; allowed here: x",
        ),
        ("Sized", {}, "task.args.hidden: required by task '{name}', but not given"),
        (
            "small",
            {"hidden": 3},
            "task.args.hidden: task '{name}' takes no arguments; leave it out",
        ),
        (
            "ready",
            {"hidden": 3},
            (
                "task.args.hidden: the task '{name}' takes no arguments, because "
                "it is already made: name its class, or a function that returns it"
            ),
        ),
    ],
)
def test_wrong_args_are_named_with_what_is_allowed(
    write: Callable[[str, str], Path], attribute: str, args: dict[str, Any], words: str
) -> None:
    name = f"{write('sized_wrongly.py', SIZED)}:{attribute}"
    with pytest.raises(ConfigError) as caught:
        load_task(name, TaskSettings(args=args))
    assert str(caught.value) == words.format(name=name)


def test_args_are_refused_where_they_have_no_effect_or_cannot_be_kept() -> None:
    with pytest.raises(ConfigError, match=r"^task.args.hidden has no effect on .* 'digits': leave"):
        load_task("digits", TaskSettings(args={"hidden": 3}))
    with pytest.raises(ValueError, match=r"args\.a\[1\]\.b is None, which TOML cannot express"):
        TaskSettings(args={"a": [1, {"b": None}]})


def test_parameters_that_cannot_be_configured_are_named(write: Callable[[str, str], Path]) -> None:
    text = "from __future__ import annotations\ndef task(a: Missing = 1): raise KeyError(a)\n"
    name = f"{write('unknown_types.py', text)}:task"
    with pytest.raises(ConfigError, match="its parameters can't be read: name 'Missing' is not"):
        load_task(name, TaskSettings(args={"a": 1}))
    with pytest.raises(ConfigError, match="KeyError: 1"):  # without arguments no type is needed
        load_task(name, TaskSettings())


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
    in_memory.declare_missing()
    in_memory.declare_missing()
    assert hasattr(torch.ops.torchvision, "nms")
    assert hasattr(torch.ops.torchvision, "qnms")
    pytest.importorskip("sympy")  # torch itself needs it for what torchvision imports
    pytest.importorskip("torchvision.datasets")


def test_concurrent_loads_declare_an_operator_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"torchvision::of_this_test_{uuid4().hex}"  # it stays defined
    monkeypatch.setattr(in_memory, "_OPERATORS", (name,))
    define, defined = torch.library.define, []

    def slowly(name: str, schema: str) -> None:
        """Gives the other threads the time to come here too."""
        defined.append(name)
        time.sleep(0.1)
        define(name, schema)

    monkeypatch.setattr(torch.library, "define", slowly)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(in_memory.declare_missing) for _ in range(4)]:
            done.result()
    assert defined == [name]
