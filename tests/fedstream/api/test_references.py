"""How a task that is given as an object reaches other processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from fedstream.api.references import label, local_name, name_for_others
from fedstream.core.errors import ConfigError
from fedstream.trainer.loading import load_task, pickle_task, unpickled
from fedstream.trainer.task import Task, TaskSettings

SOURCE = """
from fedstream.trainer.task import Task

class Mine(Task):
    devices = 3
    def __init__(self, width: int = 1): self.width = width
    def model(self): raise NotImplementedError
    def device_data(self, device): raise NotImplementedError

task = Mine()
def made(): return Mine(7)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module, imported from its file."""
    (tmp_path / "my_api_task.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_api_task", raising=False)
    import my_api_task  # type: ignore[import-not-found]

    return my_api_task  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["Mine", "made"])
def test_a_class_or_function_of_a_module_keeps_its_name(
    module: ModuleType, tmp_path: Path, name: str
) -> None:
    found = name_for_others(getattr(module, name), tmp_path)
    assert found == f"{tmp_path}/my_api_task.py:{name}"
    assert isinstance(load_task(found, TaskSettings()), Task)


def test_an_object_travels_as_it_is_now(module: ModuleType, tmp_path: Path) -> None:
    module.task.width = 64  # changed since its module made it
    found = name_for_others(module.task, tmp_path)
    assert found == f"{tmp_path}/task.pickle:Mine"
    assert load_task(found, TaskSettings()).width == 64  # type: ignore[attr-defined]


def test_what_only_this_program_has_is_pickled_by_value(tmp_path: Path) -> None:
    main = sys.modules["__main__"]
    exec(SOURCE.replace("width: int = 1", "width: int = 2"), main.__dict__)  # noqa: S102
    try:
        found = name_for_others(main.Mine, tmp_path)
        assert local_name(main.task) == "__main__:task"
    finally:
        for name in ("Mine", "task", "made"):
            delattr(main, name)
    assert found == f"{tmp_path}/task.pickle:Mine"
    loaded = load_task(found, TaskSettings(args={"width": 5}))
    assert (loaded.width, loaded.devices) == (5, 3)  # type: ignore[attr-defined]
    assert label(loaded) == "Mine"


def test_a_task_that_cannot_be_pickled_is_told(module: ModuleType, tmp_path: Path) -> None:
    told = r"can't be sent to the services.*Cannot pickle files"
    module.task.file = (tmp_path / "open").open("w")
    with module.task.file, pytest.raises(ConfigError, match=told):
        name_for_others(module.task, tmp_path)
    assert not (tmp_path / "task.pickle").exists()


def _writable(file: Path) -> None:
    file.chmod(0o620)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_writable, "other users could have written this task"),
        (_cut, "reading the task raised"),
        (Path.unlink, "the task cannot be read: No such file"),
    ],
)
def test_a_file_that_is_not_ours_alone_is_not_read(
    tmp_path: Path, spoil: Callable[[Path], object], said: str
) -> None:
    file = tmp_path / "task.pickle"
    pickle_task(print, file)
    assert file.stat().st_mode & 0o777 == 0o600
    spoil(file)
    with pytest.raises(ConfigError, match=said):
        unpickled(file)
