"""Scheduling policies: how many tasks there are at a time, when the next begins, on which device.

A policy is a function of values: without state, without a clock, and with no random numbers but
those of the draw that it is given. So the same policy works live and on a simulation's virtual
clock, and a scheduler that takes over goes on as its predecessor would have.

What holds tasks back (memory, the queue, staleness), which devices may begin now, and how long a
task lasts are none of its business.
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
from fedstream.runtime.plugins import OneOf, Registry, words
from fedstream.runtime.task_settings import Participation


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a policy sees, live and in a simulation alike."""

    now: float
    """seconds: since 1970, or in a simulation since its start"""
    began: float
    """when the run began, on the same clock"""
    issued: int
    """tasks so far, so also the number of the next one"""
    version: int
    """the newest"""
    at_work: Collection[int]
    """devices with an open task"""
    devices: Sequence[int]
    """all devices that can be asked, at work or not"""
    trainers: int
    """alive; 0 in a simulation, which has none"""
    mean_staleness: float
    """of recent updates: a moving average, in versions"""
    last: float
    """when the last task began (see :attr:`Policy.catches_up`); at first, when scheduling began"""
    workers: int
    """on tasks at the same time: trainers alive, and in place of a gateway the devices that are
    present at it; 0 in a simulation"""


class Policy(NamedSettings):
    """Base class of policies. Its fields are the keys of ``scheduler.policy``.

    Only :meth:`in_flight` must be written; a task then begins as soon as there is room, on a
    device drawn by the rates of ``participation``.
    """

    kind: str = ""
    """the name by which the configuration chose it"""
    catches_up: ClassVar[bool] = False
    """Whether ``last`` is when the last task was due, not when it began. A task that began late
    then doesn't delay the next, so the mean rate is kept; live, it makes up for at most 1 s."""
    devices_decide: ClassVar[bool] = False
    """Whether there are no tasks from the scheduler at all: devices ask for them."""

    @abstractmethod
    def in_flight(self, traffic: Traffic) -> int:
        """How many tasks are to be open at the same time: at least 1.

        More than there are devices is the same as one on each. It is asked anew whenever a task
        begins or ends, or a version is made.
        """

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        """When the next task is to begin, in seconds on the clock of ``traffic.now``.

        By default at once. It is asked again when that time has come, with the same draw, so count
        from ``traffic.last``: a time that counts from ``traffic.now`` never comes.
        """
        return traffic.now

    def choose(
        self,
        traffic: Traffic,
        idle: Sequence[int],
        draw: random.Random,
    ) -> int | None:
        """One of the ``idle`` devices; by default None: drawn by the rates of ``participation``.

        If the device may not begin now, the next choice is made from the others.
        """
        return None


_DELAY_S = 0.0005  # mean before each trigger, by default


class InFlight(Policy):
    """N tasks in flight; without n, one for each live trainer and each device at a gateway.

    Delays are exponential: FedAsync's scheduler 'randomizes the timing of training tasks to avoid
    overloading the updater'.
    """

    kind: Literal["in_flight"] = "in_flight"
    n: Annotated[int, Field(ge=1)] | None = None
    mean_delay_s: Annotated[float, Field(ge=0)] | None = None
    """before each trigger; None: half a millisecond, and none where there are no trainers, as in
    a simulation"""

    def in_flight(self, traffic: Traffic) -> int:
        """N."""
        return self.n if self.n is not None else max(1, traffic.workers)

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        """After the delay, which counts from the last trigger."""
        if self.mean_delay_s is not None:
            return traffic.last + _exponential(self.mean_delay_s, draw)
        if not traffic.trainers:
            return traffic.now
        # Without taking from `draw`, which chooses the same devices in a simulation, and without
        # another generator, which costs more than the rest. In whole milliseconds, the least that
        # the scheduler waits: a few tasks begin together.
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
        """The limit n."""
        return self.n

    def due(self, traffic: Traffic, draw: random.Random) -> float:
        """The next time of the process."""
        return traffic.last + _exponential(1.0 / self.rate, draw)


class Anarchic(Policy):
    """No triggers: devices decide for themselves (Anarchic Federated Learning)."""

    devices_decide: ClassVar[bool] = True
    kind: Literal["none"] = "none"

    def in_flight(self, _traffic: Traffic) -> int:
        """None."""
        return 0


def _exponential(mean_s: float, draw: random.Random) -> float:
    return draw.expovariate(1.0 / mean_s) if mean_s else 0.0


def _accept(value: object) -> type[Policy] | None:
    if not isinstance(value, type) or not issubclass(value, Policy):
        return None
    if inspect.isabstract(value):
        raise ConfigError(f"{value.__name__} has no in_flight(): write it")
    return value


POLICIES: Registry[type[Policy | Rounds]] = Registry(
    "fedstream.policies",
    "scheduling policy",
    {"in_flight": InFlight, "poisson": Poisson, "rounds": Rounds, "none": Anarchic},
    accept=_accept,
    expected="a class derived from fedstream.Policy",
)
PolicySettings: TypeAlias = Annotated[Policy | Rounds, OneOf(POLICIES)]


# Asking a policy, which may be a user's: its errors name it, and its answers are checked.


def tasks_wanted(policy: Policy, traffic: Traffic) -> int:
    """How many tasks are to be open, at most one per device. Raises ConfigError."""
    wanted = _asked(policy, "in_flight", policy.in_flight, traffic)
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted < 1:
        raise _nonsense(policy, "in_flight", wanted, "a whole number of at least 1")
    return min(wanted, max(1, len(traffic.devices)))


def next_due(policy: Policy, traffic: Traffic, draw: random.Random) -> float:
    """When the next task is to begin. Raises ConfigError."""
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
