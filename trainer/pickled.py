"""A task as a file: how one that only exists in a program's memory reaches the services.

A task that is defined in a notebook, or in the script that starts a run, has no module that another
process could import. It is pickled by value into the run's own folder.

Reading a pickle runs whatever it says, so only a file that nobody but this user can have written is
read: it is never received from anywhere (docs/decisions/0032).
"""

from __future__ import annotations

import os
import pickle
import stat
import sys
from pathlib import Path

import cloudpickle

from fedstream.broker.errors import ConfigError, FedstreamError
from fedstream.runtime.plugins import words

SUFFIX = ".pickle"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def save(task: object, file: Path) -> None:
    """Write a task, for this user alone. Raises ConfigError if it cannot be pickled; OSError."""
    try:
        # Modules are pickled by name, so whoever reads this has to find them where we do.
        said = pickle.dumps([folder for folder in sys.path if folder]) + cloudpickle.dumps(task)
    except (TypeError, AttributeError, pickle.PicklingError, RecursionError) as error:
        raise ConfigError(
            f"the task can't be sent to the services, which are processes of their own: {error}. "
            "Let it open files, connections and the like in device_data(), or give its class or "
            "its name, file.py:attribute"
        ) from error
    file.touch(mode=0o600)
    file.write_bytes(said)


def load(file: Path) -> object:
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
