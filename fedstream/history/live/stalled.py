"""The cause of a standstill, as one sentence; None while the run makes progress.

Causes are checked in order: causes that stop everything come before causes that stop a part, and
certain ones before likely ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from fedstream.coordinator.policies import Policy
from fedstream.coordinator.rounds import Rounds
from fedstream.core.messages import OUTCOMES
from fedstream.history.display import duration, failing
from fedstream.history.live.snapshot import Phase, Snapshot
from fedstream.history.table import is_used_row
from fedstream.history.timeline import is_stalled
from fedstream.terminal import counted
from fedstream.trainer.devices import AlwaysAvailable, eligible

AWAY_S = 3.0  # without an answer from Redis; shorter gaps are usual
FULL = 0.98  # of Redis's memory: beyond it, writes are about to be refused
_SILENT = 0.5  # of the time after which a trainer is struck off
_ENDS = 3  # at least, all with the same outcome: then that is what stops the run
_CHECKED = 1000  # devices whose availability is looked up


@dataclass(frozen=True)
class Standstill:
    """The cause of a standstill."""

    text: str  # a sentence
    is_wrong: bool = True  # an operator may have to act


def stalled(snapshot: Snapshot, *, away_s: float = 0.0) -> Standstill | None:
    """Why no version is made; None while versions are made, or if it is too early to say.

    ``away_s``: seconds for which Redis has not answered, which is the age of the snapshot.
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
    why = next(_causes(snapshot), "no cause is known from here")
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
    """The standstill if all versions are made but the last isn't measured; otherwise None."""
    last = snapshot.tally.run.versions
    measured = snapshot.measured[-1].version if snapshot.measured else 0
    if not is_stalled(idle, 0.0, first=False) or measured >= last:
        return None
    newest = f"version {measured:,}" if snapshot.measured else "none"
    return Standstill(
        f"Stalled for {duration(idle)} because all {last:,} versions are made, and the evaluator "
        f"has not measured the last one yet (newest measurement: {newest})."
    )


# Causes: what follows 'because'.


def _causes(snapshot: Snapshot) -> Iterator[str]:
    """Yield the causes that hold, the most important first."""
    yield from _of_the_core(snapshot)
    yield from _of_trainers(snapshot)
    yield from _of_new_tasks(snapshot)
    yield from _of_open_tasks(snapshot)


def _of_the_core(snapshot: Snapshot) -> Iterator[str]:
    """Yield the causes with the core: Redis refuses writes, or the updater doesn't work."""
    used, limit = snapshot.memory.used, snapshot.memory.limit
    if limit and used >= FULL * limit:
        yield (
            f"Redis is full ({used / limit:.0%} of {limit >> 20:,} MiB): it refuses writes until "
            "there is room"
        )
    queued, most = snapshot.tally.backlog, snapshot.settings.scheduler.max_queue
    wait = f"{counted(queued, 'update')} {'waits' if queued == 1 else 'wait'}"
    if "updater" not in snapshot.leading:
        successor = _successor(snapshot.settings.updater.lease_s)
        yield f"no updater is active, and {wait} for one: {successor}"
    if queued:
        full = (
            f", at its limit of {most:,}, so that no task begins either" if queued >= most else ""
        )
        yield (
            f"the updater takes nothing from the queue: {wait}{full} (its log says why: a full "
            "disk, for example)"
        )


def _of_trainers(snapshot: Snapshot) -> Iterator[str]:
    """Yield the causes with trainers: none is registered or heard, or no device is connected."""
    workers, open_ = snapshot.workers, snapshot.tally.tasks
    if not snapshot.tally.trainers:
        are = f"{counted(open_, 'task')} {'is' if open_ == 1 else 'are'} open"
        yield "no trainer is alive" + (f", and {are}" if open_ else "")
    if len(workers) < snapshot.tally.trainers:  # the others are not known here
        return
    ages = [(snapshot.now - one.heard, one.name) for one in workers if one.heard is not None]
    if ages and min(ages)[0] >= _SILENT * snapshot.settings.coordinator.trainer_silence_s:
        age, name = min(ages)
        none = (
            f"none of the {len(ages):,} trainers" if len(ages) > 1 else "not even the only trainer"
        )
        yield (
            f"{none} says anything, perhaps because they are paused or cut off: {name} spoke last, "
            f"{duration(age)} ago. Tasks in hand go to others once their leases of "
            f"{snapshot.settings.lease.seconds:g} s have run out"
        )
    if workers and all(one.is_gateway and not one.owns for one in workers):
        gateway = "the gateway" if len(workers) == 1 else "any gateway"
        yield f"no device is connected to {gateway}"


def _of_new_tasks(snapshot: Snapshot) -> Iterator[str]:
    """Yield the causes with new tasks: tasks end without a version, or none begins."""
    since = snapshot.ended[snapshot.ended["time"] > snapshot.tally.head.time]
    if len(since) >= _ENDS and not is_used_row(since).any():
        ends = Counter(zip(since["outcome"].tolist(), since["reason"].tolist(), strict=True))
        (outcome, reason), count = ends.most_common(1)[0]
        verb = {
            "refused": "is refused",
            "given_up": "is given up",
            "dead": "becomes a dead letter",
        }[OUTCOMES[outcome]]
        why = snapshot.reasons[reason] or "no reason was given"
        yield f"every task that ends {verb}: {why} ({count:,} of the last {len(since):,})"
    if snapshot.tally.tasks:
        return
    policy = snapshot.settings.policy
    devices_decide = isinstance(policy, Policy) and policy.devices_decide
    if "scheduler" not in snapshot.leading and not devices_decide:
        successor = _successor(snapshot.settings.scheduler.lease_s)
        yield f"no scheduler is active, so no task begins: {successor}"
    yield from _of_devices(snapshot, devices_decide=devices_decide)


def _of_devices(snapshot: Snapshot, *, devices_decide: bool) -> Iterator[str]:
    """Yield the causes with devices: none may begin a task."""
    tally, settings = snapshot.tally, snapshot.settings
    devices, barred = tally.run.devices, len(tally.head.quarantines.by_device)
    if barred >= devices:
        yield f"all {counted(devices, 'device')} are in quarantine"
    if spent := len(tally.head.spent):
        yield f"{counted(spent, 'device')} of {devices:,} have no privacy budget left"
    if devices_decide:
        yield "the devices decide when they train (scheduler.policy none), and none has begun"
    known = settings.devices.availability
    if not isinstance(known, AlwaysAvailable) and devices <= _CHECKED:
        at = snapshot.now - tally.run.created
        if not any(eligible(known, device, tally.run.seed, at) for device in range(devices)):
            yield f"none of the {devices:,} devices is available now (devices.availability)"
    if len(tally.failing) >= devices - barred:
        named = failing(tally.failing_devices)
        yield f"no device works, and each is asked less and less often: {named}"
    if rest_s := settings.scheduler.rest_s:
        yield f"no task is open: devices that had one rest for {rest_s:g} s (scheduler.rest_s)"
    yield (
        "no task is open: no device may begin one now (scheduler.policy is "
        f"{settings.policy.kind}; the scheduler's log says more)"
    )


def _successor(lease_s: float) -> str:
    return f"if it crashed, another takes over once its lease of {lease_s:g} s has run out"


def _of_open_tasks(snapshot: Snapshot) -> Iterator[str]:
    """Yield the causes with open tasks: these wait for a process or each other, or are trained."""
    waits: tuple[tuple[Phase, str], ...] = (("uploading", "answer"), ("triggered", "trigger"))
    for phase, name in waits:
        waiting = snapshot.phases.get(phase, 0)
        if waiting and waiting == snapshot.tally.tasks:
            yield f"no coordinator takes what waits for it: {counted(waiting, name)}"
    waiting, training = snapshot.phases.get("waiting", 0), snapshot.phases.get("training", 0)
    if waiting and not training:
        yield (
            f"{counted(waiting, 'task')} {'waits' if waiting == 1 else 'wait'}, and none of the "
            f"{counted(snapshot.tally.trainers, 'live trainer')} takes one: a trainer that died "
            f"holds its tasks until their lease of {snapshot.settings.lease.seconds:g} s has run "
            "out"
        )
    oldest = ""
    if snapshot.oldest is not None:
        age = duration(max(0.0, snapshot.now - snapshot.oldest))
        oldest = f"; the oldest open task began {age} ago"
    there, wanted = snapshot.tally.head.buffered, snapshot.settings.strategy.batch
    if wanted > 1 and there and isinstance(snapshot.settings.policy, Rounds):
        ends = snapshot.deadline
        until = f", for {duration(max(0.0, ends - snapshot.now))} at most" if ends else ""
        yield f"the round waits for {wanted - there:,} of {wanted:,} answers{until}{oldest}"
    elif wanted > 1 and there:
        are = "is" if there == 1 else "are"
        yield f"a version takes {wanted:,} updates and {there:,} {are} there{oldest}"
    if training:
        verb = "is" if training == 1 else "are"
        yield f"{counted(training, 'task')} {verb} still being trained{oldest}"
