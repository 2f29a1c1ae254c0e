"""The typed parameters of a user's function, as settings.

A user's program declares what can be configured where it uses it::

    def task(hidden: int = 64, activation: Literal["relu", "tanh"] = "relu") -> Task: ...

Values are checked against the types, as strictly as everything else in the configuration.
"""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, create_model
from pydantic.errors import PydanticUserError

from fedstream.broker.errors import ConfigError
from fedstream.runtime.config import Section, check

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_Parameter = inspect.Parameter


class _Arguments(Section):
    """Base of all arguments. A function's parameters may be named and typed in any way."""

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())


def arguments(
    function: Callable[..., object],
    table: Mapping[str, object],
    at: str,
    *,
    of: str,
    given: int = 0,
) -> dict[str, Any]:
    """The keyword arguments of ``function`` that ``table`` sets, checked against its signature.

    ``at`` is the table's place in the configuration, ``of`` is the function in words, for errors;
    ``given``: the number of leading parameters that are not settings.

    Raises ConfigError, naming the key, for an unknown, invalid or missing argument.
    """
    try:
        signature = inspect.signature(function, eval_str=bool(table))
    except Exception as error:  # evaluating a user's annotations may raise anything
        raise ConfigError(f"{of}: its parameters cannot be read: {error}") from error
    settable = (_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)
    known = [one for one in list(signature.parameters.values())[given:] if one.kind in settable]
    if not table:  # then no type is needed
        for one in known:
            if one.default is _Parameter.empty:
                raise ConfigError(f"{at}.{one.name}: required by {of}, but not given")
        return {}
    if not known:
        raise ConfigError(f"{at}.{next(iter(table))}: {of} takes no arguments; leave it out")
    settings = check(_schema(function, known, of), table, at)
    return {name: getattr(settings, name) for name in table}


def _schema(
    function: Callable[..., object], known: list[inspect.Parameter], of: str
) -> type[Section]:
    fields: dict[str, Any] = {
        one.name: (
            Any if one.annotation is _Parameter.empty else one.annotation,
            ... if one.default is _Parameter.empty else one.default,
        )
        for one in known
        if not one.name.startswith("_")  # pydantic has no such fields
    }
    try:
        with warnings.catch_warnings():  # a parameter may have the name of a method of BaseModel
            warnings.simplefilter("ignore", UserWarning)
            return create_model(
                getattr(function, "__name__", "Arguments"), __base__=_Arguments, **fields
            )
    except (PydanticUserError, NameError, TypeError) as error:
        raise ConfigError(
            f"{of}: its parameters cannot be configured: {str(error).splitlines()[0]}"
        ) from error
