"""What goes wrong in a run, and when: drawn from a seed, so that a failure can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

Rule: TypeAlias = Literal["fedasync", "fedavg", "scaffold", "afa-cs"]
Sync: TypeAlias = Literal["always", "interval"]

STRATEGIES: tuple[Rule, ...] = ("fedasync", "fedavg", "scaffold", "afa-cs")
SYNCS: tuple[Sync, ...] = ("always", "interval")

UPDATER = "updater"  # whichever leads when its turn has come
_VICTIMS = (UPDATER, UPDATER, "coordinator", "scheduler", "trainer-1", "trainer-2")
_PAUSED = ("coordinator", "scheduler", "trainer-1", "trainer-2")


class Kind(StrEnum):
    """What can go wrong."""

    KILL = "kill"  # a service, by SIGKILL
    PAUSE = "pause"  # a service is stopped for a moment and goes on
    USURP = "usurp"  # the updater sleeps past its lease, another takes over, and it wakes up
    AMNESIA = "amnesia"  # the same; but Redis is emptied and the other dies before it wakes up
    RELAPSE = "relapse"  # the same; but Redis goes back to when it led, so its token is good again
    EMPTY = "empty"  # Redis restarts without its data
    REWIND = "rewind"  # Redis restarts with what it had some moments ago
    CUT = "cut"  # all connections, with the replies that are under way
    DELAY = "delay"  # requests and replies wait, and then arrive
    DISK = "disk"  # there is no room for the journal


# The longest that each lasts, in seconds: beyond the updater's lease, within Redis's time-out.
_LASTS = {
    Kind.KILL: 0.0, Kind.PAUSE: 2.0, Kind.USURP: 1.0, Kind.AMNESIA: 1.0, Kind.RELAPSE: 1.0,
    Kind.EMPTY: 0.5, Kind.REWIND: 1.0, Kind.CUT: 0.1, Kind.DELAY: 1.5, Kind.DISK: 1.5,
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    at: int  # as soon as this version is published
    after_s: float  # and so much later
    kind: Kind
    seconds: float  # that it lasts, where it lasts
    target: str = ""  # the service, where it is one


@dataclass(frozen=True)
class Plan:
    """A run and all that goes wrong in it."""

    seed: int
    strategy: Rule
    sync: Sync
    versions: int  # the run ends with this one
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.strategy}, journal.sync {self.sync}"


def plan(seed: int, faults: int) -> Plan:
    """The plan of a seed. Seeds that follow each other deal out the kinds evenly between them.

    Eight of them are every rule with every way to sync.
    """
    rng = random.Random(seed)
    strategy = STRATEGIES[seed % 4]
    kinds = list(Kind)
    dealt = [kinds[(seed * faults + n) % len(kinds)] for n in range(faults)]
    rng.shuffle(dealt)
    at, planned = 5, []
    for kind in dealt:
        planned.append(_drawn(rng, kind, at))
        at += _gap(rng, strategy)
    return Plan(
        seed=seed, strategy=strategy, sync=SYNCS[(seed + seed // 4) % 2],
        versions=planned[-1].at + 10 if planned else 10, faults=tuple(planned),
    )  # fmt: skip


def _drawn(rng: random.Random, kind: Kind, at: int) -> Fault:
    among: Sequence[str] = {Kind.KILL: _VICTIMS, Kind.PAUSE: _PAUSED}.get(kind, ("",))
    return Fault(
        at=at, after_s=round(rng.uniform(0, 0.3), 3), kind=kind,
        seconds=round(rng.uniform(0, _LASTS[kind]), 3), target=rng.choice(among),
    )  # fmt: skip


def _gap(rng: random.Random, strategy: Rule) -> int:
    """Versions until the next fault; none: it comes while this one lasts."""
    if rng.random() < 0.3:
        return 0
    return rng.randint(3, 25) if strategy == "fedasync" else rng.randint(1, 6)
