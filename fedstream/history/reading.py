"""What a journal says of a run's versions and updates, read once; no model is read for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from fedstream.journal import (
    EntryRecord,
    RoundClosed,
    Segment,
    SegmentHead,
    Taken,
    cuts,
    entries,
    opened,
)
from fedstream.journal.records import Standing, is_used


class UpdateRow(NamedTuple):
    """An admitted update, and what became of it."""

    version: int | None  # that contains it; None: it was refused, or is still buffered
    time: float  # when that was decided, in seconds since 1970, or of a simulation's clock
    seconds: float  # since the run's version 0
    device: int
    tau: int
    staleness: int
    weight: float | None
    outcome: str
    reason: str
    samples: int
    steps: int
    lr: float
    loss: float | None
    norm: float | None
    trained_s: float
    waited_s: float
    task: str
    trainer: str
    site: str


class VersionRow(NamedTuple):
    """A version of the model."""

    version: int
    time: float
    seconds: float
    updates: int
    total_updates: int
    staleness: float | None
    weight: float | None
    loss: float | None
    samples: int
    steps: int
    adopted: bool
    digest: str


class At(NamedTuple):
    """Where an update's record is."""

    segment: str  # file name
    offset: int


@dataclass(frozen=True)
class Reading:
    """A journal without its models."""

    head: SegmentHead  # of the newest segment
    versions: list[VersionRow]
    updates: list[UpdateRow]
    places: list[At]  # of the updates
    finished: str | None  # why the run is over; None: its journal goes on

    @property
    def is_simulated(self) -> bool:
        """Whether the times are a simulation's, which begins at zero."""
        return self.head.created == 0.0


def read(journal: Path) -> Reading:
    """Read a journal's folder, or one segment. Raises JournalError."""
    with opened(journal) as chain:
        return _Reader(chain[-1].head).read(chain)


class _Reader:
    """Collects rows, record by record."""

    def __init__(self, head: SegmentHead) -> None:
        self._head = head
        self._versions: list[VersionRow] = []
        self._updates: list[UpdateRow] = []
        self._places: list[At] = []
        self._waiting: list[int] = []  # updates for the next version
        self._total = 0
        self._finished: str | None = None

    def read(self, chain: Sequence[Segment]) -> Reading:
        for segment, cut in cuts(chain):
            said = segment.standing
            self._finished = said.finished  # a run that was extended goes on with a new segment
            if segment is chain[0] or said.why != "continued":
                self._start(said)
            for record, entry in entries(segment, cut):
                if isinstance(entry, Taken):
                    self._take(entry)
                    self._places.append(At(segment.path.name, record.place.offset))
                if entry.digest is not None:
                    self._make(entry, entry.digest)
                elif isinstance(entry, RoundClosed) and entry.dropped:
                    self._waiting.clear()
                self._finished = entry.finished or self._finished
        return Reading(self._head, self._versions, self._updates, self._places, self._finished)

    def _start(self, said: Standing) -> None:
        """Go on from a checkpoint: the journal's first, or a model adopted from Redis."""
        self._waiting.clear()
        # With the updates that the journal no longer has.
        counts = said.journalled
        used = counts.get("applied", 0) + counts.get("buffered", 0) - len(said.held)
        self._total = max(self._total, used)
        self._versions.append(
            VersionRow(
                said.version, said.time, self._since(said.time), 0, self._total,
                None, None, None, 0, 0, said.why == "adopted", said.digest,
            )
        )  # fmt: skip

    def _take(self, entry: Taken) -> None:
        upload, used = entry.upload, is_used(entry)
        if used:
            self._waiting.append(len(self._updates))
        self._updates.append(
            UpdateRow(
                version=None, time=entry.time, seconds=self._since(entry.time),
                device=upload.device, tau=upload.tau, staleness=entry.staleness,
                weight=entry.weight if used else None, outcome=entry.outcome, reason=entry.reason,
                samples=upload.samples, steps=upload.steps, lr=upload.lr, loss=upload.loss,
                norm=entry.sizes[0] if used and entry.sizes else None, trained_s=upload.seconds,
                waited_s=max(0.0, entry.time - entry.received), task=upload.task,
                trainer=upload.trainer, site=upload.site,
            )
        )  # fmt: skip

    def _make(self, entry: EntryRecord, digest: str) -> None:
        """Add the version of all updates that wait for one."""
        for number in self._waiting:
            self._updates[number] = self._updates[number]._replace(version=entry.version)
        updates = [self._updates[number] for number in self._waiting]
        self._waiting.clear()
        self._total += len(updates)
        self._versions.append(
            VersionRow(
                entry.version, entry.time, self._since(entry.time), len(updates), self._total,
                _mean([u.staleness for u in updates]),
                _mean([u.weight for u in updates if u.weight is not None]),
                _mean([u.loss for u in updates if u.loss is not None]),
                sum(u.samples for u in updates), sum(u.steps for u in updates), False, digest,
            )
        )  # fmt: skip

    def _since(self, time: float) -> float:
        return max(0.0, time - self._head.created)


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
