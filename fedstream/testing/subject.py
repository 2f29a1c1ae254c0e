"""What is checked: an object, or a class and the keys to make one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from fedstream.broker.errors import FedstreamError
from fedstream.broker.messages import first_wrong
from fedstream.runtime.config import Section
from fedstream.runtime.plugins import Door, words
from fedstream.testing.fault import Fault

S = TypeVar("S", bound=Section)


def made(door: Door[Any], part: type[S] | S, keys: Mapping[str, object]) -> S:
    """The object, which the door must accept. Raises Fault."""
    cls = part if isinstance(part, type) else type(part)
    name = cls.__name__
    try:
        door.accepted(cls)
        if isinstance(part, type):
            return part(**keys)
    except ValidationError as error:
        raise Fault(
            f"{name}: {first_wrong(error)}: give the check its keys, as in ({name}, key=value)"
        ) from error
    except FedstreamError as error:
        raise Fault(f"{name}: {error}") from error
    except Exception as error:  # it is abstract, or a validator of its own fails
        raise Fault(f"{name}: {name}() raised {words(error)}") from error
    if keys:
        raise Fault(f"{name}: {next(iter(keys))} has no effect on an object: give the class")
    return part
