"""Keyword parameters of ``fedstream.run`` and ``fedstream.simulate``, as configuration keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict

import numpy as np
from pydantic_core import PydanticSerializationError, to_json

from fedstream.api import parts
from fedstream.broker.errors import ConfigError
from fedstream.runtime.config import Option
from fedstream.runtime.text import did_you_mean
from fedstream.strategies import Strategy
from fedstream.trainer.solvers import Solver

ConfigTable: TypeAlias = Mapping[str, object]
StrategyLike: TypeAlias = str | ConfigTable | type[Strategy] | Strategy
SolverLike: TypeAlias = ConfigTable | type[Solver] | Solver


class Tables(TypedDict, total=False):
    """Tables of the configuration that have a keyword parameter of their own name."""

    run: ConfigTable
    http: ConfigTable
    page: ConfigTable
    log: ConfigTable
    solver: SolverLike
    solvers: Sequence[ConfigTable]
    participation: Sequence[ConfigTable]
    scheduler: ConfigTable
    coordinator: ConfigTable
    gateway: ConfigTable
    lease: ConfigTable
    updater: ConfigTable
    trainer: ConfigTable
    evaluator: ConfigTable
    wire: ConfigTable
    simulation: ConfigTable
    sinks: Sequence[ConfigTable]
    tracing: ConfigTable


# Parameters that set one key; those that are also a table's name may be given as that table.
_KEYS = {
    "task": "task.name",
    "strategy": "strategy.name",
    "versions": "run.versions",
    "devices": "task.devices",
    "redis": "redis.url",
    "data_root": "task.data_root",
}


def check_names(function: str, tables: Mapping[str, object], others: Sequence[str]) -> None:
    """Raise TypeError for a keyword that is no parameter. ``others``: parameters but the tables."""
    for name in tables:
        if name not in Tables.__annotations__:
            hint = did_you_mean(name, [*others, *Tables.__annotations__])
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def options(keys: Mapping[str, object] | None, parameters: Mapping[str, object]) -> list[Option]:
    """Configuration keys to set, in order. Raises ConfigError for what is no key or value.

    ``keys``: values by dotted key, the parameter ``set``. ``parameters``: the others by name; None:
    not given.
    """
    found: list[Option] = []
    if keys is not None:
        found += _flat("set", "", keys)
    for name, value in parameters.items():
        if value is not None:
            key = name if _is_table(value) else _KEYS.get(name, name)
            found += _flat(f"{name}=", key, value)
    return found


def _is_table(value: object) -> bool:
    return isinstance(value, Mapping) or parts.is_table(value)


def _flat(source: str, key: str, value: object) -> Iterator[Option]:
    """A key for each value in a tree of tables, so that one layer can set neighbours of it."""
    if parts.is_table(value):
        value = parts.table(key, value)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{source}: {name!r} is not a key: keys are strings")
            yield from _flat(source, f"{key}.{name}" if key else name, inner)
    elif not key:
        raise ConfigError(f"{source}: expected a dict, such as {{'strategy.alpha': 0.3}}")
    elif parts.is_named(value):
        yield Option(source, parts.tagged(key, value), parts.name(key, value))
    else:
        yield Option(source, key, _plain(source, key, value))


def _plain(source: str, key: str, value: object) -> Any:
    """A value as JSON knows it: numpy's numbers as Python's, tuples as lists, parts by name."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if parts.is_named(value):
        return parts.name(key, value)
    if parts.is_table(value):
        value = parts.table(key, value)
    if isinstance(value, Mapping):
        return {name: _plain(source, f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(source, key, inner) for inner in value]
    try:
        to_json(value)
    except PydanticSerializationError as error:
        raise ConfigError(
            f"{key} (from {source}): a value of type {type(value).__name__} can't be written in a "
            "configuration"
        ) from error
    return value
