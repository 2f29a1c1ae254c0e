"""The tables ``[[sinks]]``, and the names and parameters of a run's sinks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel

from fedstream.runtime.plugins import OneOf, PluginRegistry
from fedstream.sinks.mlflow import MLflowSettings
from fedstream.sinks.service import Named
from fedstream.sinks.sink import SinkSettings, TrackedValue
from fedstream.sinks.tensorboard import TensorBoardSettings
from fedstream.sinks.wandb import WandbSettings


def _accept(value: object) -> type[SinkSettings] | None:
    return value if isinstance(value, type) and issubclass(value, SinkSettings) else None


SINKS: PluginRegistry[type[SinkSettings]] = PluginRegistry(
    "fedstream.sinks",
    "sink",
    {"tensorboard": TensorBoardSettings, "mlflow": MLflowSettings, "wandb": WandbSettings},
    accept=_accept,
    expected="a class derived from fedstream.sinks.SinkSettings",
)
SomeSink = Annotated[SinkSettings, OneOf(SINKS)]

# Tables that are no parameters of a run: deployment, and possible secrets.
_APART = {"redis", "http", "log", "tracing", "sinks", "helper"}


def added(sinks: Sequence[SinkSettings], kinds: Iterable[str]) -> list[dict[str, Any]]:
    """Tables of the configured sinks, and default tables of other ``kinds``."""
    there = [sink.model_dump(mode="json", exclude_none=True) for sink in sinks]
    known = {sink.kind for sink in sinks}
    return there + [{"kind": kind} for kind in dict.fromkeys(kinds) if kind not in known]


def named(sinks: Sequence[SinkSettings]) -> list[Named]:
    """Name the sinks by kind, with a number from the second of a kind on."""
    seen = Counter[str]()
    found = []
    for settings in sinks:
        kind = settings.kind
        seen[kind] += 1
        name = kind if seen[kind] == 1 else f"{kind}-{seen[kind]}"
        found.append(Named(name, settings, settings.build))
    return found


def parameters(settings: BaseModel) -> dict[str, TrackedValue]:
    """A configuration by dotted key, without secrets; lists as JSON."""
    return flat(settings.model_dump(mode="json", exclude_none=True))


def flat(tables: Mapping[str, Any]) -> dict[str, TrackedValue]:
    """The parameters in the tables of a run.toml."""
    return dict(_flat({name: one for name, one in tables.items() if name not in _APART}, ""))


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, TrackedValue]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value) if isinstance(value, list) else value
