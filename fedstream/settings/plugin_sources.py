"""The plug-ins that a configuration can name, and the sources of those that it names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from fedstream.coordinator.gateway.attestation import VERIFIERS
from fedstream.coordinator.policies import POLICIES
from fedstream.core.errors import ConfigError
from fedstream.sinks.settings import SINKS
from fedstream.strategies import FUNCTIONS, RULES, StalenessFunction
from fedstream.trainer.partitions import PARTITIONS
from fedstream.trainer.schedules import SCHEDULES
from fedstream.trainer.solvers import SOLVERS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.metadata import EntryPoint

    from fedstream.runtime.plugins import PluginRegistry
    from fedstream.settings.config import Settings


# Every registry, with the configuration key that names one of its plug-ins.
REGISTRIES: dict[str, PluginRegistry[Any]] = {
    "strategy.name": RULES,
    "strategy.staleness.kind": FUNCTIONS,
    "solver.kind": SOLVERS,
    "solver.schedule.kind": SCHEDULES,
    "task.partition.kind": PARTITIONS,
    "scheduler.policy.kind": POLICIES,
    "sinks.kind": SINKS,
    "gateway.attestation.kind": VERIFIERS,
}


class Listed(NamedTuple):
    """A plug-in that a configuration can name without a path."""

    key: str
    name: str
    source: str
    """built in, or the package and its entry point"""
    problem: str
    """why it is unusable; '' if usable"""


def listed() -> Iterator[Listed]:
    """The plug-ins for each key. Loads the entry points of installed packages."""
    for key, registry in REGISTRIES.items():
        announced = registry.announced()
        for name in registry.names():
            source, problem = "built in", ""
            if name not in registry.built_in:
                source = _package(announced[name])
                try:
                    registry.find(name)
                except ConfigError as error:
                    problem = str(error)
            yield Listed(key, name, source, problem)
        for name in sorted(announced.keys() & registry.built_in.keys()):
            yield Listed(key, name, _package(announced[name]), "the name of a built-in one")


def _package(entry: EntryPoint) -> str:
    whose = "" if entry.dist is None else f"{entry.dist.name} {entry.dist.version}: "
    return f"{whose}{entry.value}"


def part_sources(settings: Settings) -> dict[str, str]:
    """SHA-256 of the file of each user's solver, partition and policy, by configuration key.

    Recorded for information: unlike strategies, these are not needed to replay a run.
    """
    policy, partition = settings.scheduler.policy, settings.task.partition
    named: dict[str, tuple[PluginRegistry[Any], str | None]] = {
        "solver.kind": (SOLVERS, settings.solver.kind),
        "solver.schedule.kind": (SCHEDULES, settings.solver.schedule.kind),
        "task.partition.kind": (PARTITIONS, partition.kind if partition is not None else None),
        "scheduler.policy.kind": (POLICIES, policy.kind if policy is not None else None),
        **{f"solvers[{n}].kind": (SOLVERS, group.kind) for n, group in enumerate(settings.solvers)},
    }
    found = {key: _digest(registry, name) for key, (registry, name) in named.items() if name}
    return {key: digest for key, digest in found.items() if digest is not None}


def doubts(settings: Settings) -> Iterator[str]:
    """Warnings about allowed but probably unintended settings, shown at a run's start."""
    adapt, versions = settings.strategy.adapt, settings.run.versions
    if adapt is not None and versions < 2 * adapt.every:
        yield (
            f"no effect: strategy.adapt, because alpha or server_lr changes first after "
            f"2 * adapt.every = {2 * adapt.every} versions, and run.versions = {versions}"
        )
    for key, s in vars(settings.strategy).items():
        if isinstance(s, StalenessFunction):
            try:
                fresh = s(0)
            except Exception:  # noqa: S112  (the first update will tell, with its place)
                continue
            if not math.isclose(fresh, 1.0):
                yield (
                    f"strategy.{key}.kind = {s.kind!r}: s(0) is {fresh:g}, but an update that is "
                    "not stale should weigh 1, so that s only says what staleness costs"
                )


def _digest(registry: PluginRegistry[Any], name: str) -> str | None:
    try:
        return registry.find(name).digest
    except ConfigError:
        return None  # a class made while a program runs has no name by which others find it
