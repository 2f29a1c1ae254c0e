"""The interface of trackers, and the conversion of a run's messages to points.

A sink gets a run's points in order, in batches. The caller (the `sinks` service, or a simulation)
calls its methods one at a time, in a thread, and calls them again from `begin` on if one of them
raises or the process dies. So that each point is written once, `begin` returns the tracker's
progress according to its own data, and :class:`Feed` makes only later points from a run's messages.
Pure: no clock, no I/O.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, Protocol, Self, TypeAlias

from pydantic import Field

from fedstream.core.errors import ConfigError
from fedstream.core.messages import OUTCOMES, Event, Version
from fedstream.runtime.config import NamedSettings, Positive


def needs(module: str, extra: str) -> None:
    """Raise ConfigError, naming the package to install, unless the module is installed."""
    if find_spec(module) is None:
        raise ConfigError(
            f"{extra} is not installed: pip install 'fedstream[{extra}]' adds what it needs"
        )


_BEFORE = re.compile(r"^devices?_")
PointKind: TypeAlias = Literal["version", "evaluation", "devices"]
TrackedValue: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class TrackedRun:
    """A run's description for a tracker."""

    id: str
    """unique among runs, and the same when an interrupted run is resumed"""
    name: str
    """``run.name``, which need not be unique"""
    created: float
    """seconds since 1970"""
    parameters: Mapping[str, TrackedValue] = field(default_factory=dict)
    """the configuration by dotted key, such as ``strategy.alpha``, without secrets, and the goals
    that the task declares: ``goal.rmse`` is ``min``"""


@dataclass(frozen=True)
class TrackedPoint:
    """Numbers that belong to one version of the global model.

    A point of kind ``version`` describes the version's updates: ``updates``, ``weight``,
    ``staleness/mean``, ``staleness/max``, ``train/loss``; the newest of a batch also has the run's
    counts of tasks by outcome (``tasks/issued``, ``tasks/applied``, ...). A point of kind
    ``evaluation`` has the evaluator's metrics: ``test/accuracy``, ``test/loss``, .... A point of
    kind ``devices`` has those of an evaluation on the devices: ``devices/accuracy``,
    ``devices/mean_accuracy``, ....
    """

    kind: PointKind
    version: int
    time: float
    """seconds since 1970; in a simulation, the start's time plus virtual seconds"""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Reached:
    """A tracker's newest version for each kind of point; -1: none."""

    version: int = -1
    evaluation: int = -1
    devices: int = -1

    def of(self, kind: PointKind) -> int:
        """The newest version of this kind."""
        found: int = getattr(self, kind)
        return found

    def after(self, points: Sequence[TrackedPoint]) -> Reached:
        """The progress after these points are written."""
        newest: dict[str, int] = dict(self.__dict__)
        for point in points:
            newest[point.kind] = max(newest[point.kind], point.version)
        return Reached(**newest)


class Sink(ABC):
    """A tracker of one run. After any exception, the caller retries from :meth:`begin` on."""

    @abstractmethod
    def begin(self, run: TrackedRun) -> Reached | None:
        """Open the tracker's record of the run, or continue it.

        Returns the record's progress. None: the tracker can't tell, so the caller's cursor is used;
        a batch being written when the process died is then written twice.
        """

    @abstractmethod
    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Write a batch of points; when it returns, they survive a kill of this process.

        Each kind's versions ascend, across batches too.
        """

    @abstractmethod
    def end(self, summary: Mapping[str, TrackedValue], model: Path | None) -> None:
        """Complete the record: the run is finished.

        ``model``: a safetensors file with the final model, deleted afterwards. Called again if the
        process dies before the caller has noted the end.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the record; another :meth:`begin` may continue it."""


class SinkSettings(NamedSettings):
    """A sink's table in the configuration; a sink of your own adds its options in a subclass."""

    kind: str = ""
    every_s: Annotated[Positive, Field(le=300)] = 1.0  # at most one batch in this time
    save_model: bool = True  # whether the tracker gets the final model

    def build(self) -> Sink:
        """Make the sink, without connecting. Raises ConfigError if a package is missing."""
        raise NotImplementedError(f"{type(self).__name__} needs a method build(self) -> Sink")

    def placed(self, out: Path) -> Self:
        """The settings with absolute paths.

        ``out``: the run's own folder, for paths that are not set.
        """
        del out
        return self


class Feed:
    """Makes the points after ``reached``, each once, even if messages are read again.

    ``lost``: versions without points, because Redis trimmed them before they were read or has no
    record of their updates.
    """

    def __init__(self, reached: Reached, lost: int = 0) -> None:
        self.reached = reached
        self.lost = lost
        self.tried: int | None = None  # the last evaluated version, even if the evaluation failed
        self.devices_tried: int | None = None  # the same, by evaluations on the devices
        self.measured: Mapping[str, float] = {}  # by the newest evaluations seen

    def points(self, versions: Iterable[Version], events: Iterable[Event]) -> list[TrackedPoint]:
        """The new points of these messages, which count as written from now on."""
        found = [point for version in versions if (point := self._version(version)) is not None]
        found += [point for event in events if (point := self._evaluation(event)) is not None]
        return found

    def has_tried(self, version: int) -> bool:
        """Whether every service or device that measures the run has tried a version."""
        tried = {self.tried, self.devices_tried} - {None}
        return tried == {version}

    def _version(self, message: Version) -> TrackedPoint | None:
        number, before = message.version, self.reached.version
        if number <= before:
            return None
        self.reached = replace(self.reached, version=number)
        self.lost += number - before - 1
        if number and not message.updates:  # published again: its updates are not known any more
            self.lost += 1
            return None
        return TrackedPoint("version", number, message.time, made_of(message.updates))

    def _evaluation(self, event: Event) -> TrackedPoint | None:
        number = event.version
        if number is None or event.device is not None:  # with a device: a trainer's error
            return None
        if event.what in ("evaluation", "error"):
            self.tried = number
        if event.what == "devices_evaluated":
            self.devices_tried = number
        elif event.what != "evaluation":
            return None
        if not event.metrics:
            return None
        kind: PointKind = "evaluation" if event.what == "evaluation" else "devices"
        found = measured_of(kind, event.metrics)
        self.measured = {**self.measured, **found}
        if number <= self.reached.of(kind):
            return None
        point = TrackedPoint(kind, number, event.time, found)
        self.reached = self.reached.after([point])
        return point


def measured_of(kind: PointKind, metrics: Mapping[str, float]) -> dict[str, float]:
    """A measurement's numbers, as a point names them."""
    if kind == "evaluation":
        return {f"test/{name}": value for name, value in sorted(metrics.items())}
    return {f"devices/{_BEFORE.sub('', name)}": value for name, value in sorted(metrics.items())}


class Used(Protocol):
    """The required properties of an update in a version."""

    @property
    def staleness(self) -> int:
        """Staleness in versions."""

    @property
    def weight(self) -> float:
        """Weight in the version."""

    @property
    def loss(self) -> float | None:
        """Training loss."""


def made_of(updates: Sequence[Used]) -> dict[str, float]:
    """A version's numbers, as means over its updates."""
    values: dict[str, float] = {"updates": len(updates)}
    if not updates:
        return values
    late = [update.staleness for update in updates]
    losses = [update.loss for update in updates if update.loss is not None]
    values["weight"] = fmean(update.weight for update in updates)
    values["staleness/mean"] = fmean(late)
    values["staleness/max"] = max(late)
    if losses:
        values["train/loss"] = fmean(losses)
    return values


def counted(points: list[TrackedPoint], tasks: Mapping[str, int]) -> list[TrackedPoint]:
    """The points, with the counts of tasks in the newest version's."""
    at = max((n for n, point in enumerate(points) if point.kind == "version"), default=None)
    if at is None:
        return points
    newest = points[at]
    return [*points[:at], replace(newest, values={**newest.values, **tasks}), *points[at + 1 :]]


def tasks_of(counts: Mapping[str, int]) -> dict[str, int]:
    """A run's counts of tasks, as numbers of a point."""
    return {f"tasks/{name}": counts.get(name, 0) for name in ("issued", *OUTCOMES)}


def told(numbers: Mapping[str, object]) -> dict[str, TrackedValue]:
    """The numbers and texts of a summary, without tables."""
    return {key: one for key, one in numbers.items() if isinstance(one, TrackedValue)}
