"""Checks for staleness functions."""

from __future__ import annotations

import math
from collections.abc import Callable

from pydantic import ValidationError

from fedstream.broker.errors import ConfigError
from fedstream.runtime.plugins import words
from fedstream.strategies import FUNCTIONS, StalenessFunction
from fedstream.testing.fault import Fault


def check_staleness(
    function: Callable[..., float] | type[StalenessFunction] | StalenessFunction,
    *,
    until: int = 100,
    **parameters: object,
) -> None:
    """Check a staleness function: s(0) = 1, and up to s(``until``) finite and not negative.

    ``parameters`` are those of the function or class. Raises Fault.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if isinstance(function, StalenessFunction):
        s = function
    else:
        try:
            s = FUNCTIONS.accepted(function).model_validate(parameters)
        except (ConfigError, ValidationError) as error:
            raise Fault(f"{name}: {error}") from error
    for d in range(until + 1):
        try:
            value, again = s(d), s(d)
        except Exception as error:
            raise Fault(f"{name}: s({d}) raised {words(error)}") from error
        if not isinstance(value, float) or not math.isfinite(value) or value < 0:
            raise Fault(f"{name}: s({d}) is {value!r}: expected a finite number, 0 or more")
        if value != again:
            raise Fault(f"{name}: s({d}) is {value!r} once and {again!r} the next time")
        if d == 0 and not math.isclose(value, 1.0):
            raise Fault(f"{name}: s(0) is {value!r}: an update that isn't stale weighs 1")
