"""Checks for staleness functions, partitions and scheduling policies; the error of all checks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from fedstream.coordinator.policies import POLICIES, Policy
from fedstream.coordinator.scheduling import HoldBack, Situation, plan
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.core.messages import Trigger, first_wrong, task_id
from fedstream.runtime.config import Section
from fedstream.runtime.plugins import PluginRegistry, words
from fedstream.runtime.task_settings import FixedSteps, Participation
from fedstream.settings.config import read
from fedstream.simulation import arrivals
from fedstream.strategies import FUNCTIONS, StalenessFunction
from fedstream.trainer.partitions import PARTITIONS, Partition, split


class Fault(AssertionError):
    """An error in a user's rule."""


S = TypeVar("S", bound=Section)


def made(registry: PluginRegistry[Any], part: type[S] | S, keys: Mapping[str, object]) -> S:
    """The object, which the registry must accept. Raises Fault."""
    cls = part if isinstance(part, type) else type(part)
    name = cls.__name__
    try:
        registry.accepted(cls)
        if isinstance(part, type):
            return part(**keys)
    except ValidationError as error:
        raise Fault(
            f"{name}: {first_wrong(error)}: give the check its keys, as in ({name}, key=value)"
        ) from error
    except FedstreamError as error:
        raise Fault(f"{name}: {error}") from error
    except Exception as error:  # an abstract class, or a failing validator
        raise Fault(f"{name}: {name}() raised {words(error)}") from error
    if keys:
        raise Fault(f"{name}: {next(iter(keys))} has no effect on an object: give the class")
    return part


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


_LABELS = np.repeat(np.arange(10), 40)
_FREE = HoldBack(max_queue=1 << 30, target_staleness=None, memory_budget=None)


def check_partition(
    partition: Callable[..., Sequence[Any]] | type[Partition] | Partition,
    *,
    labels: npt.NDArray[Any] = _LABELS,
    devices: int = 10,
    seed: int = 0,
    **parameters: object,
) -> None:
    """Check that a partition is valid, and depends only on its arguments. Raises Fault.

    ``parameters``: those of the function or class. By default there are 40 samples of each of 10
    classes.
    """
    name = getattr(partition, "__name__", type(partition).__name__)
    try:
        if not isinstance(partition, Partition):
            partition = PARTITIONS.accepted(partition).model_validate(parameters)
        first, again = (split(partition, labels, devices, seed) for _ in range(2))
    except (FedstreamError, ValidationError) as error:
        raise Fault(f"{name}: {error}") from error
    for device, (rows, others) in enumerate(zip(first, again, strict=True)):
        if not np.array_equal(rows, others):
            raise Fault(
                f"{name}: device {device} gets other rows the second time: a partition must depend "
                "on labels, devices, seed and its parameters alone"
            )


def check_policy(
    policy: type[Policy] | Policy, *, situations: int = 100, seed: int = 0, **keys: object
) -> None:
    """Check that a policy is a function of its input, live and in a simulation. Raises Fault.

    In ``situations`` drawn from ``seed``, the policy must decide the same when asked twice, and
    return only valid values; a simulation of as many answers must end, with the same result twice.
    ``policy``: an object, or a class and its ``keys``.
    """
    name = policy.__name__ if isinstance(policy, type) else type(policy).__name__
    try:
        one = made(POLICIES, policy, keys)
        rng = random.Random(seed)
        for n in range(situations):
            seen = _situation(rng)
            if _decided(one, seen, n) != _decided(one, seen, n):
                raise Fault(f"{name}: asked twice, it decides differently in {seen}")
        if not one.devices_decide and _simulated(one, situations) != _simulated(one, situations):
            raise Fault(f"{name}: a simulation is not the same the second time")
    except (FedstreamError, ValidationError, TypeError) as error:
        raise Fault(f"{name}: {error}") from error


def _situation(rng: random.Random) -> Situation:
    """Draw the state of a run with up to 20 devices."""
    devices = tuple(range(rng.randint(1, 20)))
    began, last = rng.uniform(0, 1e9), rng.uniform(0, 100)
    open_ = rng.sample(devices, rng.randint(0, len(devices)))
    trainers = rng.randint(0, 20)
    return Situation(
        now=began + last + rng.expovariate(1.0),
        issued=rng.randint(0, 10_000),
        version=rng.randint(0, 1000),
        open=tuple(Trigger(task=task_id(1), device=device, seed=0) for device in open_),
        queue=0,
        backlog=0,
        kept=1,
        held=(),
        round_ending=False,
        mean_staleness=rng.choice([0.0, rng.expovariate(0.3)]),
        trainers=trainers,
        workers=trainers + rng.randint(0, 20),
        model_bytes=1000,
        devices=devices,
        last=began + last,
        round_since=0.0,
        began=began,
    )


def _decided(policy: Policy, seen: Situation, seed: int) -> tuple[object, ...]:
    """The plan, without tasks' ids, which depend on the time."""
    what = plan(policy, Participation(FixedSteps()), _FREE, seed, seen)
    tasks = [(trigger.device, trigger.seed) for trigger in what.triggers]
    return what.limit, tasks, what.wake_at, what.last


def _simulated(policy: Policy, events: int) -> list[object]:
    usual = read(
        None,
        [
            "simulation.staleness.kind=latency",
            "devices.latency.kind=exponential",
            "devices.latency.mean_s=1.0",
            "devices.dropout=0.1",
        ],
    )
    if getattr(policy, "n", 1) is None:
        raise ConfigError("give it n: a simulation has no trainers to derive it from")
    scheduler = usual.scheduler.model_copy(update={"policy": policy})
    settings = usual.model_copy(update={"scheduler": scheduler})
    return list(islice(arrivals.plan(settings, 10), events))
