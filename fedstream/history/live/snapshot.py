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

_OVER_S = 10.0  # for rates

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
        ("issued", "i8"),
        ("decided", "i8"),  # tasks: used or refused
        ("version", "i8"),
        ("leads", "i1"),  # 1: a scheduler does, 2: an updater does, 3: both
    ]
)
"""Counts at the time of a reading, as a row."""


@dataclass(frozen=True, slots=True)
class SeenWorker:
    """A trainer, or a replica of a gateway, as it describes itself: foreign text and numbers."""

    name: str
    is_gateway: bool
    owns: int  # devices; 0: it serves all that nobody owns
    heard: float | None  # when it said something last; None: it has signed off


@dataclass(frozen=True, slots=True)
class RedisMemory:
    """Redis's memory, in bytes. ``limit``: 0 if there is none."""

    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment. Sequences that grow with the run are bounded, newest last."""

    settings: Settings  # the coordinator's: limits, the rule's parameters, leases
    tally: Tally  # run, head (with quarantines), counts and reasons, queue, triggers, inboxes
    now: float
    memory: RedisMemory
    phases: Mapping[Phase, int]  # of all open tasks
    leading: frozenset[str]  # of "scheduler" and "updater": the roles that a process holds
    oldest: float | None  # when the oldest open task was opened
    deadline: float | None  # the earliest of open tasks
    workers: tuple[SeenWorker, ...]  # by name, at most 200; the tally has how many are alive
    measured: tuple[Measurement, ...]  # by version, at most 10,000
    ended: RowArray  # of ended tasks, as rows of UPDATE: the newest 16,384
    reasons: tuple[str, ...]  # of ``ended``
    made: RowArray  # of versions, as rows of MADE: the newest 16,384
    gauged: RowArray  # of GAUGED: at most 1,800
    told: tuple[Event, ...]  # the newest 50; their times have a date, their texts are short
    # How often each device was named as a suspect.
    suspects: Mapping[int, int] = field(default_factory=dict)
    is_recorded: bool = False  # whether the coordinator can read the run's journal

    def rate(self, name: str) -> float | None:
        """The growth per second of a count of GAUGED over the last 10 s; None: not yet known."""
        rows = self.gauged[self.gauged["time"] >= self.now - _OVER_S]
        seconds = float(rows["time"][-1] - rows["time"][0]) if len(rows) else 0.0
        if seconds <= 0:
            return None
        # Redis may have fallen back meanwhile.
        return max(0, int(rows[name][-1]) - int(rows[name][0])) / seconds
