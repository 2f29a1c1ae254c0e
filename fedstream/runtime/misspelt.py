"""Methods of somebody's class that were meant to override ours, but are misspelt.

Most methods of a strategy or a policy are optional, so nothing else would tell that ``end_rond``
is never called.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isfunction
from types import CodeType, FunctionType
from typing import Any

from fedstream.broker.errors import ConfigError
from fedstream.runtime.nearest import nearest

_LIKENESS = 0.8


def check_spelling(cls: type[Any]) -> None:
    """Raise ConfigError for a public method that nothing in the class uses, if its name is nearly
    that of a method which the class may override."""
    base = next((one for one in cls.__mro__ if _is_ours(one)), object)
    own = [one for one in cls.__mro__ if issubclass(one, base) and not _is_ours(one)]
    known = {name for one in base.__mro__ if _is_ours(one) for name, _ in _methods(one)}
    methods = [method for one in own for method in _methods(one)]
    for name, _ in methods:
        if name in known or (near := nearest(name, known, likeness=_LIKENESS)) is None:
            continue
        if not any(name in _mentioned(code.__code__) for other, code in methods if other != name):
            raise ConfigError(
                f"defines {name}(), which nothing uses; did you mean {near}()? If not, rename it"
            )


def _is_ours(cls: type[Any]) -> bool:
    return cls.__module__.partition(".")[0] == "fedstream"


def _methods(cls: type[Any]) -> Iterator[tuple[str, FunctionType]]:
    """Public methods and properties that this class defines."""
    for name, value in vars(cls).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if isfunction(function) and not name.startswith("_"):
            yield name, function


def _mentioned(code: CodeType) -> set[str]:
    """Names that a function's code reads, also within the functions in it."""
    inner = [_mentioned(one) for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*inner)
