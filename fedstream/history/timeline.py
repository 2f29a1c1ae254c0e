"""The known facts of a run: its versions, measurements and events. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container, Iterator
from itertools import islice
from math import isfinite, isnan
from statistics import fmean
from typing import Any, NamedTuple

from fedstream.core.messages import POOL, Event, Goal, Version
from fedstream.trainer.goals import (
    MOST_RELAPSES,
    Swings,
    goal_of,
    is_better,
    is_over_devices,
    main_metric,
)

STALLED_S = 5.0  # without a version; at least 10 times the usual interval between versions
FIRST_S = 30.0  # how long the first version may take
BINS = (
    ("0", 0, 0),
    ("1", 1, 1),
    ("2", 2, 2),
    ("3-4", 3, 4),
    ("5-8", 5, 8),
    ("9-16", 9, 16),
    ("17-32", 17, 32),
    ("33+", 33, None),
)
"""Staleness in a few bins: name, least, most."""

_RATE_OVER_S = 10.0
_EVENTS_SHOWN = 100
_KINDS_KEPT = 20  # kinds of errors per site; bounded, because sites choose the kinds


def is_stalled(idle_s: float, usual_s: float, *, first: bool) -> bool:
    """Whether a run without a version for ``idle_s`` stands still.

    ``usual_s``: the usual time between versions; ``first``: only the initial version exists.
    """
    return idle_s > (FIRST_S if first else max(STALLED_S, 10 * usual_s))


class SeenUpdate(NamedTuple):
    """The little that is kept of an update, because a run may have millions."""

    task: str
    device: int
    staleness: int
    weight: float
    loss: float | None


class SeenVersion(NamedTuple):
    """Time and updates of a version."""

    time: float
    updates: tuple[SeenUpdate, ...]


class History:
    """Published versions and events, in order. Pure: it has no clock and does no I/O.

    ``most``: the number of newest versions, and of newest measurements, to remember; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self.versions: dict[int, SeenVersion] = {}
        self.evaluations: dict[int, dict[str, float]] = {}  # version -> metrics
        self.measured: tuple[int, dict[str, float]] | None = None  # the latest evaluation
        self.goal: dict[str, Goal] = {}  # of metrics, as the task declares them
        self.stop_metric: str | None = None  # that may end the run
        self.best: dict[str, tuple[int, float]] = {}  # of those with a goal: (version, value)
        self.revised = 0  # how often devices measured a version that had been measured before
        self.tried: int | None = None  # the version last measured, even if measuring failed
        self.devices_tried: int | None = None  # the same, by evaluations on the devices
        self.devices_lack = ""  # why the last evaluation on the devices had no metrics; '': it had
        self.unmeasured: Event | None = None  # the error, if measuring `tried` failed
        # The first error of each kind that the user's task raised, by (site, reason).
        self.errors: dict[tuple[str, str], Event] = {}
        # In a row, in the pool only: a site's mistakes must not end the operator's run.
        self.failed = 0  # tasks that raised or killed their trainers
        self.failed_devices: set[int | None] = set()  # of these tasks
        self.refused = 0  # updates
        self.references: Container[int] = ()  # devices whose updates go into no version
        self.disk_full = False  # the updater waits for space; the observer looks
        self.events: deque[Event] = deque(maxlen=_EVENTS_SHOWN)
        self._ever_finite: dict[str, bool] = {}  # by metric
        self._swings = Swings(self.goal)
        self._times: deque[float] = deque(maxlen=1024)  # when the newest versions were published
        self._most = most

    def publish(self, version: Version) -> None:
        """Add a version; republishing one without updates keeps its known updates."""
        if version.updates or version.version not in self.versions:
            self.versions[version.version] = SeenVersion(
                version.time,
                tuple(
                    SeenUpdate(u.task, u.device, u.staleness, u.weight, u.loss)
                    for u in version.updates
                ),
            )
            self._forget(self.versions)
            self._times.append(version.time)

    def recall(self, number: int, made: SeenVersion) -> None:
        """Add an earlier version from the journal."""
        self.versions[number] = made
        self._forget(self.versions)

    def tell(self, event: Event) -> None:
        """Add an event."""
        site = event.site or POOL
        ours = site == POOL
        if event.what == "evaluation" and event.version is not None:
            self.measure(event.version, event.metrics or {})
        elif event.what == "devices_evaluated" and event.version is not None:
            self.measure_on_devices(event.version, event.metrics or {}, event.text or "")
        elif event.what == "error":
            if event.device is None:  # the evaluator's
                self.tried, self.unmeasured = event.version, event
            else:
                self._failed(event)
            self._raised(site, event)
        elif event.outcome in ("applied", "buffered"):
            self.failed = 0
            self.failed_devices.clear()
            if event.device not in self.references:
                self.refused = 0
        elif event.outcome == "dead":
            self._failed(event)
        elif event.outcome == "refused":
            self.refused += ours
        self.events.append(event)

    def _failed(self, event: Event) -> None:
        if (event.site or POOL) == POOL:
            self.failed += 1
            self.failed_devices.add(event.device)

    def _raised(self, site: str, event: Event) -> None:
        if sum(known == site for known, _ in self.errors) < _KINDS_KEPT:
            self.errors.setdefault((site, event.reason or ""), event)

    def measure(self, version: int, metrics: dict[str, float]) -> None:
        """Record a version's metrics; none if the task has no test data."""
        self.tried, self.unmeasured = version, None
        if metrics:
            self._add(version, metrics)

    def measure_on_devices(self, version: int, metrics: dict[str, float], found: str) -> None:
        """Record what devices measured of a version; no metrics if they were too few.

        ``found``: what became of the devices, in words.
        """
        self.devices_tried = version
        self.devices_lack = "" if metrics else f"version {version} on the devices: {found}"
        if metrics:
            self._add(version, metrics)

    def _add(self, version: int, metrics: dict[str, float]) -> None:
        """Add metrics of a version to those that it has; devices' may come later."""
        newest = self.measured[0] if self.measured else -1
        before = self.evaluations.get(version, {})
        self.revised += version < newest or not metrics.keys() <= before.keys()
        found = before | metrics
        self.evaluations[version] = found
        self._forget(self.evaluations)
        if version >= newest:
            self.measured = version, found
        self._swings.add(metrics)
        for name, value in metrics.items():
            self._ever_finite[name] = self._ever_finite.get(name, False) or isfinite(value)
            self.recall_best(version, name, value)

    def recall_best(self, version: int, name: str, value: float) -> None:
        """Add a value that may be a metric's best, of a measurement that may be unknown."""
        goal = goal_of(name, self.goal)
        if goal is None or not isfinite(value):
            return
        if name not in self.best or is_better(value, self.best[name][1], goal):
            self.best[name] = version, value

    def forget_measurements(self) -> None:
        """Discard all measurements: others take their place."""
        self.evaluations.clear()
        self.best.clear()
        self._ever_finite.clear()
        self._swings.clear()
        self.measured = None
        self.devices_lack = ""

    @property
    def main(self) -> str | None:
        """The metric to show where there is room for one; None if nothing was measured."""
        return main_metric(self._ever_finite, self.goal, self.stop_metric)

    @property
    def newest_of_main(self) -> tuple[int, float] | None:
        """The newest version with the main metric, and the value; None if there is none.

        Devices may measure fewer versions than the evaluator.
        """
        name = self.main
        known = [n for n, metrics in self.evaluations.items() if name in metrics]
        if name is None or not known:
            return None
        return max(known), self.evaluations[max(known)][name]

    @property
    def never_finite(self) -> list[str]:
        """The metrics that were measured and never were a finite number."""
        return [name for name, ever in self._ever_finite.items() if not ever]

    def notices(self, *, journal: bool) -> Iterator[tuple[str, str]]:
        """Yield notices about the measurements so far: a key and a line each.

        ``journal``: whether the run has a journal, so that its versions can be searched.
        """
        version, metrics = self.measured or (0, {})
        for name, value in metrics.items():
            if isnan(value) and not is_over_devices(name):
                yield f"nan {name}", f"{name} is not a number at version {version}: see metrics()"
        if self.devices_lack:
            yield "on devices", f"no metrics of {self.devices_lack}"
        swing = self._swings.worst
        if swing is not None and swing.times > MOST_RELAPSES:
            hint = ": see fedstream journal bisect" if journal else ""
            yield "swings", f"{swing}{hint}"

    def _forget(self, known: dict[int, Any]) -> None:
        if self._most is not None and len(known) > self._most:
            del known[next(iter(known))]

    def forget_failures(self) -> None:
        """Discard failures so far: a resumed run starts counting afresh."""
        self.failed = self.refused = 0
        self.failed_devices.clear()
        self.errors.clear()

    @property
    def newest(self) -> int:
        """The newest version; -1 before the first."""
        return max(self.versions, default=-1)

    def staleness(self) -> Counter[int]:
        """Number of updates by staleness."""
        return Counter(u.staleness for v in self.versions.values() for u in v.updates)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness over all updates; 0 if there are none."""
        late = self.staleness()
        return sum(d * n for d, n in late.items()) / late.total() if late else 0.0

    def updates_by_device(self) -> Counter[int]:
        """Number of updates by device."""
        return Counter(u.device for v in self.versions.values() for u in v.updates)

    def recent_staleness(self, versions: int = 100) -> float:
        """Mean staleness over the newest versions."""
        new = islice(reversed(self.versions.values()), versions)
        return fmean([u.staleness for v in new for u in v.updates] or [0.0])

    def rate(self, now: float) -> float:
        """Recent versions per second; it falls while no version arrives."""
        times = [t for t in self._times if t > now - _RATE_OVER_S] or list(self._times)[-5:]
        if len(times) < 2:
            return 0.0
        return (len(times) - 1) / max(now - times[0], times[-1] - times[0], 1e-6)

    @property
    def usual_s(self) -> float:
        """Mean seconds between recent versions; 0 before the second."""
        times = self._times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def idle_s(self, now: float) -> float:
        """Seconds from the newest version's publication to ``now``; 0 before the first."""
        return now - self._times[-1] if self._times else 0.0
