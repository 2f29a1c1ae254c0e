"""The cause of a standstill, as one sentence; None while the run makes progress.

Causes are checked in order: causes that stop everything come before causes that stop a part, and
certain ones before likely ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from fedstream.coordinator.policies import Policy
from fedstream.coordinator.rounds import Rounds
from fedstream.core.messages import OUTCOMES
from fedstream.history.display import duration, failing
from fedstream.history.live.snapshot import Phase, SeenWorker, Snapshot
from fedstream.history.timeline import is_stalled
from fedstream.terminal import counted
from fedstream.trainer.devices import AlwaysAvailable, eligible

AWAY_S = 3.0  # without an answer from Redis; shorter gaps are usual
FULL = 0.98  # of Redis's memory: beyond it, writes are about to be refused
_SILENT = 0.5  # of the time after which a trainer is struck off
_ENDS = 3  # at least, all with the same outcome: then that is what stops the run
_CHECKED = 1000  # devices whose availability is looked up

Explanation: TypeAlias = Callable[[Snapshot], str | None]


@dataclass(frozen=True)
class Standstill:
    """The cause of a standstill."""

    text: str  # a sentence
    is_wrong: bool = True  # somebody may have to do something


def stalled(snapshot: Snapshot, *, away_s: float = 0.0) -> Standstill | None:
    """The cause why no version is made; None while versions are made, or too early to say.

    ``away_s``: seconds for which Redis has not answered, so that the snapshot is as old as that.
    """
    if away_s > AWAY_S:
        return Standstill(
            f"Stalled because Redis has not answered for {duration(away_s)}: all services wait, "
            "and go on by themselves once it is back."
        )
    run = snapshot.tally.run
    if run.state == "finished":
        why = f" ({run.why})" if run.why else ""
        return Standstill(f"Nothing moves any more because the run is finished{why}.", False)
    idle = idle_s(snapshot)
    if _is_complete(snapshot):
        return _last_measurement(snapshot, idle)
    if not is_stalled(idle, usual_s(snapshot), first=snapshot.tally.head.version == 0):
        return None
    why = next(
        (said for cause in CAUSES if (said := cause(snapshot))), "no cause is known from here"
    )
    return Standstill(f"Stalled for {duration(idle)} because {why}.")


def idle_s(snapshot: Snapshot) -> float:
    """Seconds since the newest version, or since the run began."""
    return max(0.0, snapshot.now - max(snapshot.tally.head.time, snapshot.tally.run.created))


def usual_s(snapshot: Snapshot) -> float:
    """The median of the seconds between the newest versions; 0 before the second."""
    times = snapshot.made["time"][-100:]
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def _is_complete(snapshot: Snapshot) -> bool:
    return snapshot.tally.head.version >= snapshot.tally.run.versions


def _last_measurement(snapshot: Snapshot, idle: float) -> Standstill | None:
    """All versions are made, and the run has not ended yet."""
    last = snapshot.tally.run.versions
    measured = snapshot.measured[-1].version if snapshot.measured else 0
    if not is_stalled(idle, 0.0, first=False) or measured >= last:
        return None
    newest = f"version {measured:,}" if snapshot.measured else "none"
    return Standstill(
        f"Stalled for {duration(idle)} because all {last:,} versions are made, and the evaluator "
        f"has not measured the last one yet (newest measurement: {newest})."
    )


# causes: each says what follows 'because', or None


def memory_is_full(snapshot: Snapshot) -> str | None:
    """Redis refuses writes."""
    used, limit = snapshot.memory.used, snapshot.memory.limit
    if not limit or used < FULL * limit:
        return None
    return (
        f"Redis is full ({used / limit:.0%} of {limit >> 20:,} MiB): it refuses writes until there "
        "is room"
    )


def no_updater_leads(snapshot: Snapshot) -> str | None:
    """No process holds the updater's lease."""
    if "updater" in snapshot.leading:
        return None
    waiting = snapshot.tally.backlog
    waits = f"and {counted(waiting, 'update')} {'waits' if waiting == 1 else 'wait'} for one"
    return f"no updater is active, {waits}: {_successor(snapshot.settings.updater.lease_s)}"


def updater_is_silent(snapshot: Snapshot) -> str | None:
    """Updates wait, and the active updater takes none."""
    waiting, limit = snapshot.tally.backlog, snapshot.settings.scheduler.max_queue
    if not waiting:
        return None
    full = f", at its limit of {limit:,}, so that no task begins either" if waiting >= limit else ""
    return (
        f"the updater takes nothing from the queue: {counted(waiting, 'update')} "
        f"{'waits' if waiting == 1 else 'wait'}{full} (its log says why: a full disk, for example)"
    )


def no_trainer_is_alive(snapshot: Snapshot) -> str | None:
    """No trainer is registered."""
    if snapshot.tally.trainers:
        return None
    open_ = snapshot.tally.tasks
    rest = f", and {counted(open_, 'task')} {'is' if open_ == 1 else 'are'} open" if open_ else ""
    return f"no trainer is alive{rest}"


def no_device_is_connected(snapshot: Snapshot) -> str | None:
    """Only gateways train, and no device is at one."""
    gateways = [one for one in snapshot.workers if one.is_gateway]
    if not gateways or len(gateways) < len(snapshot.workers):
        return None
    if len(snapshot.workers) < snapshot.tally.trainers or any(one.owns for one in gateways):
        return None
    return f"no device is connected to {'the gateway' if len(gateways) == 1 else 'any gateway'}"


def trainers_are_silent(snapshot: Snapshot) -> str | None:
    """All registered trainers are silent: paused, or cut off."""
    limit = snapshot.settings.coordinator.trainer_silence_s
    ages = list(_silences(snapshot))
    if not ages or len(snapshot.workers) < snapshot.tally.trainers:
        return None
    if min(age for _, age in ages) < _SILENT * limit:
        return None
    worker, age = min(ages, key=lambda one: one[1])
    lease = snapshot.settings.lease.seconds
    who = f"none of the {len(ages):,} trainers" if len(ages) > 1 else "not even the only trainer"
    return (
        f"{who} says anything, perhaps because they are paused or cut off: {worker.name} spoke "
        f"last, {duration(age)} ago. Tasks in hand go to others once their leases of {lease:g} s "
        "have run out"
    )


def _silences(snapshot: Snapshot) -> Iterator[tuple[SeenWorker, float]]:
    for worker in snapshot.workers:
        if worker.heard is not None:
            yield worker, snapshot.now - worker.heard


def nothing_is_used(snapshot: Snapshot) -> str | None:
    """Tasks end, but none of them makes a version."""
    since = snapshot.ended[snapshot.ended["time"] > snapshot.tally.head.time]
    used = np.isin(since["outcome"], [OUTCOMES.index(name) for name in ("applied", "buffered")])
    if len(since) < _ENDS or used.any():
        return None
    ends = Counter(zip(since["outcome"].tolist(), since["reason"].tolist(), strict=True))
    (outcome, reason), count = ends.most_common(1)[0]
    what = {
        "refused": "is refused",
        "given_up": "is given up",
        "dead": "becomes a dead letter",
    }[OUTCOMES[outcome]]
    why = snapshot.reasons[reason] or "no reason was given"
    return f"every task that ends {what}: {why} ({count:,} of the last {len(since):,})"


def no_scheduler_leads(snapshot: Snapshot) -> str | None:
    """No task is open, and no process holds the scheduler's lease."""
    if snapshot.tally.tasks or "scheduler" in snapshot.leading or _devices_decide(snapshot):
        return None
    successor = _successor(snapshot.settings.scheduler.lease_s)
    return f"no scheduler is active, so no task begins: {successor}"


def _successor(lease_s: float) -> str:
    return f"if it crashed, another takes over once its lease of {lease_s:g} s has run out"


def no_device_is_eligible(snapshot: Snapshot) -> str | None:
    """No task is open, and no device may begin one."""
    tally = snapshot.tally
    if tally.tasks:
        return None
    devices, barred = tally.run.devices, len(tally.head.quarantines.by_device)
    if barred >= devices:
        return f"all {counted(devices, 'device')} are in quarantine"
    if _devices_decide(snapshot):
        return "the devices decide when they train (scheduler.policy none), and none has begun"
    known = snapshot.settings.devices.availability
    if not isinstance(known, AlwaysAvailable) and devices <= _CHECKED:
        at = snapshot.now - tally.run.created
        if not any(eligible(known, device, tally.run.seed, at) for device in range(devices)):
            return f"none of the {devices:,} devices is available now (devices.availability)"
    if len(tally.failing) >= devices - barred:
        named = failing(tally.failing_devices)
        return f"no device works, and each is asked less and less often: {named}"
    if rest_s := snapshot.settings.scheduler.rest_s:
        return f"no task is open: devices that had one rest for {rest_s:g} s (scheduler.rest_s)"
    return (
        f"no task is open: no device may begin one now (scheduler.policy is "
        f"{snapshot.settings.policy.kind}; the scheduler's log says more)"
    )


def _devices_decide(snapshot: Snapshot) -> bool:
    policy = snapshot.settings.policy
    return isinstance(policy, Policy) and policy.devices_decide


def coordinators_are_slow(snapshot: Snapshot) -> str | None:
    """Answers or triggers wait for a coordinator."""
    waits: tuple[tuple[Phase, str], ...] = (("uploading", "answer"), ("triggered", "trigger"))
    for phase, what in waits:
        waiting = snapshot.phases.get(phase, 0)
        if waiting and waiting == snapshot.tally.tasks:
            return f"no coordinator takes what waits for it: {counted(waiting, what)}"
    return None


def nobody_takes_tasks(snapshot: Snapshot) -> str | None:
    """Trainers are alive, and none takes a task."""
    waiting = snapshot.phases.get("waiting", 0)
    if not waiting or snapshot.phases.get("training", 0):
        return None
    return (
        f"{counted(waiting, 'task')} {'waits' if waiting == 1 else 'wait'}, and none of the "
        f"{counted(snapshot.tally.trainers, 'live trainer')} takes one: a trainer that died holds "
        f"its tasks until their lease of {snapshot.settings.lease.seconds:g} s has run out"
    )


def batch_is_incomplete(snapshot: Snapshot) -> str | None:
    """Some updates of the next version are there; the others are not."""
    there, wanted = snapshot.tally.head.buffered, snapshot.settings.rule.batch
    if wanted < 2 or not there:
        return None
    policy, oldest = snapshot.settings.policy, _oldest(snapshot)
    if isinstance(policy, Rounds):
        ends = [one.deadline for one in snapshot.tasks if one.deadline is not None]
        until = f", for {duration(max(0.0, min(ends) - snapshot.now))} at most" if ends else ""
        return f"the round waits for {wanted - there:,} of {wanted:,} answers{until}{oldest}"
    return (
        f"a version takes {wanted:,} updates and {there:,} {'is' if there == 1 else 'are'} there"
        f"{oldest}"
    )


def training_takes_long(snapshot: Snapshot) -> str | None:
    """Tasks are being trained, and nothing else happens."""
    training = snapshot.phases.get("training", 0)
    if not training:
        return None
    verb = "is" if training == 1 else "are"
    return f"{counted(training, 'task')} {verb} still being trained{_oldest(snapshot)}"


def _oldest(snapshot: Snapshot) -> str:
    if snapshot.oldest is None:
        return ""
    return f"; the oldest open task began {duration(max(0.0, snapshot.now - snapshot.oldest))} ago"


CAUSES: tuple[Explanation, ...] = (
    memory_is_full,
    no_updater_leads,
    updater_is_silent,
    no_trainer_is_alive,
    trainers_are_silent,
    no_device_is_connected,
    nothing_is_used,
    no_scheduler_leads,
    no_device_is_eligible,
    coordinators_are_slow,
    nobody_takes_tasks,
    batch_is_incomplete,
    training_takes_long,
)
"""In the order in which they are asked."""
