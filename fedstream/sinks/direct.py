"""Sinks of a run that this process makes itself, as a simulation does: without a service."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fedstream.broker.messages import Event, Version
from fedstream.sinks.feed import Feed, told
from fedstream.sinks.service import Named
from fedstream.sinks.sink import Reached, Sink, TrackedPoint, TrackedRun


class DirectSinks:
    """Writes a run's points to its trackers in batches; one that fails is said, and left out.

    The run waits meanwhile, so a slow tracker makes a simulation slow.
    """

    def __init__(self, sinks: Sequence[Named], run: TrackedRun, say: Callable[[str], None]) -> None:
        """Begin. Raises ConfigError if a tracker's package is missing."""
        self._say = say
        self._sinks: dict[str, Sink] = {named.name: named.make() for named in sinks}
        self._models = {named.name for named in sinks if named.settings.save_model}
        self._every_s = min((named.settings.every_s for named in sinks), default=0.0)
        self._feed = Feed(Reached())
        self._points: list[TrackedPoint] = []
        self._wrote = time.monotonic()
        self._each(lambda _, sink: sink.begin(run))

    def publish(self, version: Version, measured: Event) -> None:
        """Add a version and its measurement."""
        if not self._sinks:
            return
        self._points += self._feed.points([version], [measured])
        if time.monotonic() - self._wrote >= self._every_s:
            self._write()

    def end(self, summary: Mapping[str, object], model: Path, *, finished: bool) -> None:
        """Write the rest, and complete the records if the run is ``finished``."""
        self._write()
        plain = told(summary)
        if finished:
            self._each(lambda name, sink: sink.end(plain, model if name in self._models else None))
        self._each(lambda _, sink: sink.close())

    def _write(self) -> None:
        points, self._points = self._points, []
        self._each(lambda _, sink: sink.write(points))
        self._wrote = time.monotonic()

    def _each(self, call: Callable[[str, Sink], object]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(name, sink)
            except Exception as error:  # whatever a tracker raises: the run goes on
                del self._sinks[name]
                with suppress(Exception):  # already failing: that is said
                    sink.close()
                self._say(f"{name} failed, and is left out from here on: {error}")
