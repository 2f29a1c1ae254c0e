"""Trackers, to which a run's versions, measurements and final model are written."""

from fedstream.sinks.sink import (
    Reached,
    Sink,
    SinkSettings,
    TrackedPoint,
    TrackedRun,
    TrackedValue,
)

__all__ = ["Reached", "Sink", "SinkSettings", "TrackedPoint", "TrackedRun", "TrackedValue"]
