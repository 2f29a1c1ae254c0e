"""The interface between a run and a tracker; your own tracker implements it.

A sink gets a run's points in order, in batches. Whoever drives it (the `sinks` service, or a
simulation) calls its methods one at a time, in a thread, and calls them again from `begin` on if
one of them raises or the process dies. So that each point is written once, `begin` says how far the
tracker is according to its own data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field

from fedstream.runtime.config import Chosen, Positive

PointKind: TypeAlias = Literal["version", "evaluation"]
TrackedValue: TypeAlias = str | int | float | bool


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told about a run at its beginning."""

    id: str
    """unique among runs, and the same when an interrupted run is resumed"""
    name: str
    """``run.name``, which another run may have had before"""
    created: float
    """seconds since 1970"""
    parameters: Mapping[str, TrackedValue] = field(default_factory=dict)
    """the configuration by dotted key, such as ``strategy.alpha``, without secrets; and whether a
    metric is to be low or high, where the task says so: ``goal.rmse`` is ``min``"""


@dataclass(frozen=True)
class TrackedPoint:
    """Numbers that belong to one version of the global model.

    A point of kind ``version`` says how the version was made: ``updates``, ``weight``,
    ``staleness/mean``, ``staleness/max``, ``train/loss``; the newest of a batch also counts the
    run's tasks so far by outcome (``tasks/issued``, ``tasks/applied``, ...). One of kind
    ``evaluation`` has what the evaluator measured: ``test/accuracy``, ``test/loss``, ....
    """

    kind: PointKind
    version: int
    time: float
    """seconds since 1970; in a simulation, virtual seconds after that of its start"""
    values: Mapping[str, float]


@dataclass(frozen=True)
class Reached:
    """The newest version of which a tracker has a point of each kind; -1: none."""

    version: int = -1
    evaluation: int = -1

    def of(self, kind: PointKind) -> int:
        """The newest version of this kind."""
        return self.version if kind == "version" else self.evaluation

    def after(self, points: Sequence[TrackedPoint]) -> Reached:
        """What is reached when these points are written too."""
        newest = {"version": self.version, "evaluation": self.evaluation}
        for point in points:
            newest[point.kind] = max(newest[point.kind], point.version)
        return Reached(**newest)


class Sink(ABC):
    """A tracker of one run. Any exception means: try again later, beginning with :meth:`begin`."""

    @abstractmethod
    def begin(self, run: TrackedRun) -> Reached | None:
        """Open the tracker's record of the run, or continue it.

        Returns how far that record is. None: the tracker can't tell, so the driver's own cursor
        decides; a batch that was being written when the process died is then written twice.
        """

    @abstractmethod
    def write(self, points: Sequence[TrackedPoint]) -> None:
        """Write a batch of points; when it returns, they survive a kill of this process.

        Each kind's versions ascend, across batches too.
        """

    @abstractmethod
    def end(self, summary: Mapping[str, TrackedValue], model: Path | None) -> None:
        """Complete the record: the run is finished.

        ``model``: a safetensors file with the final model, deleted afterwards. May be called again
        if the process dies before the driver has noted it.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the record; the run may be continued by another :meth:`begin`."""


class SinkSettings(Chosen):
    """A sink's table in the configuration; a sink of your own adds its options in a subclass."""

    kind: str = ""
    every_s: Annotated[Positive, Field(le=300)] = 1.0  # at most one batch in this time
    save_model: bool = True  # whether the tracker gets the final model

    def build(self) -> Sink:
        """The sink, which connects to nothing yet. Raises ConfigError if a package is missing."""
        raise NotImplementedError(f"{type(self).__name__} needs a method build(self) -> Sink")

    def placed(self, out: Path) -> Self:
        """The settings for any working directory; ``out``: the run's own folder."""
        del out
        return self
