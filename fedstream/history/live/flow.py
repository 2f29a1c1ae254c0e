"""Numbers of open tasks by stage, their rates, and the bottleneck.

The bottleneck is the service for which most tasks wait; tasks in training don't wait. Waiting tasks
are averaged over several snapshots, since a single snapshot often falls between two batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedstream.coordinator.rounds import Rounds
from fedstream.history.live.snapshot import Snapshot
from fedstream.terminal import counted

FlowPlace = Literal["triggers", "waiting", "training", "uploads", "queue", "updater"]
LOOK_S = 10.0  # over which waiting is averaged
LOOKS = 3  # at least, that the bottleneck is told by
WAIT = 1.0  # task on average: less is not worth mentioning

_HELPS: dict[FlowPlace, tuple[str, str]] = {
    "triggers": ("The coordinators", "another coordinator may help, or a faster Redis"),
    "waiting": ("The trainers", "more trainers would help"),
    "uploads": ("The coordinators", "another coordinator may help, or a faster Redis"),
    "queue": ("The updater", "more trainers would not help"),
}
"""Where tasks wait: for whom, and what to do about it."""


@dataclass(frozen=True)
class Stage:
    """A stage of a task: the number of tasks in it, and their rate."""

    name: FlowPlace
    tells: str  # what is counted
    count: int
    rate: float | None = None  # a second; None: not known
    passing: str = ""  # what the rate counts


@dataclass(frozen=True)
class Flow:
    """The stages in the order in which a task passes them, and the bottleneck."""

    stages: tuple[Stage, ...]
    bottleneck: FlowPlace | None  # None: nothing in particular
    text: str  # sentences that say why


def flow(snapshot: Snapshot) -> Flow:
    """The flow of a snapshot, and its bottleneck."""
    phases, tally = snapshot.phases, snapshot.tally
    place, text = _bottleneck(snapshot)
    stages = (
        Stage(
            "triggers",
            "tasks that no coordinator has handed out",
            phases.get("triggered", 0),
            snapshot.rate("issued"),
            "begun",
        ),
        Stage("waiting", "tasks that no trainer has taken", phases.get("waiting", 0)),
        Stage("training", "tasks that a trainer or a device has", phases.get("training", 0)),
        Stage("uploads", "answers that no coordinator has admitted", phases.get("uploading", 0)),
        Stage(
            "queue",
            "updates that the updater has not taken",
            tally.backlog,
            snapshot.rate("decided"),
            "decided",
        ),
        Stage(
            "updater",
            "updates that wait for the rest of their version",
            tally.head.buffered,
            snapshot.rate("version"),
            "versions",
        ),
    )
    return Flow(stages, place, text)


def _bottleneck(snapshot: Snapshot) -> tuple[FlowPlace | None, str]:
    """The bottleneck, None if there is none, and sentences that say why."""
    if snapshot.tally.run.state == "finished":
        return None, "The run is finished."
    if len(snapshot.gauged) < LOOKS:
        return None, "What holds the tasks up is told after three looks."
    waits, over_s = _waiting(snapshot)
    place = max(waits, key=lambda one: waits[one])
    if waits[place] >= WAIT:
        who, helps = _HELPS[place]
        verb, them = ("is", "it") if who.endswith("updater") else ("are", "them")
        return place, (
            f"{who} {verb} the bottleneck: {waits[place]:.1f} tasks on average waited for "
            f"{them} over the last {over_s:.0f} s, more than anywhere else; {helps}."
        )
    target, mean = snapshot.settings.scheduler.target_staleness, snapshot.tally.head.mean_staleness
    if target is not None and mean > target:
        return None, (
            f"The scheduler holds back: updates are {mean:.2f} versions late on average, above "
            f"scheduler.target_staleness = {target:g}."
        )
    training = snapshot.phases.get("training", 0)
    if training and isinstance(snapshot.settings.policy, Rounds):
        return "training", (
            f"Training takes the time: the round waits for {counted(training, 'device')} that still"
            f" {'trains' if training == 1 else 'train'}, and nothing waits for a service."
        )
    if training:
        return "training", (
            "Training takes the time: nothing waits for a service. More tasks in flight, and "
            "trainers for them, would make more versions, from staler updates."
        )
    return None, "Nothing waits: too little is going on for a bottleneck."


def _waiting(snapshot: Snapshot) -> tuple[dict[FlowPlace, float], float]:
    """Mean number of waiting tasks by stage, and the seconds over which it was taken.

    ``Snapshot.gauged`` must have at least ``LOOKS`` rows.
    """
    rows = snapshot.gauged[snapshot.gauged["time"] > snapshot.now - LOOK_S]
    if len(rows) < LOOKS:  # a busy coordinator looks every ten seconds
        rows = snapshot.gauged[-LOOKS:]
    further = sum(rows[name] for name in ("triggers", "training", "uploading", "queue"))
    untaken = (rows["open"] - further).clip(min=0)
    return {
        "triggers": float(rows["triggers"].mean()),
        "waiting": float(untaken.mean()),
        "uploads": float(rows["uploading"].mean()),
        "queue": float(rows["queue"].mean()),
    }, max(1.0, snapshot.now - float(rows["time"][0]))
