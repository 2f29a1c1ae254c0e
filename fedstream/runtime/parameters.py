"""The typed parameters of a user's function, as settings.

A user's program declares what can be configured where it uses it::

    def task(hidden: int = 64, activation: Literal["relu", "tanh"] = "relu") -> Task: ...

Values are checked against the types, as strictly as everything else in the configuration.
"""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from fedstream.broker.errors import ConfigError
from fedstream.runtime.config import Section, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

M = TypeVar("M", bound=BaseModel)

_Parameter = inspect.Parameter


class _Arguments(Section):
    """Base of all arguments. A function's parameters may be named and typed in any way."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def arguments(
    function: Callable[..., object], table: Mapping[str, object], at: str, *, of: str
) -> dict[str, Any]:
    """The keyword arguments of ``function`` that ``table`` sets, checked against its signature.

    ``at`` is the table's place in the configuration, ``of`` is the function in words, for errors.

    Raises ConfigError, naming the key, for an unknown, invalid or missing argument.
    """
    settable = (_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)
    try:  # without a table, no type is needed
        known = [one for one in _parameters(function, typed=bool(table)) if one.kind in settable]
        keys = [one for one in known if not one.name.startswith("_")]  # pydantic's are private
        schema = _table(function, _Arguments, keys) if table else None
    except ConfigError as error:
        raise ConfigError(f"{of}: {error}") from error
    if schema is None:
        for one in known:
            if one.default is _Parameter.empty:
                raise ConfigError(f"{at}.{one.name}: required by {of}, but not given")
        return {}
    if not known:
        raise ConfigError(f"{at}.{next(iter(table))}: {of} takes no arguments; leave it out")
    settings = check(schema, table, at)
    return {name: getattr(settings, name) for name in table}


def table_of(function: Callable[..., Any], base: type[M], given: Iterable[str]) -> type[M]:
    """A settings class made from a function, whose parameters become its keys.

    ``given``: the parameters that are no keys because the caller passes them. Raises ConfigError
    for a function that can't be used so.
    """
    name = _name(function)
    parameters, passed = _parameters(function), tuple(given)
    if len(parameters) < len(passed):
        raise ConfigError(f"{name}() must take {', '.join(passed)}, then its own parameters")
    keys = parameters[len(passed) :]
    for one in keys:
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY):
            raise ConfigError(f"{name}(): parameter {one} can't be a key: name each parameter")
        if one.annotation is one.empty:
            raise ConfigError(
                f"{name}(): parameter {one.name} needs a type, as in `{one.name}: float`"
            )
        if one.name in base.model_fields:
            raise ConfigError(f"{name}(): parameter {one.name} has a key's name: rename it")
    return _table(function, base, keys)


def _parameters(function: Callable[..., object], *, typed: bool = True) -> list[_Parameter]:
    """A function's parameters, with their types evaluated if ``typed``."""
    try:
        return list(inspect.signature(function, eval_str=typed).parameters.values())
    except Exception as error:  # evaluating a user's annotations may raise anything
        raise ConfigError(f"its parameters can't be read: {error}") from error


def _table(function: Callable[..., object], base: type[M], keys: Iterable[_Parameter]) -> type[M]:
    fields: dict[str, Any] = {
        one.name: (
            Any if one.annotation is one.empty else one.annotation,
            ... if one.default is one.empty else one.default,
        )
        for one in keys
    }
    try:
        with warnings.catch_warnings():  # a parameter may have the name of a method of BaseModel
            warnings.simplefilter("ignore", UserWarning)
            return create_model(
                _name(function), __base__=base, __doc__=inspect.getdoc(function),
                __module__=function.__module__, **fields,
            )  # fmt: skip
    except (PydanticUserError, NameError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"its parameters can't be configured: {reason}") from error


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", "function")
