"""Loading a task by its name: a built-in one, or one that a user's program defines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.runtime.parameters import arguments
from fedstream.runtime.plugins import import_attribute, words
from fedstream.trainer import pickled
from fedstream.trainer.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedstream.trainer.task import TaskSettings


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
                f"unknown task {spec!r}; choose one of {', '.join(BUILT_IN)}, or name your own as "
                "path/to/file.py:attribute or package.module:attribute"
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
    if callable(found):
        called = spec.rpartition(":")[2]
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
    if not isinstance(found, Task):
        raise ConfigError(
            f"task {spec!r} is of type {type(found).__name__}: expected a fedstream.Task, or a "
            "class or function that returns one"
        )
    return found
