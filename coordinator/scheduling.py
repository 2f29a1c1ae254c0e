"""Planning: when to trigger tasks, for which devices, and when to give them up. Pure.

Draw n belongs to the n-th task ever issued and depends only on (seed, n), so a scheduler that takes
over makes exactly the draws that its predecessor would have made.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from fedstream.coordinator.device_set import DeviceSet
from fedstream.coordinator.open_tasks import AtWork, OpenTasks
from fedstream.coordinator.policies import Policy, Traffic, next_due, place_of_next, tasks_wanted
from fedstream.coordinator.rounds import Round, Rounds, verdict, wanted
from fedstream.core.messages import Trigger, task_id
from fedstream.core.reasons import Overdue
from fedstream.runtime.task_settings import Participation

_CATCH_UP_S = 1.0  # the most missed time that a catching-up policy makes up for
_SEEN_AFTER = 20  # updates after which the mean staleness depends little on earlier ones
_MOST_CHANGE = 2.0  # largest factor by which one step changes the tasks in flight

HELD_BY = ("memory", "queue", "staleness")


@dataclass(frozen=True)
class HoldBack:
    """The limits that hold the scheduler back."""

    max_queue: int  # entries
    target_staleness: float | None  # versions, mean
    memory_budget: int | None  # bytes of Redis


@dataclass(frozen=True)
class Steering:
    """A controller of the tasks in flight that brings the mean staleness to a target."""

    tasks: float
    since: int  # the version since which at most this number was open

    @classmethod
    def towards(cls, target: float, seen: Situation) -> Steering:
        """The next state of the controller.

        With n tasks in flight, each making a version, the mean staleness is n - 1, so the
        controller begins with target + 1 tasks. Batches and vanishing devices lower the staleness.
        Once the mean reflects the present number of tasks, the number is multiplied by target /
        mean. Waiting for the mean avoids oscillation: a change shows only after as many versions as
        the staleness, and the mean lags a little more.
        """
        before, mean = seen.steering, seen.mean_staleness
        if before is None:
            return cls(target + 1, seen.version)
        if len(seen.tasks) > round(before.tasks):
            return cls(before.tasks, seen.version)
        if seen.version - before.since < mean + _SEEN_AFTER:
            return before
        change = min(_MOST_CHANGE, max(1 / _MOST_CHANGE, (target + 1) / (mean + 1)))
        return cls(before.tasks * change, seen.version)


@dataclass(frozen=True)
class Situation:
    """The scheduler's view of the run."""

    now: float  # seconds since 1970
    issued: int  # tasks so far, and the number of the next draw
    version: int
    open: Collection[Trigger]  # the mirror's OpenTasks, so that no plan goes through all tasks
    queue: int  # entries; their updates take memory
    backlog: int  # entries that the updater has not handled
    kept: int  # versions and devices' vectors, in models
    held: tuple[int, ...]  # devices whose updates are buffered
    round_ending: bool  # the end of this round is in the queue
    mean_staleness: float
    trainers: int  # live trainers
    workers: int  # tasks trained at the same time: trainers, and devices of gateways
    model_bytes: int
    devices: Sequence[int]  # served by a trainer and not in quarantine; ascending
    last: float  # last trigger (or its due time, to catch up), or begin of leading
    round_since: float  # beginning of the round, or of its extension
    began: float = 0.0  # beginning of the run, seconds since 1970
    # Opening times of tasks, if `open` has none.
    since: Mapping[str, float] = field(default_factory=dict)
    is_eligible: Callable[[int], bool] | None = None  # whether a device may begin now; None: all
    not_at_work: DeviceSet | None = None  # of `devices`; None: derived from `open`
    steering: Steering | None = None  # of the last plan

    @cached_property
    def tasks(self) -> OpenTasks:
        """The open tasks, indexed."""
        if isinstance(self.open, OpenTasks):
            return self.open
        return OpenTasks(self.open, self.since)

    def idle(self) -> DeviceSet:
        """The devices that are not at work, whether or not they may begin now.

        Take devices out only inside a ``with`` block, whose end puts them back.
        """
        if self.not_at_work is not None:
            return self.not_at_work
        at_work = self.tasks.at_work
        free = [device for device in self.devices if device not in at_work]
        return DeviceSet(max(free, default=-1) + 1, free)

    def take(self, idle: DeviceSet, pick: Callable[[DeviceSet], int]) -> int | None:
        """Take out of ``idle`` a device that may begin now; None if there is none.

        ``pick`` gives the place of the next candidate. Candidates that may not begin are removed
        too, so a plan checks no device twice: checking thousands is slow.
        """
        while idle:
            device = idle.pop(pick(idle))
            if self.is_eligible is None or self.is_eligible(device):
                return device
        return None

    def traffic(self, issued: int, at_work: Collection[int], last: float) -> Traffic:
        """The policy's input once ``issued`` tasks are issued, the last one at ``last``."""
        return Traffic(
            self.now,
            self.began,
            issued,
            self.version,
            at_work,
            self.devices,
            self.trainers,
            self.mean_staleness,
            last,
            self.workers,
        )


@dataclass(frozen=True)
class Plan:
    """The scheduler's next actions, and the time of the next plan if no event comes first."""

    triggers: tuple[Trigger, ...] = ()
    limit: int = 0  # tasks open at the same time
    close: tuple[int, tuple[str, ...]] | None = None  # end a round: version, open tasks
    drops: tuple[int, ...] = ()  # devices whose answers to that round are dropped
    wake_at: float | None = None  # seconds since 1970
    last: float = 0.0  # for the next situation, if there are triggers
    held: str = ""  # the limit that keeps tasks below the policy's number
    overdue: tuple[tuple[str, Overdue], ...] = ()  # tasks to be given up, and why
    again: bool = False  # the round is extended from now, with other devices
    steering: Steering | None = None  # for the next situation


def steered(wanted: int, hold: HoldBack, seen: Situation) -> Steering | None:
    """The number of tasks that the staleness target allows, at least 1; None: no target.

    The number doesn't grow beyond ``wanted``, as the effect of a larger one could not be measured.
    A number that is larger already stays: the policy may want more again at the next look.
    """
    if hold.target_staleness is None:
        return None
    found = Steering.towards(hold.target_staleness, seen)
    most = max(wanted, (seen.steering or found).tasks)
    return replace(found, tasks=min(max(1.0, found.tasks), most))


def held_back(
    wanted: int, hold: HoldBack, seen: Situation, steering: Steering | None = None
) -> tuple[int, str]:
    """The number of tasks by the tightest limit, at least 1, and that limit ('': none)."""
    limits = [(wanted, "")]
    room = _room(hold, seen)
    if room is not None:
        # open + queue must fit; only open can be limited here
        limits.append((max(1, room - seen.queue), "memory"))
    if seen.backlog >= hold.max_queue:
        limits.append((1, "queue"))
    if steering is not None:
        limits.append((round(steering.tasks), "staleness"))
    return min(limits, key=lambda limit: limit[0])


def _room(hold: HoldBack, seen: Situation) -> int | None:
    """The number of updates that memory has room for; None: no known limit."""
    if hold.memory_budget is None or not seen.model_bytes:
        return None
    return room_beside(hold.memory_budget, seen.model_bytes, seen.kept)


def room_beside(budget: int, model_bytes: int, kept: int) -> int:
    """The number of updates that fit in a budget (bytes) beside kept versions and 2 new ones."""
    return budget // model_bytes - kept - 2


def plan(
    policy: Policy | Rounds,
    parts: Participation,
    hold: HoldBack,
    seed: int,
    seen: Situation,
    *,
    task_timeout_s: float = math.inf,
) -> Plan:
    """Decide what to do now. ``task_timeout_s`` applies to tasks without a deadline.

    Raises ConfigError if a user's policy raises or returns an invalid value.
    """
    if isinstance(policy, Rounds):
        todo = _plan_round(policy, parts, hold, seed, seen)
    elif policy.devices_decide:
        todo = Plan()
    else:
        todo = _plan_tasks(policy, parts, hold, seed, seen)
    closed = frozenset(todo.close[1] if todo.close is not None else ())
    overdue = seen.tasks.overdue(seen.now, task_timeout_s)
    wakes = (seen.tasks.next_end(seen.now, task_timeout_s), todo.wake_at)
    ends = {
        "overdue": tuple(each for each in overdue if each[0] not in closed) if overdue else (),
        "wake_at": min((at for at in wakes if at is not None and at < math.inf), default=None),
    }
    return Plan(**(todo.__dict__ | ends))


def _plan_tasks(
    policy: Policy, parts: Participation, hold: HoldBack, seed: int, seen: Situation
) -> Plan:
    """Open due tasks until the policy's number is open."""
    at_work, last = AtWork(seen.tasks), seen.last
    n = tasks_wanted(policy, seen.traffic(seen.issued, at_work, last))
    steering = steered(n, hold, seen)
    limit, why = held_back(n, hold, seen, steering)
    so_far = partial(Plan, limit=limit, held=why, steering=steering)
    triggers: list[Trigger] = []
    with seen.idle() as idle:
        while len(at_work) < limit:
            rng = draw(seed, seen.issued + len(triggers))
            traffic = seen.traffic(seen.issued + len(triggers), at_work, last)
            due = next_due(policy, traffic, rng)
            if due > seen.now:
                return so_far(tuple(triggers), wake_at=due, last=last)
            device = seen.take(idle, partial(place_of_next, policy, traffic, rng, parts))
            if device is None:
                break
            triggers.append(_trigger(rng, device, parts, seen.now, why="in flight"))
            at_work.add(device)
            last = max(due, seen.now - _CATCH_UP_S) if policy.catches_up else seen.now
    return so_far(tuple(triggers), last=last)


def _plan_round(
    policy: Rounds, parts: Participation, hold: HoldBack, seed: int, seen: Situation
) -> Plan:
    """Open or end a round from the newest version, by :mod:`fedstream.coordinator.rounds`.

    Keeps k tasks open or answered: a task that ends without an answer (given up, refused, dead) is
    replaced by a task of another device. A round with too few eligible devices does not shrink, but
    waits for more of them.
    """
    tasks, version = seen.tasks, seen.version
    if past := tasks.of_past_rounds(version):
        return Plan(close=(version - 1, tuple(past)))
    if seen.round_ending:  # further tasks would come too late
        return Plan(limit=len(tasks))
    room = _room(hold, seen)
    k, why = wanted(policy, len(seen.devices), room)
    at_work = tasks.count(version, seen.now)
    it = Round(k, len(seen.held), at_work, seen.round_since, coming=seen.backlog)
    what = verdict(policy, it, seen.now)
    if what in ("over", "dropped"):
        drops = seen.held if what == "dropped" else ()
        return Plan(close=(version, tuple(tasks.in_round(version))), drops=drops, held=why)
    since = seen.now if what == "again" else seen.round_since
    deadline = since + policy.timeout_s
    mine = tasks.count(version)
    missing = k - mine - len(seen.held)  # overdue tasks are replaced once given up
    if room is not None and room < k:  # open fewer at once
        missing = min(missing, max(1, room - seen.queue) - mine)
    triggers: tuple[Trigger, ...] = ()
    if missing > 0 and seen.now < deadline:
        triggers = tuple(_of_round(parts, seed, seen, missing, deadline))
    return Plan(
        triggers,
        len(tasks) + len(triggers),
        held=why,
        wake_at=deadline if seen.now < deadline else None,
        again=what == "again",
    )


def _of_round(
    parts: Participation, seed: int, seen: Situation, missing: int, deadline: float
) -> Iterator[Trigger]:
    """Tasks of a round for devices that are idle and have not answered in it."""
    with seen.idle() as idle:
        for answered in seen.held:
            idle.discard(answered)
        for n in range(missing):
            rng = draw(seed, seen.issued + n)
            device = seen.take(idle, partial(parts.pick, rng))
            if device is None:
                return
            yield _trigger(
                rng,
                device,
                parts,
                seen.now,
                why="round",
                version=seen.version,
                deadline=deadline,
            )


def draw(seed: int, n: int) -> random.Random:
    """The random number generator of draw n."""
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
