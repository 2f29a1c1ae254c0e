"""When to trigger a task and for whom: pure functions of what the scheduler sees and its draw.

Draw n belongs to the n-th task ever issued and is a function of (seed, n) alone, so that a
scheduler that takes over goes on with the very draws its predecessor would have made.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from broker.messages import Trigger, task_id
from runtime.config import Section
from runtime.steps import Steps

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


class Rounds(Section):
    """Rounds of k devices; a round that is not full after the time-out ends with what it has.

    No device answers twice in a round: where k is more than the devices there are, or than memory
    has room for, a round is of so many and ends when they have answered.
    """

    kind: Literal["rounds"] = "rounds"
    k: Annotated[int, Field(ge=1)] = 10
    timeout_s: Positive = 600.0


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
    round_since: float  # when the round was begun, or its end was asked for
    is_eligible: Callable[[int], bool] | None = None  # whether a device may begin now; None: all

    def idle(self, busy: Container[int]) -> list[int]:
        """Devices beside those that are busy, whether or not they may begin now."""
        return [device for device in self.devices if device not in busy]

    def take(self, rng: random.Random, idle: list[int]) -> int | None:
        """A device that may begin now, drawn from ``idle``; None: there is none.

        It leaves the list, as do those that were drawn before it and may not begin. So a plan asks
        no device twice and only as many as it has to: for thousands that takes its time.
        """
        while idle:
            device = idle.pop(rng.randrange(len(idle)))
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


def round_size(policy: Rounds, hold: HoldBack, seen: Situation) -> tuple[int, str]:
    """(k, why) after the devices there are and the memory for their answers; at least 1.

    Queue and staleness can't hold a round back: its answers are what the queue waits for.
    """
    k = max(1, min(policy.k, len(seen.devices)))
    room = _room(hold, seen)
    return (k, "") if room is None or room >= k else (max(1, room), "memory")


def _room(hold: HoldBack, seen: Situation) -> int | None:
    """Updates that memory has room for; None: no limit is known."""
    if hold.memory_budget is None or not seen.model_bytes:
        return None
    return room_beside(hold.memory_budget, seen.model_bytes, seen.kept)


def room_beside(budget: int, model_bytes: int, kept: int) -> int:
    """Updates that a budget (bytes) has room for, beside the versions kept and 2 in the making."""
    return budget // model_bytes - kept - 2


def plan(policy: Policy, steps: Steps, hold: HoldBack, seed: int, seen: Situation) -> Plan:
    """What to do now."""
    if isinstance(policy, Anarchic):
        return Plan()
    if isinstance(policy, Rounds):
        return _plan_round(policy, steps, hold, seed, seen)
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
        device = seen.take(rng, idle)
        if device is None:
            break
        triggers.append(_trigger(rng, device, steps, seen.now, why="in flight"))
        poisson = isinstance(policy, Poisson)
        last = max(due, seen.now - _CATCH_UP_S) if poisson else seen.now
    return Plan(tuple(triggers), limit, last=last, held=why)


def _plan_round(policy: Rounds, steps: Steps, hold: HoldBack, seed: int, seen: Situation) -> Plan:
    """A round on top of the newest version: k answers, open or in; at the time-out, its end.

    A task that ends without an answer (given up, refused, dead) is replaced by another device's. A
    round does not shrink to the devices that are eligible: it waits for more.
    """
    mine = [trigger for trigger in seen.open if trigger.version == seen.version]
    past = [t for t in seen.open if t.version is not None and t.version < seen.version]
    if past:
        return Plan(close=(seen.version - 1, tuple(trigger.task for trigger in past)))
    if seen.round_ending:  # more tasks would come too late for it
        return Plan(limit=len(seen.open))
    deadline = seen.round_since + policy.timeout_s
    if seen.now >= deadline and (mine or seen.held):
        return Plan(close=(seen.version, tuple(trigger.task for trigger in mine)))
    k, why = round_size(policy, hold, seen)
    missing = k - len(mine) - len(seen.held)
    if k < policy.k and seen.held and not mine and missing <= 0:
        return Plan(close=(seen.version, ()), held=why)  # the updater would wait for more
    idle = seen.idle({trigger.device for trigger in seen.open} | set(seen.held))
    triggers: list[Trigger] = []
    for n in range(max(0, missing)):
        rng = draw(seed, seen.issued + n)
        device = seen.take(rng, idle)
        if device is None:
            break
        trigger = _trigger(
            rng, device, steps, seen.now,
            why="round", version=seen.version, deadline=deadline,
        )  # fmt: skip
        triggers.append(trigger)
    limit = len(seen.open) + len(triggers)
    return Plan(tuple(triggers), limit, wake_at=deadline, held=why)


def draw(seed: int, n: int) -> random.Random:
    """Draw n of a scheduler."""
    return random.Random(f"{seed}:{n}")


def _trigger(
    rng: random.Random,
    device: int,
    steps: Steps,
    now: float,
    *,
    why: str,
    version: int | None = None,
    deadline: float | None = None,
) -> Trigger:
    length = steps.draw(rng)
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
