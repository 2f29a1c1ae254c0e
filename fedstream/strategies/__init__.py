"""Strategies by name. To add one here, put a module beside these and a row in the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model
from fedstream.private import importing
from fedstream.runtime.plugins import RECORDED, OneOf, Plugin, PluginRegistry
from fedstream.strategies.afa import AfaCdSettings, AfaCsSettings
from fedstream.strategies.aflguard import AflGuardSettings
from fedstream.strategies.basgd import BasgdSettings
from fedstream.strategies.batches import Batch, FedBuffSettings
from fedstream.strategies.cached import AcedSettings, Ca2flSettings
from fedstream.strategies.fadas import FadasSettings
from fedstream.strategies.fedasync import FedAsyncSettings, Mixing
from fedstream.strategies.fedavg import FedAvgSettings
from fedstream.strategies.ring import RingleaderSettings, RingmasterSettings
from fedstream.strategies.scaffold import ScaffoldSettings, without_batch
from fedstream.strategies.staleness import FUNCTIONS, StalenessFunction
from fedstream.strategies.strategy import Decision, Memory, State, Strategy, Update
from fedstream.strategies.vectors import DeviceVectors

__all__ = [
    "FUNCTIONS",
    "RULES",
    "AcedSettings",
    "AfaCdSettings",
    "AfaCsSettings",
    "AflGuardSettings",
    "BasgdSettings",
    "Batch",
    "Ca2flSettings",
    "Decision",
    "DeviceVectors",
    "FadasSettings",
    "FedAsyncSettings",
    "FedAvgSettings",
    "FedBuffSettings",
    "Memory",
    "Mixing",
    "Model",
    "RingleaderSettings",
    "RingmasterSettings",
    "ScaffoldSettings",
    "StalenessFunction",
    "State",
    "Strategy",
    "StrategySettings",
    "Update",
    "names_in",
    "sources_of",
    "strategy_of",
    "without_batch",
]


def _accept(value: object) -> type[Strategy] | None:
    return value if isinstance(value, type) and issubclass(value, Strategy) else None


RULES: PluginRegistry[type[Strategy]] = PluginRegistry(
    "fedstream.strategies",
    "strategy",
    {
        "fedasync": FedAsyncSettings,
        "fedavg": FedAvgSettings,
        "fedbuff": FedBuffSettings,
        "afa-cd": AfaCdSettings,
        "afa-cs": AfaCsSettings,
        "scaffold": ScaffoldSettings,
        "ca2fl": Ca2flSettings,
        "aced": AcedSettings,
        "fadas": FadasSettings,
        "ringmaster": RingmasterSettings,
        "ringleader": RingleaderSettings,
        "basgd": BasgdSettings,
        "aflguard": AflGuardSettings,
    },
    accept=_accept,
    expected="a class derived from fedstream.strategies.Strategy",
)
StrategySettings = Annotated[Strategy, OneOf(RULES, tag="name")]

_RULES: TypeAdapter[Strategy] = TypeAdapter(StrategySettings)


def strategy_of(recorded: Mapping[str, Any], devices: int) -> Strategy:
    """The strategy that a journal recorded by name and parameters, for a run with ``devices``.

    Raises ConfigError; NotTrusted if its program may not be run (``runtime.plugins``).
    """
    plain = dict(recorded)
    terms = plain.pop("private", None)
    try:
        settings = _RULES.validate_python(plain, context=RECORDED)
        if terms is not None:
            with importing("a private run"):
                from fedstream.strategies.private_sums import PrivateSums, PrivateTerms

            settings = PrivateSums.of(settings, PrivateTerms.model_validate(terms, strict=False))
    except ValidationError as error:
        first = error.errors()[0]
        tag = first.get("ctx", {}).get("discriminator", "").strip("'")
        key = ".".join(["strategy", *map(str, first["loc"]), *([tag] if tag else [])])
        value = f" = {first['ctx']['tag']!r}" if "tag" in first.get("ctx", {}) else ""
        raise ConfigError(f"{key}{value}: {first['msg']}") from error
    return settings.build(devices)


def sources_of(rule: Strategy) -> dict[str, str]:
    """SHA-256 of the file that defines each user's rule, by its key below ``strategy``.

    Empty if the strategy and its staleness function are built in.
    """
    functions = {
        f"{key}.kind": FUNCTIONS.find(value.kind)
        for key, value in vars(rule).items()
        if isinstance(value, StalenessFunction)
    }
    plugins: dict[str, Plugin[Any]] = {"name": RULES.find(rule.name), **functions}
    return {key: one.digest for key, one in plugins.items() if one.digest is not None}


def names_in(recorded: Mapping[str, Any]) -> list[str]:
    """The names in a recorded strategy that may belong to a program."""
    inner = [table.get("kind") for table in recorded.values() if isinstance(table, Mapping)]
    return [name for name in (recorded.get("name"), *inner) if isinstance(name, str)]
