"""Trackers: what a run's versions, measurements and final model are written to while it runs."""

from fedstream.sinks.sink import (
    Reached,
    Sink,
    SinkSettings,
    TrackedPoint,
    TrackedRun,
    TrackedValue,
)

__all__ = ["Reached", "Sink", "SinkSettings", "TrackedPoint", "TrackedRun", "TrackedValue"]
