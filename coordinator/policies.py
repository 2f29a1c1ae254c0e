"""Scheduling policies: the number of concurrent tasks, the time and device of the next one.

A policy is a pure function: it has no state and no clock, and draws random numbers only from the
generator that it is given. So the same policy works live and on a simulation's virtual clock, and a
scheduler that takes over continues as its predecessor would have.

The scheduler, not the policy, decides on limits (memory, the queue, staleness), on which devices
may begin now, and on the length of a task.
"""

from __future__ import annotations

import inspect
import math
import random
from abc import abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from fedstream.coordinator.rounds import Rounds
from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.runtime.config import NamedSettings, Positive
from fedstream.runtime.plugins import OneOf, PluginRegistry, words
from fedstream.runtime.task_settings import Participation


@dataclass(frozen=True, slots=True)
class Traffic:
    """The input of a policy, live and in a simulation."""

    now: float
    """seconds: since 1970, or in a simulation since its start"""
    began: float
    """beginning of the run, on the same clock"""
    issued: int
    """tasks issued so far, which is also the number of the next task"""
    version: int
    """the newest version"""
    at_work: Collection[int]
    """devices with an open task"""
    devices: Sequence[int]
    """all available devices, at work or not"""
    trainers: int
    """live trainers; 0 in a simulation"""
    mean_staleness: float
    """moving average over recent updates, in versions"""
    last: float
    """beginning of the last task (see :attr:`Policy.catches_up`); at first, of scheduling"""
    workers: int
    """tasks that can be trained at the same time: live trainers, counting for a gateway its
    present devices; 0 in a simulation"""


class Policy(NamedSettings):
    """Base class of policies. A policy's fields are the keys of ``scheduler.policy``.

    Only :meth:`in_flight` must be defined. By default, a task begins as soon as fewer tasks are
    open, on a device drawn by the rates of ``participation``.
    """

    kind: str = ""
    """the policy's name in the configuration"""
    catches_up: ClassVar[bool] = False
    """Whether ``last`` is the time at which the last task was due, and not its beginning. If so, a
    task that begins late doesn't delay the next one, which keeps the mean rate; a live scheduler
    makes up for 1 s at most."""
    devices_decide: ClassVar[bool] = False
    """Whether devices ask for tasks, and the scheduler triggers none."""

    @abstractmethod
    def in_flight(self, traffic: Traffic) -> int:
        """The number of tasks to keep open at the same time: at least 1.

        More than one per device is the same as one per device. The scheduler asks again whenever a
        task begins or ends, or a version is made.
        """

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        """The time at which the next task is to begin, on the clock of ``traffic.now``.

        By default at once. The scheduler asks again at that time, with the same draw, so count from
        ``traffic.last``: a time that counts from ``traffic.now`` never comes.
        """
        return traffic.now

    def choose(
        self,
        traffic: Traffic,
        idle: Sequence[int],
        draw: random.Random,
    ) -> int | None:
        """Choose one of the ``idle`` devices; None (the default): a draw by ``participation``.

        If the device may not begin now, the scheduler asks again with the other devices.
        """
        return None


_DELAY_S = 0.0005  # default mean delay before each trigger


class InFlight(Policy):
    """N tasks in flight; without ``n``, one for each live trainer and each device at a gateway.

    Delays are exponential: FedAsync's scheduler 'randomizes the timing of training tasks to avoid
    overloading the updater'.
    """

    kind: Literal["in_flight"] = "in_flight"
    n: Annotated[int, Field(ge=1)] | None = None
    mean_delay_s: Annotated[float, Field(ge=0)] | None = None
    """mean delay before each trigger; None: half a millisecond live, 0 in a simulation"""

    def in_flight(self, traffic: Traffic) -> int:
        """``n``, or by default the number of workers."""
        return self.n if self.n is not None else max(1, traffic.workers)

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        """The last trigger's time plus the delay."""
        if self.mean_delay_s is not None:
            return traffic.last + _exponential(self.mean_delay_s, draw)
        if not traffic.trainers:
            return traffic.now
        # The delay must not use `draw`, so that a simulation draws the same devices, and another
        # generator would cost more than the rest. Whole milliseconds, the scheduler's shortest
        # wait, let a few tasks begin together.
        task = f"{traffic.began}:{traffic.issued}".encode()
        share = int.from_bytes(blake2b(task, digest_size=6).digest()) / (1 << 48)
        return traffic.last + int(-1000 * _DELAY_S * math.log1p(-share)) / 1000


class Poisson(Policy):
    """Triggers at the times of a Poisson process, while fewer than n tasks are in flight."""

    catches_up: ClassVar[bool] = True
    kind: Literal["poisson"] = "poisson"
    rate: Positive = 1.0  # per second
    n: Annotated[int, Field(ge=1)] = 100

    def in_flight(self, _traffic: Traffic) -> int:
        """The limit ``n``."""
        return self.n

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        """The next event of the process."""
        return traffic.last + _exponential(1.0 / self.rate, draw)


class Anarchic(Policy):
    """No triggers: devices decide for themselves (Anarchic Federated Learning)."""

    devices_decide: ClassVar[bool] = True
    kind: Literal["none"] = "none"

    def in_flight(self, _traffic: Traffic) -> int:
        """0: the scheduler opens no task."""
        return 0


def _exponential(mean_s: float, draw: random.Random) -> float:
    return draw.expovariate(1.0 / mean_s) if mean_s else 0.0


def _accept(value: object) -> type[Policy] | None:
    if not isinstance(value, type) or not issubclass(value, Policy):
        return None
    if inspect.isabstract(value):
        raise ConfigError(f"{value.__name__} has no in_flight(): write it")
    return value


POLICIES: PluginRegistry[type[Policy | Rounds]] = PluginRegistry(
    "fedstream.policies",
    "scheduling policy",
    {"in_flight": InFlight, "poisson": Poisson, "rounds": Rounds, "none": Anarchic},
    accept=_accept,
    expected="a class derived from fedstream.Policy",
)
PolicySettings: TypeAlias = Annotated[Policy | Rounds, OneOf(POLICIES)]


# Calls of a policy, which may be a user's: errors name the policy, and its answers are checked.


def tasks_wanted(policy: Policy, traffic: Traffic) -> int:
    """The number of tasks to keep open, at most one per device. Raises ConfigError."""
    wanted = _asked(policy, "in_flight", policy.in_flight, traffic)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise _nonsense(policy, "in_flight", wanted, "a whole number of at least 1")
    return min(wanted, max(1, len(traffic.devices)))


def next_due(policy: Policy, traffic: Traffic, draw: random.Random) -> float:
    """The time at which the next task is to begin. Raises ConfigError."""
    due = _asked(policy, "due", policy.due, traffic, draw)
    if not isinstance(due, float | int) or isinstance(due, bool) or not math.isfinite(due):
        raise _nonsense(policy, "due", due, "a finite time in seconds")
    return due


def place_of_next(
    policy: Policy, traffic: Traffic, draw: random.Random, parts: Participation, idle: Sequence[int]
) -> int:
    """The place in ``idle`` of the next device. Raises ConfigError."""
    if type(policy).choose is not Policy.choose:
        device = _asked(policy, "choose", policy.choose, traffic, tuple(idle), draw)
        if device is not None:
            if not isinstance(device, Integral) or device not in idle:
                raise _nonsense(policy, "choose", device, "one of the idle devices, or None")
            return idle.index(int(device))
    return parts.pick(draw, idle)


def _asked(policy: Policy, method: str, ask: Callable[..., Any], *given: object) -> Any:
    try:
        return ask(*given)
    except FedstreamError:
        raise
    except Exception as error:
        raise ConfigError(f"{_name(policy)}: {method}() raised {words(error)}") from error


def _nonsense(policy: Policy, method: str, answer: object, wanted: str) -> ConfigError:
    return ConfigError(f"{_name(policy)}: {method}() returned {answer!r}: it must return {wanted}")


def _name(policy: Policy) -> str:
    return f"scheduler.policy.kind = {policy.kind!r}"
