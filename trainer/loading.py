"""Loading a task: built in, defined by a user's program, or pickled.

A task defined in a notebook or in the script that starts a run has no module that another process
could import. It is pickled by value into the run's folder. Reading a pickle runs arbitrary code, so
only files that nobody but this user can have written are read (docs/decisions/0032).
"""

from __future__ import annotations

import os
import pickle
import stat
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.runtime.config import arguments
from fedstream.runtime.plugins import import_attribute, words
from fedstream.runtime.text import check_spelling, did_you_mean
from fedstream.trainer.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fedstream.trainer.task import TaskSettings

BUILT_IN = {  # real data sets: their modules, which import torch, and the functions there
    "digits": "images:digits",
    "mnist": "images:mnist",
    "cifar10-fedasync": "images:cifar10_fedasync",
    "cifar10-afl": "images:cifar10_afl",
    "wikitext2": "texts:wikitext2",
    "shakespeare": "texts:shakespeare",
}
PICKLED = ".pickle"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def pickle_task(task: object, file: Path) -> None:
    """Write a task, for this user alone. Raises ConfigError if it cannot be pickled; OSError."""
    try:
        # Modules are pickled by name, so the reader needs our search path.
        said = pickle.dumps([folder for folder in sys.path if folder]) + cloudpickle.dumps(task)
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        raise ConfigError(
            f"the task can't be sent to the services, which are processes of their own: {error}. "
            "Let it open files, connections and the like in device_data(), or give its class or "
            "its name, file.py:attribute"
        ) from error
    file.touch(mode=0o600)
    file.write_bytes(said)


def unpickled(file: Path) -> object:
    """Read a task. Raises ConfigError if it cannot be read, or others could have written it."""
    try:
        with file.open("rb") as opened:
            about = os.fstat(opened.fileno())
            if about.st_uid not in (os.getuid(), 0) or about.st_mode & _OTHERS_WRITE:
                raise ConfigError(
                    f"{file}: other users could have written this task, and reading it would run "
                    "their code: name the task in another way"
                )
            folders = pickle.load(opened)  # noqa: S301  (only this user can have written it)
            sys.path += [folder for folder in folders if folder not in sys.path]
            return pickle.load(opened)  # noqa: S301
    except OSError as error:
        raise ConfigError(f"{file}: the task cannot be read: {error.strerror}") from error
    except FedstreamError:
        raise
    except (Exception, SystemExit) as error:  # unpickling imports the user's modules
        raise ConfigError(f"{file}: reading the task raised {words(error)}") from error


NOT_A_MODEL = (
    "it is a model alone (a torch.nn.Module): a task also has the devices' data; return the model "
    "from the method model() of a class derived from fedstream.Task (docs/tutorial/own-task.md)"
)


def load_task(
    spec: str, settings: TaskSettings, *, adapt: Callable[[object], object] = lambda found: found
) -> Task:
    """Load the task named ``spec``.

    A user's own class, or function that returns a task, is called with ``settings.args``; the
    other settings apply to built-in tasks only. ``adapt`` turns another framework's object into
    such a function, and returns anything else as it is.

    Raises ConfigError if there is no such task, its program fails, or an argument is wrong;
    DataError if its data is missing.
    """
    program, _, _ = spec.rpartition(":")
    if not program:
        if spec not in BUILT_IN:
            if spec.endswith(".py"):
                raise ConfigError(
                    f"task {spec!r} is a file: also name the task in it, as in {spec}:task"
                )
            raise ConfigError(
                f"unknown task {spec!r}" + (did_you_mean(spec, BUILT_IN) or _choices(BUILT_IN))
            )
        if settings.args:
            raise ConfigError(
                f"task.args.{next(iter(settings.args))} has no effect on the built-in task "
                f"{spec!r}: leave it out"
            )
        module, _, function = BUILT_IN[spec].partition(":")
        task: Task = getattr(import_module(f"fedstream.trainer.{module}"), function)(settings)
        return task
    from fedstream.trainer.in_memory import declare_missing

    declare_missing()  # a user's program may import torchvision
    if program.endswith(PICKLED):
        found = unpickled(Path(program))
    else:
        found, _ = import_attribute(spec, what="task")
    return made(adapt(found), spec, settings)


def made(found: object, spec: str, settings: TaskSettings) -> Task:
    """The object itself if it is a task, or the task that it returns for ``settings.args``.

    ``spec`` names it in errors. Raises ConfigError.
    """
    called = spec.rpartition(":")[2]
    if is_model(found):
        raise ConfigError(f"task {spec!r}: {NOT_A_MODEL}")
    if callable(found):
        given = arguments(found, settings.args, "task.args", of=f"task {spec!r}")
        try:
            found = found(**given)
        except FedstreamError:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigError(f"task {spec!r}: {called}() raised {words(error)}") from error
    elif settings.args:
        raise ConfigError(
            f"task.args.{next(iter(settings.args))}: the task {spec!r} takes no arguments, because "
            "it is already made: name its class, or a function that returns it"
        )
    if is_model(found):
        raise ConfigError(f"task {spec!r}: {called}() returned no task: {NOT_A_MODEL}")
    if not isinstance(found, Task):
        raise ConfigError(
            f"task {spec!r} is of type {type(found).__name__}: expected a fedstream.Task, or a "
            "class or function that returns one"
        )
    try:
        check_spelling(type(found))
    except ConfigError as error:
        raise ConfigError(f"task {spec!r}: {error}") from error
    return found


def _choices(names: Iterable[str]) -> str:
    return (
        f"; choose one of {', '.join(names)}, or name your own as path/to/file.py:attribute or "
        "package.module:attribute"
    )


def is_model(value: object) -> bool:
    """Whether the value is a model or a class of models, a common mistake for a task."""
    nn = sys.modules.get("torch.nn")  # if not imported, the value can't be a module
    cls = value if isinstance(value, type) else type(value)
    return nn is not None and issubclass(cls, nn.Module) and not issubclass(cls, Task)
