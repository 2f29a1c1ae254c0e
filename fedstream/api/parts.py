"""The name in a configuration of a class or function that a program gives: a strategy, a solver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import isfunction
from typing import Any, TypeAlias, TypeGuard

from fedstream.api.references import importable
from fedstream.broker.errors import ConfigError
from fedstream.runtime.config import Chosen
from fedstream.settings.parts import DOORS

Part: TypeAlias = type[Any] | Callable[..., Any]

_TAGS = ("kind", "name")


def is_named(value: object) -> TypeGuard[Part]:
    """Whether a value stands in a configuration by its name: a class or a function."""
    return isinstance(value, type) or isfunction(value)


def is_table(value: object) -> TypeGuard[Chosen]:
    """Whether a value stands in a configuration by its keys: an object of such a class."""
    return isinstance(value, Chosen)


def tagged(key: str, part: Part) -> str:
    """The key that has a part's name: ``solver.kind`` for a solver at ``solver``."""
    return key if key.rpartition(".")[2] in _TAGS else f"{key}.{_tag(part)}"


def name(key: str, part: Part) -> str:
    """The name by which every process finds a class or function. Raises ConfigError."""
    if isinstance(part, type) and issubclass(part, Chosen):
        built_in = part.model_fields[part.naming_key].default
        if isinstance(built_in, str) and built_in:
            return built_in
    module, own = sys.modules.get(part.__module__), part.__qualname__
    what = f"{key}: the {'class' if isinstance(part, type) else 'function'} {own}"
    advice = "put it into a file of its own, such as my_rules.py, and import it from there"
    if part.__module__ == "__main__" or module is None:
        raise ConfigError(
            f"{what} is defined in the program or notebook that starts the run, where the run's "
            f"processes and a replay can't find it: {advice}"
        )
    if vars(module).get(own) is not part:
        raise ConfigError(f"{what} can't be found by this name in {module.__name__}: {advice}")
    source = importable(module)
    if source is None:
        raise ConfigError(
            f"{what} is in {module.__name__}, which other processes can't import: install its "
            "package, or start in the folder that contains it"
        )
    found = f"{source}:{own}"
    for door in DOORS.values():
        door.renew(found, part)
    return found


def table(key: str, part: Chosen) -> dict[str, object]:
    """The table of an object, such as ``Mine(beta=0.9)``. Raises ConfigError."""
    inner = {field: table(f"{key}.{field}", value) for field, value in part if is_table(value)}
    return {
        _tag(type(part)): name(key, type(part)),
        **part.model_dump(mode="json", exclude={_tag(type(part)), *inner}),
        **inner,
    }


def _tag(part: Part) -> str:
    cls = part if isinstance(part, type) and issubclass(part, Chosen) else Chosen
    return cls.naming_key
