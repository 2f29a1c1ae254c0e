"""Keyword parameters of ``fedstream.run`` and ``fedstream.simulate``, as configuration keys.

A program's class or function, such as a strategy or a solver, is represented by its name. The run's
process gets the parameters as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeGuard

import numpy as np
from pydantic_core import PydanticSerializationError, to_json

from fedstream.api.references import importable
from fedstream.core.errors import ConfigError
from fedstream.local.request import RunRequest
from fedstream.runtime.config import NamedSettings, Option
from fedstream.runtime.text import did_you_mean
from fedstream.settings.config import Settings, read
from fedstream.settings.plugin_sources import REGISTRIES
from fedstream.strategies import Strategy
from fedstream.trainer.solvers import Solver

Part: TypeAlias = type[Any] | Callable[..., Any]

_TAGS = ("kind", "name")


def _is_named(value: object) -> TypeGuard[Part]:
    """Whether a value is represented by its name: a class or a function."""
    return isinstance(value, type) or isfunction(value)


def _is_part(value: object) -> TypeGuard[NamedSettings]:
    """Whether a value is represented by its keys: an object of a plug-in's class."""
    return isinstance(value, NamedSettings)


def _tagged(key: str, part: Part) -> str:
    """The key for a plug-in's name: ``solver.kind`` for a solver at ``solver``."""
    return key if key.rpartition(".")[2] in _TAGS else f"{key}.{_tag(part)}"


def _name_of(key: str, part: Part) -> str:
    """The name by which other processes find a class or function. Raises ConfigError."""
    if isinstance(part, type) and issubclass(part, NamedSettings):
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
    for registry in REGISTRIES.values():
        registry.renew(found, part)
    return found


def _table_of(key: str, part: NamedSettings) -> dict[str, object]:
    """The table of an object, such as ``Mine(beta=0.9)``. Raises ConfigError."""
    inner = {field: _table_of(f"{key}.{field}", value) for field, value in part if _is_part(value)}
    return {
        _tag(type(part)): _name_of(key, type(part)),
        **part.model_dump(mode="json", exclude={_tag(type(part)), *inner}),
        **inner,
    }


def _tag(part: Part) -> str:
    cls = part if isinstance(part, type) and issubclass(part, NamedSettings) else NamedSettings
    return cls.naming_key


ConfigTable: TypeAlias = Mapping[str, object]
StrategyLike: TypeAlias = str | ConfigTable | type[Strategy] | Strategy
SolverLike: TypeAlias = ConfigTable | type[Solver] | Solver


class Tables(TypedDict, total=False):
    """Tables of the configuration that are keyword parameters."""

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
    """Raise TypeError for an unknown keyword. ``others``: parameters that are no tables."""
    for name in tables:
        if name not in Tables.__annotations__:
            hint = did_you_mean(name, [*others, *Tables.__annotations__])
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def options(keys: Mapping[str, object] | None, parameters: Mapping[str, object]) -> list[Option]:
    """Configuration keys to set, in order. Raises ConfigError for an invalid key or value.

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
    return isinstance(value, Mapping) or _is_part(value)


def _flat(source: str, key: str, value: object) -> Iterator[Option]:
    """Flatten a tree of tables into keys, so that other layers can set neighbouring keys."""
    if _is_part(value):
        value = _table_of(key, value)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if not isinstance(name, str):
                raise ConfigError(f"{source}: {name!r} is not a key: keys are strings")
            yield from _flat(source, f"{key}.{name}" if key else name, inner)
    elif not key:
        raise ConfigError(f"{source}: expected a dict, such as {{'strategy.alpha': 0.3}}")
    elif _is_named(value):
        yield Option(source, _tagged(key, value), _name_of(key, value))
    else:
        yield Option(source, key, _plain(source, key, value))


def _plain(source: str, key: str, value: object) -> Any:
    """A value for JSON: numpy's numbers as Python's, tuples as lists, plug-ins by name."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if _is_named(value):
        return _name_of(key, value)
    if _is_part(value):
        value = _table_of(key, value)
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


@dataclass(frozen=True)
class PythonRequest:
    """The parameters of ``fedstream.run``.

    The run's process reads the configuration again, as a written one would lack its secrets.
    """

    config: Path | None
    options: Sequence[Option]
    out: Path
    trainers: int
    port: int | None

    def settings(self) -> Settings:
        """The resolved configuration. Raises ConfigError."""
        return read(self.config, (), self.options)

    def as_json(self) -> str:
        """The parameters as JSON, which may contain secrets."""
        return json.dumps(
            {
                "config": None if self.config is None else str(self.config),
                "options": self.options,
                "out": str(self.out),
                "trainers": self.trainers,
                "port": self.port,
            }
        )


def request_of(text: str) -> RunRequest:
    """The request for parameters in JSON. Raises ConfigError."""
    said = json.loads(text)
    config = None if said["config"] is None else Path(said["config"])
    options = [Option(*option) for option in said["options"]]
    asked = PythonRequest(config, options, Path(said["out"]), said["trainers"], said["port"])
    return RunRequest(asked.settings(), asked.out, trainers=asked.trainers, port=asked.port)
