"""Loading a task by its name: a built-in one, or one that a user's program defines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.runtime.misspelt import check_spelling
from fedstream.runtime.nearest import did_you_mean
from fedstream.runtime.parameters import arguments
from fedstream.runtime.plugins import import_attribute, words
from fedstream.trainer import pickled
from fedstream.trainer.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from fedstream.trainer.task import TaskSettings

NOT_A_MODEL = (
    "it is a model alone (a torch.nn.Module): a task also has the devices' data; return the model "
    "from the method model() of a class derived from fedstream.Task (docs/tutorial/own-task.md)"
)


def load_task(
    spec: str, settings: TaskSettings, *, adapt: Callable[[object], object] = lambda found: found
) -> Task:
    """Load the task of this name.

    A user's own class, or function that returns a task, is called with ``settings.args``; the
    other settings apply to built-in tasks only. ``adapt`` turns another framework's object into
    such a function, and returns anything else as it is.

    Raises ConfigError, saying what and where, if there is no such task, its program fails, or an
    argument is wrong; DataError if its data is missing.
    """
    program, _, _ = spec.rpartition(":")
    if not program:
        from fedstream.trainer.tasks import BUILT_IN

        if spec not in BUILT_IN:
            raise ConfigError(
                f"unknown task {spec!r}" + (did_you_mean(spec, BUILT_IN) or _choices(BUILT_IN))
            )
        if settings.args:
            raise ConfigError(
                f"task.args.{next(iter(settings.args))} has no effect on the built-in task "
                f"{spec!r}: leave it out"
            )
        return BUILT_IN[spec](settings)
    from fedstream.trainer import torchvision_ops

    torchvision_ops.declare_missing()  # a user's program may import torchvision
    if program.endswith(pickled.SUFFIX):
        found = pickled.load(Path(program))
    else:
        found, _ = import_attribute(spec, what="task")
    return made(adapt(found), spec, settings)


def made(found: object, spec: str, settings: TaskSettings) -> Task:
    """The task that an object is, or returns if called with ``settings.args``.

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
    """Whether this is only a model, or a class of models, which is easily taken for a task."""
    nn = sys.modules.get("torch.nn")  # if nobody has imported it, it is none
    cls = value if isinstance(value, type) else type(value)
    return nn is not None and issubclass(cls, nn.Module) and not issubclass(cls, Task)
