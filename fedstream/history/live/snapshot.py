"""A run at one moment, as values for the live page.

The collector makes snapshots, and the panels draw them. Times are seconds since 1970; ``now`` is by
Redis's clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from fedstream.core.messages import Event
from fedstream.core.records import Tally
from fedstream.history.measurements import Measurement
from fedstream.history.table import RowArray
from fedstream.settings.config import Settings

Phase = Literal["triggered", "waiting", "training", "uploading", "queue"]
PHASES: tuple[Phase, ...] = ("triggered", "waiting", "training", "uploading", "queue")
"""Where an open task is, in the order in which it gets there: a coordinator has not handed it out
yet; nobody has taken it yet; a trainer or device has it; its answer waits in an inbox to be
admitted; its update waits for the updater, or in a batch."""

GAUGED = np.dtype(
    [
        ("time", "f8"),
        ("open", "i8"),
        ("queue", "i8"),
        ("triggers", "i8"),  # tasks, entries
        ("trainers", "i8"),
        ("memory", "i8"),  # bytes
        ("training", "i8"),
        ("uploading", "i8"),  # open tasks in that phase
        ("dead", "i8"),  # letters
        ("leads", "i1"),  # 1: a scheduler does, 2: an updater does, 3: both
    ]
)
"""Counts at the time of a reading, as a row."""

PUSHED = np.dtype(
    [("device", "i8"), ("version", "i8"), ("norm", "f8"), ("distance", "f8"), ("cosine", "f8")]
)
"""A used update as a vector: the newest version after it, its norm as it was sent, how far it alone
moves the parameters, and the cosine to the model's movement afterwards; NaN: not known yet."""


@dataclass(frozen=True, slots=True)
class SeenPushes:
    """Figures of the newest updates that were read in the journal."""

    rows: RowArray = field(default_factory=lambda: np.empty(0, PUSHED))  # the newest 16,384
    version: int = 0  # the last one read
    problem: str = ""  # why it can't be read on


@dataclass(frozen=True, slots=True)
class SeenTask:
    """An open task."""

    task: str
    device: int
    phase: Phase
    since: float | None  # when it was opened; None: unknown
    phase_since: float  # when it was first seen in this phase
    deadline: float | None


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A trainer, or a replica of a gateway, as it describes itself: foreign text and numbers."""

    name: str
    is_gateway: bool
    owns: int  # devices; 0: it serves all that nobody owns
    heard: float | None  # when it said something last; None: it has signed off


@dataclass(frozen=True, slots=True)
class SeenMetrics:
    """A version's metrics on the test data."""

    version: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the last ``over_s`` seconds; all zero until that is known."""

    over_s: float = 0.0
    issued: float = 0.0
    used: float = 0.0  # applied and buffered
    refused: float = 0.0
    versions: float = 0.0


@dataclass(frozen=True, slots=True)
class RedisMemory:
    """Redis's memory, in bytes. ``limit``: 0 if there is none."""

    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment. What grows with the run is bounded, newest last."""

    name: str  # of the run
    settings: Settings  # the coordinator's: limits, the rule's parameters, leases
    tally: Tally  # run, head (with quarantines), counts and reasons, queue, triggers, inboxes
    now: float
    memory: RedisMemory
    tasks: tuple[SeenTask, ...]  # oldest first, at most 1,000
    phases: Mapping[Phase, int]  # of all open tasks
    leading: frozenset[str]  # of "scheduler" and "updater": the roles that somebody holds
    oldest: float | None  # when the oldest open task was opened
    workers: tuple[SeenWorker, ...]  # by name, at most 200; the tally has how many are alive
    rates: Rates
    measured: tuple[SeenMetrics, ...]  # by version, at most 10,000
    ended: RowArray  # of ended tasks, as rows of UPDATE: the newest 16,384
    reasons: tuple[str, ...]  # of ``ended``
    made: RowArray  # of versions, as rows of MADE: the newest 16,384
    gauged: RowArray  # of GAUGED: at most 1,800
    told: tuple[Event, ...]  # the newest 50; their times have a date, their texts are short
    pushes: SeenPushes = SeenPushes()

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements, in the form of a recorded run's."""
        began = self.tally.run.created
        return [
            Measurement(one.version, max(0.0, one.time - began), one.version, dict(one.metrics))
            for one in self.measured
        ]
