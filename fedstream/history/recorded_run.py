"""A recorded run for the pages: columns, measurements and models, read again when files change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedstream.core.errors import FedstreamError
from fedstream.core.messages import Goal
from fedstream.history import report
from fedstream.history.index import columns_of, marks
from fedstream.history.measurements import Measurement, measurements
from fedstream.history.model_stats import MeasuredShares, VersionStatsCache
from fedstream.history.models import MEMORY, JournalModels
from fedstream.history.summary import stands
from fedstream.history.table import NONE, Columns
from fedstream.journal import journal_of, opened
from fedstream.journal.contributions import DeviceContribution
from fedstream.journal.inspection import Divergence, divergence
from fedstream.trainer.goals import Goals, goal_of, ordered

_UNASKED = 2 << 30  # bytes of the journal that are read for models before anybody asks for one
_NAMED = 5  # runs of a folder that is no run itself
_LIVE_MEMORY = 32 << 20  # bytes of models that are kept in a service, which has other work


class RecordedRun:
    """A run's folder or a bare journal. One thread at a time may use it."""

    def __init__(
        self,
        path: Path,
        read: Callable[[int], object] = lambda _bytes: None,
        *,
        metrics: Path | None = None,
        other: RecordedRun | None = None,
        is_live: bool = False,
        measured: Callable[[], Sequence[Measurement]] = tuple,
    ) -> None:
        """Open a run. Raises FedstreamError if there is no journal.

        ``read``: called with each number of bytes read from the journal. ``metrics``: a table of
        measurements that replaces the run's own. ``other``: a run to compare this one with.
        ``is_live``: the pages stand beside the live page. ``measured``: the measurements of a run
        that has no table of them yet.
        """
        self.path = path
        self.other = other
        self.is_live = is_live
        self._table = metrics or path / report.METRICS
        self._live_measurements = measured
        self.journal = journal_of(path)
        self._marks = marks(self.journal)
        if not self._marks:
            raise FedstreamError(_no_run(path))
        self.columns: Columns = columns_of(self.journal, read)
        self.measured_shares: Callable[[], MeasuredShares | None] = lambda: None
        """each device's figures over all models, if a reader asked for them"""
        self._models: JournalModels | None = None
        self._version_stats: VersionStatsCache | None = None

    def refresh(self) -> RecordedRun:
        """This run, or a new object if its journal, or the other run's, has grown."""
        other = self.other and self.other.refresh()
        is_same = marks(self.journal) == self._marks and other is self.other
        if is_same and not (self.is_live and self.measured[-1:] != self._measurements()[-1:]):
            return self
        fresh = RecordedRun(
            self.path,
            metrics=self._table,
            other=other,
            is_live=self.is_live,
            measured=self._live_measurements,
        )
        fresh.measured_shares = self.measured_shares
        if self._models is not None and fresh.columns.continues(self.columns):
            fresh._models = self._models.reopened()
            if self._version_stats is not None:
                fresh._version_stats = self._version_stats.continued(
                    fresh._models,
                    fresh.columns.numbers.tolist(),
                )
        self._closing()
        return fresh

    def close(self) -> None:
        """Close the files."""
        self._closing()
        if self.other is not None:
            self.other.close()

    def _closing(self) -> None:
        if self._models is not None:
            self._models.close()

    @property
    def shares(self) -> Mapping[int, DeviceContribution] | None:
        """Each device's figures over all models; None until they were measured."""
        found = self.measured_shares()
        return None if found is None else found.by_device

    @cached_property
    def divergence(self) -> Divergence | None:
        """The first difference from the other run; None without another. Raises JournalError."""
        if self.other is None:
            return None
        with opened(self.journal) as ours, opened(self.other.journal) as theirs:
            return divergence(ours, theirs)

    @property
    def models(self) -> JournalModels:
        """The models, rebuilt on demand."""
        if self._models is None:
            self._models = JournalModels(
                self.journal, memory=_LIVE_MEMORY if self.is_live else MEMORY
            )
        return self._models

    @property
    def version_stats(self) -> VersionStatsCache:
        """Figures of each version's model."""
        if self._version_stats is None:
            self._version_stats = VersionStatsCache(self.models, self.columns.numbers.tolist())
        return self._version_stats

    def knows(self, version: int) -> bool:
        """Whether a version's figures are in the cache. Any thread may ask."""
        return self._version_stats is not None and self._version_stats.known(version) is not None

    def prepare_neighbours(
        self, version: int, step: int | None, is_wanted: Callable[[], bool]
    ) -> None:
        """Compute the figures that a reader will likely ask for next.

        ``step``: the reader's last move, in versions; None: no version was asked for yet, so only
        this one is computed, and less of the journal is read. Raises FedstreamError, Unwanted.
        """
        if step is None:
            self.version_stats.of(version, is_wanted)
            self.models.fill(version, is_wanted, _UNASKED)
        elif self.columns.has(version):
            self.version_stats.prepare_neighbours(version, step, is_wanted)
            self.models.fill(version, is_wanted)

    @cached_property
    def measured(self) -> list[Measurement]:
        """The measurements by ascending version. Raises FedstreamError for a foreign table."""
        return self._measurements()

    def _measurements(self) -> list[Measurement]:
        found = measurements(self._table) or self._live_measurements()
        return sorted(found, key=lambda one: one.version)

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        """The metrics' names, the main one and loss first."""
        names = (name for one in self.measured for name in one.metrics)
        return ordered(names, self._goal, self.models.head.stop_metric)

    def goal_of(self, metric: str) -> Goal | None:
        """Whether a low or a high value of a metric is good; None if undeclared."""
        return goal_of(metric, self._goal)

    @property
    def _goal(self) -> Goals:
        return self.models.head.goal or {}

    def measured_at(self, version: int) -> Measurement | None:
        """The newest measurement at or before a version."""
        at = int(np.searchsorted(self._measured_versions, version, side="right"))
        return self.measured[at - 1] if at else None

    @cached_property
    def _measured_versions(self) -> Any:
        return np.array([one.version for one in self.measured], np.int64)

    @property
    def state(self) -> tuple[str, str]:
        """The run's state and its reason."""
        return stands(self.path, lambda: self.columns.finished)

    @property
    def oldest(self) -> int:
        """The oldest version that the journal has."""
        return int(self.columns.numbers[0])

    @property
    def newest(self) -> int:
        """The newest version."""
        return int(self.columns.numbers[-1])

    @property
    def is_simulated(self) -> bool:
        """Whether times are a simulation's, which begins at zero."""
        return self.models.head.created == 0.0

    def seconds(self, time: float) -> float:
        """Seconds from the run's beginning to a time of the journal."""
        return max(0.0, time - self.models.head.created)

    def times(self, versions: Sequence[int]) -> list[float]:
        """The times of versions, in seconds from the run's beginning; they never decrease.

        A clock that was set back counts as standing still. A version that the journal lacks has
        the time of the version before.
        """
        made = self.columns.made
        rows = np.searchsorted(self.columns.numbers, versions, side="right") - 1
        times = made["time"][self.columns.places[np.maximum(rows, 0)]] - self.models.head.created
        found: list[float] = np.maximum.accumulate(np.maximum(times, 0.0)).tolist()
        return found

    def newest_at(self, seconds: Sequence[float]) -> list[int]:
        """The newest version at each of ``seconds`` by :meth:`times`; before all, the oldest."""
        times = np.array(self.times(self.columns.numbers.tolist()))
        rows = np.searchsorted(times, np.array(seconds), side="right") - 1
        found: list[int] = self.columns.numbers[np.maximum(rows, 0)].tolist()
        return found

    def digest(self, version: int) -> str:
        """A version's digest. Raises JournalError, KeyError."""
        row = self.columns.row(version)
        name = self.columns.segments[int(row["segment"])]
        offset = int(row["offset"])
        return self.models.digest(name, None if offset == NONE else offset)

    def task(self, update: int) -> str:
        """The id of the task that an update answers. Raises JournalError."""
        return self.models.taken(*self.columns.at(update)).upload.task


def _no_run(path: Path) -> str:
    """The error for a path without a journal; it names runs inside the path."""
    from fedstream.history.listing import runs_in

    inside = [one for one in runs_in(path) if marks(journal_of(one))] if path.is_dir() else []
    if not inside:
        return (
            f"{path}: no run with a journal there: name a run's folder, its journal folder or a "
            "segment"
        )
    inside.sort(key=lambda one: one.stat().st_mtime, reverse=True)
    named = ", ".join(map(str, inside[:_NAMED]))
    rest = f" and {len(inside) - _NAMED:,} older ones" if len(inside) > _NAMED else ""
    return f"{path}: not a run, but there are runs in it: name one of {named}{rest}"
