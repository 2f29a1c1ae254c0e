"""`fedstream track`: writes a run that is over to trackers, from its folder alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from fedstream.core.errors import ConfigError, FedstreamError
from fedstream.history import report
from fedstream.history.record import RunRecord
from fedstream.runtime.config import Option, load
from fedstream.runtime.plugins import absolute
from fedstream.settings.config import Settings
from fedstream.settings.recording import CONFIG
from fedstream.sinks.service import Named, TrackerFailed
from fedstream.sinks.settings import flat, named
from fedstream.sinks.sink import (
    PointKind,
    Sink,
    TrackedPoint,
    TrackedRun,
    made_of,
    measured_of,
    told,
)
from fedstream.trainer.goals import is_on_devices, is_over_devices

_BATCH = 1000  # points


@dataclass(frozen=True)
class Tracked:
    """The numbers of points that were written to a tracker."""

    sink: str
    versions: int
    measurements: int
    complete: bool
    """with its summary and its model, because the run is finished"""


def sinks_of(run: RunRecord, kinds: Sequence[str], *, trusted: bool) -> list[Named]:
    """The trackers of these kinds, with the run's own options; default: all trackers of the run.

    ``trusted``: load programs that the run's file names. Raises ConfigError, also if there is no
    tracker.
    """
    file = run.path / CONFIG
    if kinds:
        there = run.settings.get("sinks", []) if run.is_configured else []
        known = [one for one in there if isinstance(one, dict)]
        wanted = [
            table
            for kind in dict.fromkeys(map(absolute, kinds))
            for table in [one for one in known if one.get("kind") == kind] or [{"kind": kind}]
        ]
        settings = load(Settings, path=None, environ={}, options=[Option("--to", "sinks", wanted)])
    else:
        settings = load(
            Settings,
            path=file if run.is_configured else None,
            environ={},
            trusted=trusted,
            keys=("sinks",),
        )
    if not settings.sinks:
        raise ConfigError(f"{run.path}: the run had no tracker: name one, as in --to tensorboard")
    beside = run.path.parent if run.path == run.journal else run.path
    return named([sink.placed(beside.absolute()) for sink in settings.sinks])


def track(run: RunRecord, one: Named) -> Tracked:
    """Write the part of a run that the tracker lacks. Raises FedstreamError."""
    state = run.stands()[0]
    if state == "running":
        raise FedstreamError(f"{run.path}: the run goes on: track it when it is over")
    sink = one.make()
    with _open(sink, one.name):
        reached = sink.begin(_about(run))
        if reached is None:
            raise ConfigError(
                f"{one.name} can't tell what it has of a run, so everything might be written twice"
            )
        points = [point for point in _points(run) if point.version > reached.of(point.kind)]
        for at in range(0, len(points), _BATCH):
            sink.write(points[at : at + _BATCH])
        if state == "finished":
            model = run.path / report.MODEL
            with_model = one.settings.save_model and model.is_file()
            sink.end(told(run.summary), model if with_model else None)
    return Tracked(
        one.name,
        _count(points, "version"),
        _count(points, "evaluation") + _count(points, "devices"),
        state == "finished",
    )


@contextmanager
def _open(sink: Sink, name: str) -> Iterator[None]:
    """Close the tracker after the block; turn the tracker's errors into TrackerFailed."""
    try:
        yield
        sink.close()
    except FedstreamError:
        raise
    except Exception as error:
        with suppress(Exception):  # already failing: that is reported
            sink.close()
        raise TrackerFailed(name, error) from error


def _about(run: RunRecord) -> TrackedRun:
    head = run.head
    about = flat(run.settings | {"goal": head.goal or {}})
    return TrackedRun(head.lineage, run.name, _began(run), about)


def _began(run: RunRecord) -> float:
    """When the run began, in seconds since 1970, also for a simulation, whose clock begins at 0."""
    return run.head.time if run.is_simulated else run.head.created


def _points(run: RunRecord) -> Iterator[TrackedPoint]:
    """Yield the points that sinks write during a run, without the counts of tasks."""
    seen, offset = run.seen(), _began(run) if run.is_simulated else 0.0
    for number, made in sorted(seen.versions.items()):
        time = offset + made.time
        if made.updates or number == 0:  # otherwise adopted from Redis, with nothing known
            yield TrackedPoint("version", number, time, made_of(made.updates))
        if metrics := seen.evaluations.get(number):
            on_devices = {}
            if any(map(is_on_devices, metrics)):  # else the evaluator measured the devices
                on_devices = {
                    name: value
                    for name, value in metrics.items()
                    if is_on_devices(name) or is_over_devices(name)
                }
            central = {name: one for name, one in metrics.items() if name not in on_devices}
            if central:
                values = measured_of("evaluation", central)
                yield TrackedPoint("evaluation", number, time, values)
            if on_devices:
                yield TrackedPoint("devices", number, time, measured_of("devices", on_devices))


def _count(points: Sequence[TrackedPoint], kind: PointKind) -> int:
    return sum(point.kind == kind for point in points)
