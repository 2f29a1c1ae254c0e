"""Names by which other processes find a task given as an object."""

from __future__ import annotations

import site
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

from fedstream.core.errors import ConfigError
from fedstream.history.display import short
from fedstream.trainer.loading import NOT_A_MODEL, PICKLED, is_model, pickle_task
from fedstream.trainer.task import Task

TaskLike: TypeAlias = str | Task | type[Task] | Callable[..., Task]

_FILE = f"task{PICKLED}"


def task_and_table(
    given: TaskLike | Mapping[str, object] | None,
) -> tuple[TaskLike | None, dict[str, object]]:
    """The task, and the other keys of a given table ``[task]``.

    Raises ConfigError if the value is no task.
    """
    table: dict[str, object] = dict(given) if isinstance(given, Mapping) else {"name": given}
    task = table.pop("name", None)
    return (None if task is None else _checked(task)), table


def _checked(task: object) -> TaskLike:
    if is_model(task):
        raise ConfigError(f"task: {NOT_A_MODEL}")
    if isinstance(task, str | Task) or (callable(task) and not isinstance(task, type)):
        return task
    if isinstance(task, type) and issubclass(task, Task):
        return task
    what = f"the class {task.__name__}" if isinstance(task, type) else f"a {type(task).__name__}"
    raise ConfigError(
        f"task: {what} is not a task: give a fedstream.Task, a subclass of it or a function that "
        "returns one, or a task's name"
    )


def label(task: TaskLike) -> str:
    """A short name of the task."""
    return short(task) if isinstance(task, str) else str(_owner(task).__name__)


def local_name(task: Task | Callable[..., Task]) -> str:
    """A name for a task that is used only in this process."""
    owner = _owner(task)
    module = sys.modules.get(owner.__module__)
    held = {} if module is None else vars(module)
    names = [name for name, value in held.items() if value is task and not name.startswith("_")]
    source = (module and importable(module)) or owner.__module__
    return f"{source}:{names[0] if names else owner.__name__}"


def name_for_others(task: Task | Callable[..., Task], folder: Path) -> str:
    """A name by which the services of a run find a task; ``folder`` is the run's own.

    A class or function that other processes can import is named by its module. Any other task is
    pickled into the folder, as an object's state may have changed. Raises ConfigError if it can't
    be pickled; OSError.
    """
    owner = _owner(task)
    module = sys.modules.get(owner.__module__)
    name: str = owner.__name__
    by_name = owner is task and module is not None and vars(module).get(name) is task
    if module is not None and by_name and (source := importable(module)):
        return f"{source}:{name}"
    file = folder.absolute() / _FILE
    pickle_task(task, file)
    return f"{file}:{name}"


def _owner(task: Task | Callable[..., Task]) -> Any:
    """The class or function whose module defines a task."""
    return task if hasattr(task, "__qualname__") else type(task)


def importable(module: ModuleType) -> str | None:
    """The file or dotted name by which a new process imports a module; None: impossible."""
    file = getattr(module, "__file__", None)
    if module.__name__ == "__main__" or file is None or not file.endswith(".py"):
        return None
    path = Path(file).resolve()
    package, _, _ = module.__name__.partition(".")
    if package == module.__name__:
        return str(path) if path.stem == package else None
    root = path.parents[module.__name__.count(".")]
    if path.name == "__init__.py":
        root = root.parent
    return module.__name__ if root in _everywhere() else None


def _everywhere() -> set[Path]:
    """Folders from which every Python process of this installation imports."""
    installed = [
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        *site.getsitepackages(),
    ]
    return {Path(folder).resolve() for folder in (*installed, site.getusersitepackages(), ".")}
