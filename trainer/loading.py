"""Loading a task by its name: a built-in one, or one that a user's program defines."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.trainer.task import Task

if TYPE_CHECKING:
    from types import ModuleType

    from fedstream.trainer.task import TaskSettings


def runs_program(spec: str) -> bool:
    """Whether loading the task of this name runs a program that isn't ours."""
    return bool(spec.rpartition(":")[0])


def load_task(spec: str, settings: TaskSettings) -> Task:
    """Load the task of this name; ``settings`` apply to built-in tasks only.

    Raises ConfigError, saying what and where, if there is no such task or its program fails;
    DataError if its data is missing.
    """
    source, _, attribute = spec.rpartition(":")
    if not source:
        from fedstream.trainer.tasks import BUILT_IN

        if spec not in BUILT_IN:
            raise ConfigError(
                f"unknown task {spec!r}; choose one of {', '.join(BUILT_IN)}, or name your own as "
                "path/to/file.py:attribute or package.module:attribute"
            )
        return BUILT_IN[spec](settings)
    found = getattr(_import(source), attribute, None)
    if found is None:
        raise ConfigError(f"task {spec!r}: {source} defines no {attribute!r}")
    if callable(found):
        try:
            found = found()
        except FedstreamError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"task {spec!r}: {attribute}() raised {words(error)}") from error
    if not isinstance(found, Task):
        raise ConfigError(
            f"task {spec!r} is of type {type(found).__name__}: expected a fedstream.Task, or a "
            "callable without arguments that returns one"
        )
    return found


def _import(source: str) -> ModuleType:
    """Import a module by its dotted name or its file.

    A file is imported under its stem, with its folder appended to ``sys.path``. That way the user's
    program can import its neighbours, and a spawned process, which inherits the path but not the
    modules, finds it under the same name.
    """
    from fedstream.trainer import torchvision_ops

    torchvision_ops.declare_missing()  # a user's program may import torchvision
    file = Path(source).resolve() if source.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"task {source!r}: there is no file {file}")
    name = source if file is None else file.stem
    folder = str(Path.cwd() if file is None else file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        if file is not None and not _is_found(name, file):
            raise ConfigError(
                f"task {source!r}: the name {name!r} belongs to another module: rename the file"
            )
        return importlib.import_module(name)
    except FedstreamError:
        raise
    except (Exception, SystemExit) as error:  # a program may end where it lacks something
        raise ConfigError(f"task {source!r}: importing it raised {words(error)}") from error


def _is_found(name: str, file: Path) -> bool:
    """Whether importing ``name`` gives this file rather than another module of that name."""
    spec = None if "." in name else importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == file


def words(error: BaseException) -> str:
    """An exception in one line, with the place that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f" at {trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"
