"""The plan of a simulation: devices, base versions, durations, and the order of answers.

A plan depends only on the configuration, the number of devices, and which tasks fail, so the same
plan can be replayed to the live pipeline. The n-th task is drawn as the scheduler draws its n-th
(:func:`fedstream.coordinator.scheduling.draw`).

Versions are counted here as if no update were ever refused for its content.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Collection, Container, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from fedstream.coordinator.cooldowns import Cooldowns
from fedstream.coordinator.policies import (
    InFlight,
    Policy,
    Traffic,
    next_due,
    place_of_next,
    tasks_wanted,
)
from fedstream.coordinator.rounds import Round, Rounds, verdict, wanted
from fedstream.coordinator.scheduling import draw
from fedstream.core.errors import ConfigError
from fedstream.core.layout import Floats, Model
from fedstream.journal.progress import mean_after
from fedstream.runtime.task_settings import Participation, Seconds
from fedstream.settings.simulation import (
    LatencyStaleness,
    NoStaleness,
    RecentStaleness,
    UniformStaleness,
)
from fedstream.trainer.devices import behaviour, eligible, next_change

if TYPE_CHECKING:
    from fedstream.settings.config import Settings

_IN_VAIN = 1000  # give up once a round got too few answers this many times in a row
_MOST_PUT_OFF = 1000  # postponements in a row by a policy
_ALL_ANSWERED = "every device that can be asked has answered"


@dataclass(frozen=True, slots=True)
class Arrival:
    """An answer from a device."""

    n: int
    """number of its task"""
    device: int
    seed: int
    steps: int | None
    epochs: int | None
    tau: int
    version: int
    """the newest version at arrival"""
    makes: bool
    """whether it completes a batch and so makes a version"""
    oldest: int
    """no later arrival starts from an older version"""
    time: float
    """in virtual seconds; without a clock, the number of arrivals so far"""
    cancelled: int = 0
    """tasks given up since the previous arrival because they became too stale"""


@dataclass(frozen=True, slots=True)
class RoundOver:
    """The end of a round with the answers that have arrived for ``version``."""

    version: int
    makes: bool
    oldest: int
    time: float
    why: str
    drops: bool = False
    """whether the answers are dropped"""


PlannedEvent: TypeAlias = Arrival | RoundOver


def plan(
    settings: Settings, devices: int, failed: set[int] | None = None
) -> Iterator[PlannedEvent]:
    """Plan an endless sequence of events. Raises ConfigError if the settings can't be simulated.

    ``failed``: numbers of failed tasks. Add a task's number before requesting the event after its
    arrival; the task then counts as given up, and its device may rest.
    """
    failed = set() if failed is None else failed
    initiative, groups = settings.trainer.anarchic, settings.participation
    for key, steps in (
        ("scheduler.steps", settings.scheduler.steps),
        ("trainer.anarchic.steps", initiative and initiative.steps),
        *((f"participation[{n}].steps", group.steps) for n, group in enumerate(groups)),
    ):
        if isinstance(steps, Seconds):
            raise ConfigError(
                f"{key}.kind = 'seconds': training takes no time in a simulation: choose fixed, "
                "uniform or epochs"
            )
    staleness = settings.staleness
    if isinstance(settings.policy, Rounds) and staleness.draws_late:
        raise ConfigError(
            f"strategy.name = {settings.strategy.name!r} with simulation.staleness.kind = "
            f"{staleness.kind!r}: rounds drop late updates; leave out simulation.staleness, "
            "or choose none or latency"
        )
    match staleness:
        case NoStaleness():
            return _drawn(settings, devices, failed, most=0)
        case UniformStaleness(most=most):
            return _drawn(settings, devices, failed, most=most)
        case RecentStaleness(of=of):
            return _drawn(settings, devices, failed, most=of - 1)
        case LatencyStaleness():
            return _Clock(settings, devices, failed).events()


def without_effect(settings: Settings) -> Iterator[str]:
    """Warnings about settings without effect: in any simulation, or in one without a clock."""
    if settings.updater.quarantine_after:
        yield "no effect: updater.quarantine_after, because simulations quarantine no device"
    staleness, devices, policy = settings.staleness, settings.devices, settings.policy
    if isinstance(staleness, LatencyStaleness):
        return
    usual = type(devices)()
    vain = [
        f"devices.{key}"
        for key in type(devices).model_fields
        if getattr(devices, key) != getattr(usual, key)
    ]
    if not isinstance(policy, Rounds) and policy != InFlight():
        vain.append("scheduler.policy")
    if vain:
        yield (
            f"no effect: {', '.join(vain)}, because simulation.staleness.kind = "
            f"{staleness.kind!r} has no clock; 'latency' has one"
        )


def _drawn(
    settings: Settings, devices: int, failed: set[int], *, most: int
) -> Iterator[PlannedEvent]:
    """Draw staleness uniformly on [0, min(most, t)] at version t.

    No device comes twice in a batch until every device has come, and none comes twice in a round. A
    failing device rests for a number of arrivals equal to the seconds of a live rest.
    """
    rule = settings.rule.build(devices)
    parts = Participation(settings.scheduler.steps, settings.participation)
    seed, n, version = settings.run.seed, 0, 0
    in_rounds, rests = isinstance(settings.policy, Rounds), Cooldowns(0.0)
    most_answers = devices if in_rounds else math.inf
    arrived: dict[int, int] = {}
    while True:
        idle: list[int] = []
        is_made, begun, oldest = False, n, max(0, version - most)
        while not is_made and n - begun < most_answers:
            able = _without(idle, rests.after_failures(n))
            if not able and arrived and in_rounds:
                break
            if not able:
                idle = list(range(devices))
                able = _without(idle, rests.after_failures(n)) or idle
            rng = draw(seed, n)
            device = able.pop(parts.pick(rng, able))
            if able is not idle:
                idle.remove(device)
            length = parts.length(rng, device)
            task_seed = rng.getrandbits(63)
            d = rng.randint(0, min(most, version))
            after = dict(arrived)
            makes = not rule.is_too_stale(d) and rule.completes(after, device)
            n += 1
            yield Arrival(
                n - 1,
                device,
                task_seed,
                length.steps,
                length.epochs,
                version - d,
                version,
                makes=makes,
                oldest=oldest,
                time=float(n),
            )
            has_failed = n - 1 in failed
            rests.ended(device, n, failed=has_failed)
            if not has_failed:
                arrived, is_made = after, makes
        if not is_made:
            is_made = bool(arrived)
            yield RoundOver(version, makes=is_made, oldest=oldest, time=float(n), why=_ALL_ANSWERED)
            arrived = {}
        version += is_made


def _without(devices: list[int], resting: Collection[int]) -> list[int]:
    """The devices that don't rest; the same list if none does."""
    return [device for device in devices if device not in resting] if resting else devices


@dataclass(frozen=True, slots=True)
class _Working:
    """A task that a device is working on."""

    n: int
    device: int
    seed: int
    steps: int | None
    epochs: int | None
    tau: int
    answers: bool


class _Clock:
    """Events on a virtual clock: the policy decides when devices start, and tasks take time."""

    def __init__(self, settings: Settings, devices: int, failed: set[int]) -> None:
        self._settings = settings
        self._failed = failed
        self._devices = range(devices)
        self._parts = Participation(settings.scheduler.steps, settings.participation)
        self._rule = settings.rule.build(devices)
        self._seed = settings.run.seed
        in_rounds = isinstance(settings.policy, Rounds)  # tasks end with their round
        self._timeout_s = math.inf if in_rounds else settings.scheduler.task_timeout_s
        self._rests = Cooldowns(settings.scheduler.rest_s)
        self._now = 0.0
        self._issued = 0
        self._version = 0
        self._cancelled = 0  # tasks since the last arrival
        self._counted: dict[int, int] = {}  # the rule's count of used answers
        self._in_vain = 0  # time-outs with too few answers in a row
        self._mean_staleness = 0.0
        self._open: dict[int, _Working] = {}  # by device
        self._ends: list[tuple[float, int, _Working]] = []  # (time, task's number, task): a heap

    def events(self) -> Iterator[PlannedEvent]:
        """Generate the events. Raises ConfigError."""
        if self._settings.devices.dropout == 1.0:
            raise ConfigError(
                "devices.dropout = 1.0: every device vanishes, so nothing ever arrives"
            )
        policy = self._settings.policy
        if isinstance(policy, Rounds):
            return self._rounds(policy)
        if policy.devices_decide:
            return self._anarchic()
        if isinstance(policy, InFlight) and policy.n is None:
            raise ConfigError(
                "simulation.staleness.kind = 'latency' needs scheduler.policy.n, the tasks in "
                "flight, with scheduler.policy.kind = 'in_flight': a simulation has no trainers to "
                "derive it from"
            )
        return self._as_wanted(policy)

    # one task

    def _begin(self, device: int, parts: Participation, rng: random.Random) -> None:
        """Start a device from the newest version."""
        length = parts.length(rng, device)
        seed = rng.getrandbits(63)
        simulated = behaviour(self._settings.devices, device, seed)
        part = 0.5 if simulated.drops_out else 1.0  # drop-outs vanish halfway
        end = self._end(device, part * simulated.latency_s)
        given_up = self._now + self._timeout_s
        task = _Working(
            self._issued,
            device,
            seed,
            length.steps,
            length.epochs,
            self._version,
            answers=end < given_up and not simulated.drops_out,
        )
        self._open[device] = task
        self._rests.begin(device, self._now)
        self._issued += 1
        heapq.heappush(self._ends, (min(end, given_up), task.n, task))

    def _end(self, device: int, seconds: float) -> float:
        """The time at which a device has worked ``seconds``, pausing while not eligible."""
        availability, at = self._settings.devices.availability, self._now
        while True:
            change = next_change(availability, device, self._seed, at)
            if eligible(availability, device, self._seed, at):
                if at + seconds <= change:
                    return at + seconds
                seconds -= change - at
            at = change

    def _idle(self, busy: Container[int]) -> list[int]:
        """Devices that may begin now."""
        availability = self._settings.devices.availability
        return [
            device
            for device in self._devices
            if device not in busy
            and self._rests.end(device) <= self._now
            and eligible(availability, device, self._seed, self._now)
        ]

    def _next_eligible(self, busy: Container[int]) -> float:
        """Time at which the next device may begin, given that none can now."""
        availability = self._settings.devices.availability

        def next_look(device: int) -> float:
            if (end := self._rests.end(device)) > self._now:
                return end
            return next_change(availability, device, self._seed, self._now)

        return min(
            (next_look(device) for device in self._devices if device not in busy), default=math.inf
        )

    def _finished(self) -> _Working:
        """Advance time to the next end of a task, and return that task."""
        self._now, _, task = heapq.heappop(self._ends)
        del self._open[task.device]
        return task

    def _end_of(self, task: _Working) -> Generator[Arrival, None, bool]:
        """Yield the arrival of a task's answer, if there is one; return whether it is used."""
        is_used = task.answers
        if is_used:
            before = self._version, dict(self._counted), self._mean_staleness
            yield self._arrived(task)
            if task.n in self._failed:
                is_used = False
                self._version, self._counted, self._mean_staleness = before
            self._rests.ended(task.device, self._now, failed=not is_used)
        return is_used

    def _cancel_stale(self) -> list[int]:
        """Give up the tasks that are to be cancelled by now, and return their devices."""
        if not self._rule.cancel_stale:
            return []
        oldest = self._version - (self._rule.max_staleness or 0)
        stale = [task.device for task in self._open.values() if task.tau < oldest]
        for device in stale:
            del self._open[device]
        self._ends = [end for end in self._ends if end[2].tau >= oldest]
        heapq.heapify(self._ends)
        self._cancelled += len(stale)
        return stale

    def _arrived(self, task: _Working) -> Arrival:
        """Arrival of a task's answer."""
        version, makes = self._version, False
        if not self._rule.is_too_stale(version - task.tau):
            makes = self._rule.completes(self._counted, task.device)
            self._mean_staleness = mean_after(self._mean_staleness, version - task.tau)
        self._version += makes
        cancelled, self._cancelled = self._cancelled, 0
        return Arrival(
            task.n,
            task.device,
            task.seed,
            task.steps,
            task.epochs,
            task.tau,
            version,
            makes=makes,
            oldest=self._oldest(task),
            time=self._now,
            cancelled=cancelled,
        )

    def _oldest(self, *more: _Working) -> int:
        """Oldest version that open tasks and ``more`` started from, or a new task would."""
        return min([self._version, *(task.tau for task in (*self._open.values(), *more))])

    # policies

    def _as_wanted(self, policy: Policy) -> Iterator[Arrival]:
        """Keep the policy's number of tasks open, as the scheduler does."""
        last, put_off = 0.0, 0
        while True:
            wake, wanted = math.inf, tasks_wanted(policy, self._traffic(last))
            waits = False  # for the policy's next time
            while len(self._open) < wanted:
                rng, traffic = draw(self._seed, self._issued), self._traffic(last)
                due = next_due(policy, traffic, rng)
                if due > self._now:
                    wake, waits = due, True
                    break
                idle = self._idle(self._open)
                if not idle:
                    wake = self._next_eligible(self._open)
                    break
                device = idle[place_of_next(policy, traffic, rng, self._parts, idle)]
                self._begin(device, self._parts, rng)
                put_off = 0
                last = due if policy.catches_up else self._now
            if self._ends and self._ends[0][0] <= wake:
                yield from self._end_of(self._finished())
                self._cancel_stale()
            else:
                self._now = wake
                put_off += waits
                if put_off > _MOST_PUT_OFF:
                    raise ConfigError(
                        f"scheduler.policy.kind = {policy.kind!r}: due() put the same task off "
                        f"{put_off} times, to {wake:g} s at last: count from traffic.last, not "
                        "from traffic.now"
                    )

    def _traffic(self, last: float) -> Traffic:
        """The policy's input."""
        return Traffic(
            self._now,
            0.0,
            self._issued,
            self._version,
            self._open.keys(),
            self._able(),
            0,
            self._mean_staleness,
            last,
            0,
        )

    def _able(self) -> Sequence[int]:
        """The devices that don't rest after failures."""
        resting = self._rests.after_failures(self._now)
        return _without(list(self._devices), resting) if resting else self._devices

    def _rounds(self, policy: Rounds) -> Iterator[PlannedEvent]:
        """Run rounds of k devices one after the other; open tasks end with their round."""
        while True:
            version = self._version
            yield from self._round(policy, version)
            self._in_vain = self._in_vain if self._version == version else 0
            self._give_up(failed=False)

    def _round(self, policy: Rounds, version: int) -> Iterator[PlannedEvent]:
        """Run the round based on ``version``, replacing devices that vanish."""
        since, answered = self._now, set[int]()
        while self._version == version:
            k, _ = wanted(policy, len(self._able()), room=None)
            it = Round(k, len(answered), len(self._open), since)
            what = verdict(policy, it, self._now)
            if what == "over":
                timed_out = self._now >= since + policy.timeout_s
                yield self._over("time-out" if timed_out else _ALL_ANSWERED)
                return
            if what in ("again", "dropped"):
                if self._open or not self._rests.after_failures(self._now):
                    self._in_vain += 1  # not while devices only rest
                if self._in_vain == _IN_VAIN:
                    raise ConfigError(
                        f"scheduler.policy.timeout_s = {policy.timeout_s:g} is too short for these "
                        f"devices: even {_IN_VAIN} times as long brings fewer than min_answers = "
                        f"{policy.min_answers} answers"
                    )
                if what == "dropped":
                    yield self._over("time-out", drops=True)
                    return
                since = self._now
                self._give_up(failed=True)
            deadline, wake = since + policy.timeout_s, self._fill(k, answered)
            end = self._ends[0][0] if self._ends else math.inf
            too_few = not self._open and len(answered) < policy.min_answers
            if too_few and policy.too_few == "extend" and wake < math.inf:
                while deadline <= wake:  # extended again and again, until a rest ends
                    since, deadline = deadline, deadline + policy.timeout_s
                deadline = wake
            if end > wake or end >= deadline:
                self._now = min(wake, deadline)
                continue
            task = self._finished()
            if (yield from self._end_of(task)):
                answered.add(task.device)

    def _fill(self, k: int, answered: set[int]) -> float:
        """Start devices until k have answered or are at work.

        Returns the time at which another device may become available.
        """
        while len(answered) + len(self._open) < k:
            busy = answered | self._open.keys()
            idle = self._idle(busy)
            if not idle:
                return self._next_eligible(busy)
            rng = draw(self._seed, self._issued)
            self._begin(idle[self._parts.pick(rng, idle)], self._parts, rng)
        resting = self._rests.after_failures(self._now)
        return min(map(self._rests.end, resting), default=math.inf)

    def _give_up(self, *, failed: bool) -> None:
        """Drop all open tasks. ``failed``: count them as failures, for slowness."""
        for device in self._open if failed else ():
            self._rests.ended(device, self._now, failed=True)
        self._open.clear()
        self._ends.clear()

    def _over(self, why: str, *, drops: bool = False) -> RoundOver:
        version, makes = self._version, bool(self._counted) and not drops
        self._version += makes
        self._counted.clear()
        return RoundOver(version, makes, oldest=version, time=self._now, why=why, drops=drops)

    def _anarchic(self) -> Iterator[Arrival]:
        """Let each device start by itself, after an exponentially distributed idle time."""
        initiative = self._settings.trainer.anarchic
        if initiative is None:
            raise ConfigError("scheduler.policy.kind = 'none' needs trainer.anarchic.rate")
        parts = Participation(initiative.steps, self._settings.participation)
        rates = [initiative.rate * rate for rate in parts.rates(self._devices)]
        rngs = [random.Random(f"{self._seed}/{device}/anarchic") for device in self._devices]
        decisions = [(rngs[device].expovariate(rates[device]), device) for device in self._devices]
        heapq.heapify(decisions)
        while True:
            if self._ends and (not decisions or self._ends[0][0] <= decisions[0][0]):
                task = self._finished()
                decides = self._now + rngs[task.device].expovariate(rates[task.device])
                heapq.heappush(decisions, (decides, task.device))
                yield from self._end_of(task)
                for device in self._cancel_stale():
                    decides = self._now + rngs[device].expovariate(rates[device])
                    heapq.heappush(decisions, (decides, device))
                continue
            self._now, device = heapq.heappop(decisions)
            rests = self._rests.end(device) > self._now
            if not rests and eligible(
                self._settings.devices.availability, device, self._seed, self._now
            ):
                parts.pick(rngs[device], [device])  # unused draw, so that plans stay the same
                self._begin(device, parts, rngs[device])
            else:
                decides = self._now + rngs[device].expovariate(rates[device])
                heapq.heappush(decisions, (decides, device))


@dataclass(frozen=True, slots=True)
class Job:
    """A device's training that starts from a version."""

    arrival: Arrival
    base: Model
    """x_tau"""
    version: int
    """tau"""
    digest: str
    """of x_tau"""
    into: Model
    """receives the device's update"""
    device_control: Floats | None
    """SCAFFOLD's c_i; None: zero"""
