"""Version 0 of a Flower app: where its model's names, shapes and values come from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstream.broker.errors import ConfigError
from fedstream.runtime.plugins import import_attribute

GIVE = "name the app's model with --model package.module:Name (task.args.model)"


class Arrays(nn.Module):
    """The model of an app that isn't written in torch: numbered arrays, in the app's order."""

    def __init__(self, arrays: Sequence[Any]) -> None:
        super().__init__()
        for n, values in enumerate(arrays):
            array = np.asarray(values)
            if array.dtype.kind != "f":
                raise ConfigError(
                    f"array {n} of the model is of dtype {array.dtype}: only arrays of float "
                    "without names can be mixed; for others, let the model be a torch module"
                )
            self.register_parameter(str(n), nn.Parameter(torch.from_numpy(array.copy())))


def maker(
    given: str | Callable[[], object] | None,
    app_module: ModuleType | None,
    initial: Callable[[], Sequence[Any]] | None,
) -> Callable[[], nn.Module]:
    """The function that makes version 0.

    ``given``: a callable, or its name. Without one, the only module class in ``app_module``; or
    else ``initial``, the arrays that a client starts from. Raises ConfigError.
    """
    if isinstance(given, str):
        if ":" not in given:
            raise ConfigError(f"model {given!r}: expected package.module:Name")
        given, _ = import_attribute(given, what="model")
    if given is not None:
        if not callable(given) or isinstance(given, nn.Module):
            raise ConfigError(
                f"the Flower app's model is of type {type(given).__name__}: expected a callable "
                "without arguments, such as the model's class"
            )
        return lambda: _module(given())
    classes = _classes(app_module) if app_module is not None else []
    if len(classes) == 1:
        return lambda: _module(classes[0]())
    if classes:
        names = ", ".join(one.__name__ for one in classes)
        raise ConfigError(f"which of {names} is the Flower app's model? {GIVE}")
    if initial is None:
        raise ConfigError(f"the Flower app's module has no torch model: {GIVE}")
    return lambda: _module(initial())


def _classes(module: ModuleType) -> list[type[nn.Module]]:
    """The module classes that an app's module defines or imports, without torch's own."""
    found = {
        one: None
        for one in vars(module).values()
        if isinstance(one, type)
        and issubclass(one, nn.Module)
        and not one.__module__.startswith(("torch.", "torchvision."))
    }
    return list(found)


def _module(made: object) -> nn.Module:
    if isinstance(made, nn.Module):
        return made
    if isinstance(made, list | tuple) and made:  # a client may return an empty list
        return Arrays(made)
    raise ConfigError(
        f"the Flower app's model is of type {type(made).__name__}: expected a torch.nn.Module or a "
        f"list of numpy arrays; {GIVE}"
    )


def module_of(spec: str) -> ModuleType | None:
    """The module that an app was loaded from by name."""
    source = spec.rpartition(":")[0]
    return sys.modules.get(Path(source).stem if source.endswith(".py") else source)
