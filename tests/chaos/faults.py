"""What goes wrong in a run, and when: drawn from a seed, so that a failure can be repeated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice
from typing import Literal, TypeAlias, get_args

Rule: TypeAlias = Literal[
    "fedasync",
    "fedavg",
    "fedbuff",
    "afa-cd",
    "afa-cs",
    "scaffold",
    "ca2fl",
    "aced",
    "fadas",
    "ringmaster",
]
Sync: TypeAlias = Literal["always", "interval"]

STRATEGIES: tuple[Rule, ...] = get_args(Rule)
OF_ONE: tuple[Rule, ...] = ("fedasync", "ringmaster")  # each update makes a version
SYNCS: tuple[Sync, ...] = ("always", "interval")

UPDATER = "updater"  # whichever leads when its turn has come
UPDATERS = ("updater-1", "updater-2")
TRAINERS = ("trainer-1", "trainer-2")
NAMES = (*UPDATERS, "coordinator", "scheduler", *TRAINERS)
GATEWAYS = ("gateway-1", "gateway-2")  # replicas, where devices come over HTTP
OVER_HTTP = (0, 1, 2, 3, 4, 5)  # which they are, of ten: the others are the trainers'
# What the trainers send updates in, in every other pair of runs, by what the rule takes.
FORMATS = {
    "model": (("int8", "bf16+zstd"),),
    "delta": (("int4", "topk:0.1+zstd"), ("topk:0.01", "int8+zstd")),
}
MODELS = ("f32", "int8", "bf16")


class Kind(StrEnum):
    """What can go wrong."""

    # with processes
    KILL = "kill"  # a service, by SIGKILL
    PAUSE = "pause"  # a service is stopped for a moment and goes on
    USURP = "usurp"  # the updater sleeps past its lease, another takes over, and it wakes up
    DOUBLE = "double"  # a second process of the same name
    TWICE = "twice"  # trainers answer once more, and something else
    CLOCK = "clock"  # one service's clock jumps by up to an hour, and back
    # with Redis
    EMPTY = "empty"  # it restarts without its data
    REWIND = "rewind"  # it restarts with what it had some moments ago
    TORN = "torn"  # its append-only file ends at any byte of the last ones
    BACKUP = "backup"  # an old one is played back: any moment since the run began
    AMNESIA = "amnesia"  # a usurpation of which it is emptied; both updaters wake up, or one
    RELAPSE = "relapse"  # it goes back to before a usurpation: the first one's token is good again
    TAKEOVER = "takeover"  # the same, while the successor takes over: both are alive
    MEMORY = "memory"  # it has none left
    ERASE = "erase"  # the newest model is gone from it
    # with Redis where sentinels watch over it
    FAILOVER = "failover"  # the master dies, and a replica that may be behind takes its place
    SPLIT = "split"  # the same, but the master was only asleep, and goes on being one for a moment
    # with the ways to it
    CUT = "cut"  # all connections, with the replies that are under way
    DELAY = "delay"  # requests and replies wait, and then arrive
    PARTITION = "partition"  # one service does not reach it
    LATE = "late"  # what a service asks arrives after it gave up waiting, or was done asking again
    # with devices that come over HTTP
    HANG_UP = "hang up"  # their connections are cut
    CRASH = "crash"  # one is killed, and begins again with what it has on its disk
    # with disks
    DISK = "disk"  # there is no room for the journal
    EIO = "eio"  # the journal cannot be read, written or synced
    POWER = "power"  # the updaters' machine loses its power
    BLACKOUT = "blackout"  # and Redis's too, which forgets its last moments
    ROT = "rot"  # a byte of the journal is not what it was


# With sentinels services talk to whomever these name: there is no file to go back to, and no wire.
SENTINELED = (
    Kind.FAILOVER,
    Kind.SPLIT,
    Kind.KILL,
    Kind.FAILOVER,
    Kind.USURP,
    Kind.SPLIT,
    Kind.DOUBLE,
    Kind.FAILOVER,
    Kind.DISK,
    Kind.SPLIT,
    Kind.CLOCK,
    Kind.PAUSE,
    Kind.TWICE,
    Kind.EIO,
    Kind.ROT,
)
# Where Redis forgets whom a gateway knows, an operator invites the devices again (phones.py).
WITH_GATEWAY = (
    Kind.KILL,
    Kind.HANG_UP,
    Kind.PAUSE,
    Kind.PARTITION,
    Kind.CRASH,
    Kind.CUT,
    Kind.LATE,
    Kind.REWIND,
    Kind.USURP,
    Kind.DELAY,
    Kind.EMPTY,
    Kind.MEMORY,
    Kind.BACKUP,
    Kind.EIO,
)
ALONE = tuple(
    kind for kind in Kind if kind not in (Kind.FAILOVER, Kind.SPLIT, Kind.HANG_UP, Kind.CRASH)
)

# The longest that each lasts, in seconds: mostly beyond the updater's lease of one.
_LASTS = {
    Kind.KILL: 0.0,
    Kind.PAUSE: 2.0,
    Kind.USURP: 1.0,
    Kind.DOUBLE: 2.0,
    Kind.TWICE: 0.0,
    Kind.CLOCK: 2.0,
    Kind.EMPTY: 0.5,
    Kind.REWIND: 1.0,
    Kind.TORN: 0.3,
    Kind.BACKUP: 0.3,
    Kind.AMNESIA: 1.0,
    Kind.RELAPSE: 1.0,
    Kind.TAKEOVER: 0.0,
    Kind.MEMORY: 1.5,
    Kind.ERASE: 0.0,
    Kind.CUT: 0.1,
    Kind.DELAY: 1.5,
    Kind.PARTITION: 4.0,
    Kind.LATE: 4.0,
    Kind.FAILOVER: 0.0,
    Kind.SPLIT: 0.0,
    Kind.HANG_UP: 0.0,
    Kind.CRASH: 0.0,
    Kind.DISK: 1.5,
    Kind.EIO: 0.7,
    Kind.POWER: 0.3,
    Kind.BLACKOUT: 0.3,
    Kind.ROT: 0.0,
}
_VICTIMS: dict[Kind, Sequence[str]] = {
    Kind.KILL: (UPDATER, UPDATER, *NAMES[2:]),
    Kind.PAUSE: NAMES[2:],
    Kind.DOUBLE: (UPDATER, UPDATER, *NAMES[2:]),
    Kind.CLOCK: (UPDATER, *NAMES[2:]),
    Kind.PARTITION: (UPDATER, UPDATER, *NAMES[2:]),
    Kind.LATE: (UPDATER, UPDATER, *NAMES[2:]),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    at: int  # as soon as this version is published
    after_s: float  # and so much later
    kind: Kind
    seconds: float  # that it lasts, where it lasts
    target: str = ""  # the service, where it is one
    share: float = 0.0  # in [0, 1): how much or which, where there is a choice


@dataclass(frozen=True)
class Plan:
    """A run and all that goes wrong in it."""

    seed: int
    strategy: Rule
    sync: Sync
    versions: int  # the run ends with this one
    faults: tuple[Fault, ...]
    sentinels: bool = False  # watch over Redis
    formats: tuple[str, ...] = ("f32", "f32")  # of the trainers' updates
    model: str = "f32"  # in which versions are published
    over_http: tuple[int, ...] = ()  # devices that come through a gateway; (): there is none
    adapts: bool = False  # with every fault, another scale of the rule's step is proposed

    @property
    def names(self) -> tuple[str, ...]:
        """The services."""
        return (*NAMES, *GATEWAYS) if self.over_http else NAMES

    def __str__(self) -> str:
        watched = ", sentinels" if self.sentinels else ""
        sent = "" if set(self.formats) == {"f32"} else f", {' and '.join(self.formats)}"
        given = "" if self.model == "f32" else f", models in {self.model}"
        front = f", {len(self.over_http)} devices over HTTP" if self.over_http else ""
        scaled = ", adaptive steps" if self.adapts else ""
        return (
            f"seed {self.seed}: {self.strategy}, journal.sync {self.sync}{watched}{sent}{given}"
            f"{front}{scaled}"
        )


def plan(
    seed: int,
    faults: int,
    kinds: Sequence[Kind] = ALONE,
    *,
    sentinels: bool = False,
    gateway: bool = False,
) -> Plan:
    """The plan of a seed. Seeds that follow each other deal out the kinds evenly between them.

    Twenty of them are every rule with every way to sync, and every rule with mixed wire formats.
    Steps are scaled in every fourth, but for fedavg, which has none.
    """
    rng = random.Random(seed)
    # Devices over HTTP are given no control variates.
    rules = [rule for rule in STRATEGIES if rule != "scaffold"] if gateway else STRATEGIES
    strategy = rules[seed % len(rules)]
    sync = SYNCS[(seed + seed // len(STRATEGIES)) % 2]
    dealt = [kinds[(seed * faults + n) % len(kinds)] for n in range(faults)]
    rng.shuffle(dealt)
    at, planned = 5, []
    for kind in dealt:
        planned.append(_drawn(rng, _possible(kind, sync), at, gateway=gateway))
        at += _gap(rng, strategy)
    versions = planned[-1].at + 10 if planned else 10
    formats = Plan.formats
    if seed // 2 % 2:
        several = FORMATS["model" if strategy in ("fedasync", "fedavg") else "delta"]
        formats = several[seed // 4 % len(several)]
    model = MODELS[seed // 3 % len(MODELS)]
    return Plan(
        seed,
        strategy,
        sync,
        versions,
        tuple(planned),
        sentinels,
        formats,
        model,
        OVER_HTTP if gateway else (),
        adapts=seed % 4 == 0 and strategy != "fedavg",
    )


def _possible(kind: Kind, sync: Sync) -> Kind:
    """With `interval`, versions are taken back if Redis dies with the machine: that is no promise.

    docs/architecture.md says which are.
    """
    return Kind.POWER if kind is Kind.BLACKOUT and sync == "interval" else kind


def _drawn(rng: random.Random, kind: Kind, at: int, *, gateway: bool) -> Fault:
    victims = _VICTIMS.get(kind, ("",))
    if gateway and kind in _VICTIMS:
        victims = (*victims, *islice(cycle(GATEWAYS), len(victims)))  # every other time
    return Fault(
        at=at,
        after_s=round(rng.uniform(0, 0.3), 3),
        kind=kind,
        seconds=round(rng.uniform(0, _LASTS[kind]), 3),
        target=rng.choice(victims),
        share=round(rng.random(), 4),
    )


def _gap(rng: random.Random, strategy: Rule) -> int:
    """Versions until the next fault; none: it comes while this one lasts."""
    if rng.random() < 0.3:
        return 0
    return rng.randint(3, 25) if strategy in OF_ONE else rng.randint(1, 6)
