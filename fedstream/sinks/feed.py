"""From a run's messages to the points that a tracker doesn't have yet. Pure: no clock, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Protocol

from fedstream.broker.messages import OUTCOMES, Event, Version
from fedstream.sinks.sink import Reached, TrackedPoint, TrackedValue


class Feed:
    """The points after ``reached``, each once, whatever is read again.

    ``lost``: versions that nobody can write any more: Redis had trimmed them before they were read,
    or knows only that they exist.
    """

    def __init__(self, reached: Reached, lost: int = 0) -> None:
        self.reached = reached
        self.lost = lost
        self.tried: int | None = None  # the version measured last, even if measuring failed
        self.measured: Mapping[str, float] = {}  # by the newest evaluation seen

    def points(self, versions: Iterable[Version], events: Iterable[Event]) -> list[TrackedPoint]:
        """The points that these messages add; they count as written from now on."""
        found = [point for version in versions if (point := self._version(version)) is not None]
        found += [point for event in events if (point := self._evaluation(event)) is not None]
        return found

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
        if event.what != "evaluation" or not event.metrics:
            return None
        self.measured = {f"test/{name}": value for name, value in sorted(event.metrics.items())}
        if number <= self.reached.evaluation:
            return None
        self.reached = replace(self.reached, evaluation=number)
        return TrackedPoint("evaluation", number, event.time, self.measured)


class Used(Protocol):
    """What is known of an update in a version."""

    @property
    def staleness(self) -> int:
        """In versions."""

    @property
    def weight(self) -> float:
        """In the version."""

    @property
    def loss(self) -> float | None:
        """Of the training."""


def made_of(updates: Sequence[Used]) -> dict[str, float]:
    """A version's own numbers; of several updates, their means."""
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
    """What trackers get of a summary: its numbers and texts, without tables."""
    return {key: one for key, one in numbers.items() if isinstance(one, TrackedValue)}
