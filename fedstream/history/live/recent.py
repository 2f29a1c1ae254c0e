"""The newest events, versions and counts of a run, each bounded. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from math import isfinite
from typing import Any, TypeVar

import numpy as np

from fedstream.broker.streams import Entry
from fedstream.core.errors import BadMessage
from fedstream.core.messages import OUTCOMES, Contribution, Event, Version
from fedstream.core.records import Tally
from fedstream.history.live.snapshot import GAUGED
from fedstream.history.table import MADE, NONE, UPDATE, RowArray, or_nan, update_row, whole

ROWS = 16_384  # of ended tasks and of versions
_GAUGES = 1800
_MEASURED = 10_000
_SHOWN = 50  # events
_UNMATCHED = 4096  # updates of versions whose outcomes were not told yet
_REASONS = 1000  # a closed set, but for a Redis that anybody may write to
_TEXT = 2000  # characters of an error that are kept
_LAST_S = 253_402_300_799.0  # the end of the year 9999: no date is later

K = TypeVar("K")
V = TypeVar("V")


class Ring:
    """A bounded array of rows that forgets the oldest rows."""

    def __init__(self, kind: np.dtype[Any], most: int) -> None:
        self._rows = np.zeros(2 * most, kind)
        self._most = most
        self._dropped = 0  # rows that were there before the first
        self._end = 0

    def add(self, row: tuple[Any, ...]) -> int:
        """Append a row; returns its number."""
        if self._end == len(self._rows):
            self._rows[: self._most] = self._rows[self._most :]
            self._dropped += self._most
            self._end = self._most
        self._rows[self._end] = row
        self._end += 1
        return self._dropped + self._end - 1

    def set(self, number: int, name: str, value: float) -> None:
        """Change a field of a row, unless the row was forgotten."""
        if number >= self._dropped:
            self._rows[name][number - self._dropped] = value

    def newest(self) -> RowArray:
        """A copy of the newest rows, oldest first."""
        return self._rows[max(0, self._end - self._most) : self._end].copy()


class Recent:
    """Outcomes, measurements, versions and counts, newest last."""

    def __init__(self) -> None:
        self.reasons: list[str] = [""]
        self.measured: dict[int, Event] = {}
        self.told: deque[Event] = deque(maxlen=_SHOWN)
        self.ended = Ring(UPDATE, ROWS)
        self.made = Ring(MADE, ROWS)
        self.suspects: dict[int, int] = {}  # how often each device was named as one
        self.gauged = Ring(GAUGED, _GAUGES)
        self._reasons = {"": 0}
        self._rows: dict[str, int] = {}  # task -> its row, of those used and not in a version yet
        self._unmatched: dict[str, Contribution] = {}

    def tell(self, entries: Iterable[Entry]) -> None:
        """Add events, in order; unreadable ones are left out."""
        for entry in entries:
            with suppress(BadMessage):
                self._tell(Event.decode(entry.data))

    def _tell(self, event: Event) -> None:
        text = event.text and event.text[-_TEXT:]
        event = event.model_copy(update={"time": _moment(event.time), "text": text})
        if is_measurement(event) and event.version is not None:
            before = self.measured.get(event.version)  # by devices, or of their version
            both = {**(before.metrics or {} if before else {}), **(event.metrics or {})}
            self.measured[event.version] = event.model_copy(update={"metrics": both})
            if len(self.measured) > _MEASURED:
                del self.measured[next(iter(self.measured))]
        elif event.what == "outcome" and event.outcome is not None:
            self._end(event)
        elif event.what == "suspect" and event.device is not None:
            times = self.suspects.pop(event.device, 0)
            _bounded(self.suspects, event.device, times + 1)
        self.told.append(event)

    def _end(self, event: Event) -> None:
        used = self._unmatched.pop(event.task or "", None)
        outcome = OUTCOMES.index(event.outcome) if event.outcome else 0
        row = self.ended.add(
            update_row(
                version=event.version,
                time=event.time,
                device=event.device,
                outcome=outcome,
                reason=self._reason(event.reason or ""),
                staleness=event.staleness,
                weight=event.weight,
                loss=used.loss if used else None,
            )
        )
        if used is None and event.task and event.outcome in ("applied", "buffered"):
            _bounded(self._rows, event.task, row)

    def _reason(self, reason: str) -> int:
        if reason not in self._reasons:
            if len(self._reasons) == _REASONS:
                return 0
            self._reasons[reason] = len(self.reasons)
            self.reasons.append(reason)
        return self._reasons[reason]

    def publish(self, entries: Iterable[Entry]) -> None:
        """Add versions, in order."""
        for entry in entries:
            with suppress(BadMessage):
                version = Version.decode(entry.data)
                number, time = whole(version.version), _moment(version.time)
                self.made.add((number, time, NONE, False, False, 0, 0, NONE))
                for update in version.updates:
                    row = self._rows.pop(update.task, None)
                    if row is None:  # commits tell a version before its updates' outcomes
                        _bounded(self._unmatched, update.task, update)
                        continue
                    self.ended.set(row, "loss", or_nan(update.loss))

    def gauge(
        self, tally: Tally, memory: int, training: int, uploading: int, leading: Collection[str]
    ) -> None:
        """Add a row of counts."""
        self.gauged.add(
            (
                tally.now,
                tally.tasks,
                tally.backlog,
                tally.triggers,
                tally.trainers,
                memory,
                training,
                uploading,
                tally.dead,
                tally.issued,
                sum(tally.outcomes[name] for name in ("applied", "buffered", "refused")),
                tally.head.version,
                ("scheduler" in leading) + 2 * ("updater" in leading),
            )
        )


def is_measurement(event: Event) -> bool:
    """Whether an event is a measurement of a version; a trainer's event names a device."""
    return (
        event.what in ("evaluation", "devices_evaluated")
        and event.version is not None
        and event.device is None
    )


def _moment(seconds: float) -> float:
    """Seconds since 1970, limited to times that have a date."""
    return min(max(seconds, 0.0), _LAST_S) if isfinite(seconds) else 0.0


def _bounded(known: dict[K, V], key: K, value: V) -> None:
    known[key] = value
    if len(known) > _UNMATCHED:
        del known[next(iter(known))]
