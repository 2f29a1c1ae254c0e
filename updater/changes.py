"""The change that a queue entry makes: its journal record, and the contents of its commit.

Pure except for the clock. A change is journalled before anything else happens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from fedstream.broker import reasons
from fedstream.broker.blobs import chunks_of
from fedstream.broker.layout import Model
from fedstream.broker.messages import Outcome, RoundEnd, Upload, Version
from fedstream.broker.records import End, Head, counted
from fedstream.broker.streams import Entry
from fedstream.journal import RoundClosed, Taken
from fedstream.journal.progress import Progress, Step
from fedstream.journal.rebuild import end_of
from fedstream.journal.records import Counted


@dataclass(frozen=True)
class Change:
    """What one queue entry does."""

    entry: str
    record: Taken | RoundClosed | None  # None: it was recorded before
    payload: tuple[Model, ...]  # of the record
    after: Progress
    version: Version | None = None
    end: End | None = None
    blob: str | None = None  # of the update
    finish: str | None = None  # why this ends the run, if it does
    used: tuple[Model, ...] = ()  # models that it read or wrote

    def counted(self, counts: dict[str, int]) -> dict[str, int]:
        """Counts of ended tasks, including the one it ends unless that was counted before."""
        return counted(counts, self.end) if self.end and self.record is not None else counts

    def remakes(self, ahead: Head, told: str | None) -> bool:
        """Whether this can be a change that Redis already has and the journal lost.

        ``told``: the digest of the next version in Redis.
        """
        version, record = self.version, self.record
        if version is not None and version.version <= ahead.version:
            return told == version.digest
        # An update trained from a version not yet made: others are missing before it.
        return not (isinstance(record, Taken) and record.upload.tau > record.version)


@dataclass(frozen=True)
class Retained:
    """A processed entry that stays in the queue until its record is on disk."""

    position: int  # after the record
    entry: str
    blob: str | None


def version_of(step: Step, digest: str, epoch: int, nonce: str) -> Version:
    """The version that a step made, for the holder of this fencing token."""
    state = step.after.state
    return Version(
        version=state.version, time=time.time(), epoch=epoch, parent=state.version - 1,
        digest=digest, blob=blob_of(state.version, epoch, nonce),
        size=state.model.layout.nbytes, updates=step.made or (),
        chunks=chunks_of(state.model.layout.nbytes),
    )  # fmt: skip


def blob_of(version: int, epoch: int, nonce: str) -> str:
    """A unique name for a version's model, never reused for other bytes."""
    return f"{version}.{epoch}.{nonce}"


def _as_recorded(upload: Upload) -> Upload:
    """The upload without what only matters to readers of its blob."""
    return upload.model_copy(update={"chunks": None})


def taken(
    entry: Entry,
    upload: Upload,
    step: Step,
    payload: tuple[Model, ...],
    *,
    version: Version | None,
    finish: str | None,
    counts: dict[str, int],
    used: tuple[Model, ...],
    sizes: Counted = (),
) -> Change:
    """An update that was applied or buffered."""
    decision = step.decision
    if decision is None:
        raise RuntimeError("an update without a decision")
    outcome: Outcome = "applied" if decision.outcome == "applied" else "buffered"
    record = Taken(
        entry=entry.id, upload=_as_recorded(upload), outcome=outcome, staleness=decision.staleness,
        weight=decision.weight, version=step.after.state.version,
        digest=version.digest if version else None,
        time=version.time if version else time.time(),
        received=entry.time, finished=finish, counts=counts, sizes=sizes,
    )  # fmt: skip
    return Change(
        entry.id, record, payload, step.after, version, end_of(record), upload.blob, finish, used
    )


def round_closed(
    entry: Entry,
    message: RoundEnd,
    step: Step,
    *,
    late: bool,
    version: Version | None,
    finish: str | None,
    counts: dict[str, int],
    used: tuple[Model, ...],
) -> Change:
    """The end of a round. ``late``: the run was already over, so it ends nothing."""
    record = RoundClosed(
        entry=entry.id, round=message.version, why=message.why, late=late,
        version=step.after.state.version, digest=version.digest if version else None,
        time=version.time if version else time.time(), received=entry.time,
        finished=finish, counts=counts,
    )  # fmt: skip
    return Change(entry.id, record, (), step.after, version, finish=finish, used=used)


def refused(
    entry: Entry,
    upload: Upload,
    before: Progress,
    reason: str,
    counts: dict[str, int],
    sizes: Counted = (),
) -> Change:
    """An update that never reaches the model."""
    outcome: Outcome = "given_up" if reason == reasons.RUN_FINISHED else "refused"
    version = before.state.version
    record = Taken(
        entry=entry.id, upload=_as_recorded(upload), outcome=outcome, reason=reason,
        staleness=max(0, version - upload.since), version=version, time=time.time(),
        received=entry.time, counts=counts, sizes=sizes,
    )  # fmt: skip
    return Change(entry.id, record, (), before, end=end_of(record), blob=upload.blob)


def found_again(entry: Entry, upload: Upload, before: Progress, end: End) -> Change:
    """A task that the journal has but Redis forgot: it ends as it did before."""
    return Change(entry.id, None, (), before, end=end, blob=upload.blob)
