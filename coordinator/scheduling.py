"""When to trigger a task, for whom, and when to give one up: functions of what is seen and a draw.

Draw n belongs to the n-th task ever issued and is a function of (seed, n) alone, so that a
scheduler that takes over goes on with the very draws its predecessor would have made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pydantic import Field

from fedstream.broker.messages import Overdue, Trigger, task_id, time_of
from fedstream.coordinator.rounds import Round, Rounds, verdict, wanted
from fedstream.runtime.config import Section
from fedstream.runtime.participation import Participation

Positive = Annotated[float, Field(gt=0)]

_CATCH_UP_S = 1.0  # what a Poisson process missed for longer is lost, and not made up for at once


class InFlight(Section):
    """N tasks in flight; without n, as many as trainers are alive. Delays are exponential."""

    kind: Literal["in_flight"] = "in_flight"
    n: Annotated[int, Field(ge=1)] | None = None
    mean_delay_s: Annotated[float, Field(ge=0)] = 0.0  # before each trigger (random timing)


class Poisson(Section):
    """Triggers at the times of a Poisson process, as long as fewer than n tasks are in flight."""

    kind: Literal["poisson"] = "poisson"
    rate: Positive = 1.0  # per second
    n: Annotated[int, Field(ge=1)] = 100


class Anarchic(Section):
    """No triggers: devices decide by themselves (Anarchic Federated Learning)."""

    kind: Literal["none"] = "none"


Policy = Annotated[InFlight | Poisson | Rounds | Anarchic, Field(discriminator="kind")]


HELD_BY = ("memory", "queue", "staleness")


@dataclass(frozen=True)
class HoldBack:
    """What holds the scheduler back."""

    max_queue: int  # entries
    target_staleness: float | None  # versions, mean
    memory_budget: int | None  # bytes of Redis


@dataclass(frozen=True)
class Situation:
    """What the scheduler sees."""

    now: float  # seconds since 1970
    issued: int  # tasks so far: the next draw
    version: int
    open: tuple[Trigger, ...]
    queue: int  # entries, whose updates take memory
    backlog: int  # of them, those that the updater has not done
    kept: int  # versions
    held: tuple[int, ...]  # devices whose updates are buffered: they wait for more
    round_ending: bool  # this round's end is in the queue
    mean_staleness: float
    trainers: int  # alive
    model_bytes: int
    devices: tuple[int, ...]  # that can be reached
    last: float  # when it triggered last (Poisson: when that was due), or took office
    round_since: float  # when the round was begun, or went on after a time-out
    since: Mapping[str, float] = field(default_factory=dict)  # when tasks were opened, as is known
    is_eligible: Callable[[int], bool] | None = None  # whether a device may begin now; None: all

    def idle(self, busy: Container[int]) -> list[int]:
        """Devices beside those that are busy, whether or not they may begin now."""
        return [device for device in self.devices if device not in busy]

    def take(self, rng: random.Random, idle: list[int], parts: Participation) -> int | None:
        """A device that may begin now, drawn from ``idle`` by the rates; None: there is none.

        It leaves the list, as do those that were drawn before it and may not begin. So a plan asks
        no device twice and only as many as it has to: for thousands that takes its time.
        """
        while idle:
            device = idle.pop(parts.pick(rng, idle))
            if self.is_eligible is None or self.is_eligible(device):
                return device
        return None


@dataclass(frozen=True)
class Plan:
    """What the scheduler does now, and when it looks again if nothing happens before."""

    triggers: tuple[Trigger, ...] = ()
    limit: int = 0  # tasks open at the same time
    close: tuple[int, tuple[str, ...]] | None = None  # a version's round ends: its open tasks
    wake_at: float | None = None  # seconds since 1970
    last: float = 0.0  # the next situation's, if there are triggers
    held: str = ""  # why there are fewer tasks than the policy wants
    overdue: tuple[tuple[str, Overdue], ...] = ()  # tasks to be given up, and why
    again: bool = False  # the round goes on from now on, with other devices


def in_flight(policy: InFlight | Poisson, seen: Situation) -> int:
    """How many tasks the policy wants open at the same time."""
    n = policy.n if policy.n is not None else max(1, seen.trainers)
    return min(n, max(1, len(seen.devices)))


def held_back(wanted: int, hold: HoldBack, seen: Situation) -> tuple[int, str]:
    """(N, why) after what holds back most. N is never below 1, so that the run goes on."""
    limits = [(wanted, "")]
    room = _room(hold, seen)
    if room is not None:
        # open + queue must fit, open being what may still be added to
        limits.append((max(1, room - seen.queue), "memory"))
    if seen.backlog >= hold.max_queue:
        limits.append((1, "queue"))
    if hold.target_staleness is not None and seen.mean_staleness > hold.target_staleness:
        limits.append((1, "staleness"))
    return min(limits, key=lambda limit: limit[0])


def _room(hold: HoldBack, seen: Situation) -> int | None:
    """Updates that memory has room for; None: no limit is known."""
    if hold.memory_budget is None or not seen.model_bytes:
        return None
    return room_beside(hold.memory_budget, seen.model_bytes, seen.kept)


def room_beside(budget: int, model_bytes: int, kept: int) -> int:
    """Updates that a budget (bytes) has room for, beside the versions kept and 2 in the making."""
    return budget // model_bytes - kept - 2


def plan(
    policy: Policy,
    parts: Participation,
    hold: HoldBack,
    seed: int,
    seen: Situation,
    *,
    task_timeout_s: float = math.inf,
) -> Plan:
    """What to do now. ``task_timeout_s``: of tasks without a deadline."""
    match policy:
        case Anarchic():
            todo = Plan()
        case Rounds():
            todo = _plan_round(policy, parts, hold, seed, seen)
        case _:
            todo = _plan_in_flight(policy, parts, hold, seed, seen)
    ends = [(_end(trigger, seen, task_timeout_s), trigger) for trigger in seen.open]
    closed = todo.close[1] if todo.close is not None else ()
    wakes = [end for end, _ in ends if seen.now < end < math.inf]
    return replace(
        todo,
        overdue=tuple(
            (trigger.task, "timed out" if trigger.deadline is None else "deadline passed")
            for end, trigger in ends
            if end <= seen.now and trigger.task not in closed
        ),
        wake_at=min([*wakes, *([todo.wake_at] if todo.wake_at is not None else [])], default=None),
    )


def _end(trigger: Trigger, seen: Situation, task_timeout_s: float) -> float:
    """When a task's time is over."""
    if trigger.deadline is not None:
        return trigger.deadline
    return seen.since.get(trigger.task, seen.now) + task_timeout_s


def opened_at(trigger: Trigger, now: float) -> float:
    """When a task that is seen for the first time was opened, as far as that can be believed.

    A device's own task may have any id: it counts from now.
    """
    made = time_of(trigger.task) if trigger.origin == "scheduler" else None
    return now if made is None else min(now, made)


def _plan_in_flight(
    policy: InFlight | Poisson, parts: Participation, hold: HoldBack, seed: int, seen: Situation
) -> Plan:
    """Tasks until as many are open as the policy wants, each after its delay."""
    limit, why = held_back(in_flight(policy, seen), hold, seen)
    delay = policy.mean_delay_s if isinstance(policy, InFlight) else 1.0 / policy.rate
    idle = seen.idle({trigger.device for trigger in seen.open})
    triggers: list[Trigger] = []
    last = seen.last
    while len(seen.open) + len(triggers) < limit:
        rng = draw(seed, seen.issued + len(triggers))
        due = last + (rng.expovariate(1.0 / delay) if delay else 0.0)
        if due > seen.now:
            return Plan(tuple(triggers), limit, wake_at=due, last=last, held=why)
        device = seen.take(rng, idle, parts)
        if device is None:
            break
        triggers.append(_trigger(rng, device, parts, seen.now, why="in flight"))
        poisson = isinstance(policy, Poisson)
        last = max(due, seen.now - _CATCH_UP_S) if poisson else seen.now
    return Plan(tuple(triggers), limit, last=last, held=why)


def _plan_round(
    policy: Rounds, parts: Participation, hold: HoldBack, seed: int, seen: Situation
) -> Plan:
    """A round on top of the newest version: k answers, open or in; see :mod:`coordinator.rounds`.

    A task that ends without an answer (given up, refused, dead) is replaced by another device's. A
    round does not shrink to the devices that are eligible: it waits for more.
    """
    mine = [trigger for trigger in seen.open if trigger.version == seen.version]
    past = [t for t in seen.open if t.version is not None and t.version < seen.version]
    if past:
        return Plan(close=(seen.version - 1, tuple(trigger.task for trigger in past)))
    if seen.round_ending:  # more tasks would come too late for it
        return Plan(limit=len(seen.open))
    at_work = sum(t.deadline is None or seen.now < t.deadline for t in mine)
    room = _room(hold, seen)
    k, why = wanted(policy, len(seen.devices), room)
    it = Round(k, len(seen.held), at_work, seen.round_since, coming=seen.backlog)
    what = verdict(policy, it, seen.now)
    if what == "over":
        return Plan(close=(seen.version, tuple(trigger.task for trigger in mine)), held=why)
    since = seen.now if what == "again" else seen.round_since
    deadline = since + policy.timeout_s
    missing = k - len(mine) - len(seen.held)  # who is late is replaced once given up
    if room is not None and room < k:  # not all of them at the same time
        missing = min(missing, max(1, room - seen.queue) - len(mine))
    idle = seen.idle({trigger.device for trigger in seen.open} | set(seen.held))
    triggers: list[Trigger] = []
    for n in range(missing if seen.now < deadline else 0):
        rng = draw(seed, seen.issued + n)
        device = seen.take(rng, idle, parts)
        if device is None:
            break
        trigger = _trigger(
            rng, device, parts, seen.now,
            why="round", version=seen.version, deadline=deadline,
        )  # fmt: skip
        triggers.append(trigger)
    limit = len(seen.open) + len(triggers)
    return Plan(
        tuple(triggers), limit, held=why,
        wake_at=deadline if seen.now < deadline else None,
        again=what == "again",
    )  # fmt: skip


def draw(seed: int, n: int) -> random.Random:
    """Draw n of a scheduler."""
    return random.Random(f"{seed}:{n}")


def _trigger(
    rng: random.Random,
    device: int,
    parts: Participation,
    now: float,
    *,
    why: str,
    version: int | None = None,
    deadline: float | None = None,
) -> Trigger:
    length = parts.length(rng, device)
    return Trigger(
        task=task_id(int(now * 1000)),
        device=device,
        seed=rng.getrandbits(63),
        steps=length.steps,
        epochs=length.epochs,
        seconds=length.seconds,
        why=why,
        version=version,
        deadline=deadline,
    )
