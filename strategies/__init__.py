"""Strategies by name. To add one, put a module beside these and a member in the union here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from fedstream.broker.errors import ConfigError
from fedstream.broker.messages import first_wrong
from fedstream.strategies.afa import AfaCdSettings, AfaCsSettings
from fedstream.strategies.fedasync import FedAsyncSettings
from fedstream.strategies.fedavg import FedAvgSettings
from fedstream.strategies.fedbuff import FedBuffSettings
from fedstream.strategies.scaffold import ScaffoldSettings, without_batch
from fedstream.strategies.strategy import Decision, Memory, State, Strategy, Update
from fedstream.strategies.vectors import DeviceVectors

__all__ = [
    "AfaCdSettings",
    "AfaCsSettings",
    "Decision",
    "DeviceVectors",
    "FedAsyncSettings",
    "FedAvgSettings",
    "FedBuffSettings",
    "Memory",
    "Rule",
    "ScaffoldSettings",
    "State",
    "Strategy",
    "StrategySettings",
    "Update",
    "strategy_of",
    "without_batch",
]

Rule: TypeAlias = (
    FedAsyncSettings
    | FedAvgSettings
    | FedBuffSettings
    | AfaCdSettings
    | AfaCsSettings
    | ScaffoldSettings
)
StrategySettings = Annotated[Rule, Field(discriminator="name")]

_RULES: TypeAdapter[Rule] = TypeAdapter(StrategySettings)


def strategy_of(recorded: Mapping[str, Any], devices: int) -> Strategy:
    """The strategy that a journal recorded by name and parameters, for a run with ``devices``.

    Raises ConfigError.
    """
    try:
        settings = _RULES.validate_python(dict(recorded), strict=False)
    except ValidationError as error:
        raise ConfigError(f"strategy.{first_wrong(error)}") from error
    return settings.build(devices)
