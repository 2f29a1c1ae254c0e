"""Follows a run from outside: its versions, its events, and what can be counted now."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from statistics import fmean
from typing import TypeVar

from broker.client import Client
from broker.errors import BadMessage
from broker.keys import Keys
from broker.ledger import Ledger, View
from broker.messages import Event, Message, Version
from broker.streams import Entry, Reader

M = TypeVar("M", bound=Message)

_LOOK_S = 0.25  # between two looks at what can be counted
_RATE_OVER_S = 10.0
_EVENTS_SHOWN = 100


class History:
    """What was published and told, in order. Pure: it has no clock and does no I/O."""

    def __init__(self) -> None:
        self.versions: dict[int, Version] = {}
        self.evaluations: dict[int, dict[str, float]] = {}  # version -> metrics
        self.errors: dict[str, Event] = {}  # the first of each kind that a user's task raised
        self.failed = 0  # tasks that raised or killed their trainers, in a row
        self.refused = 0  # updates in a row
        self.events: deque[Event] = deque(maxlen=_EVENTS_SHOWN)
        self._times: deque[float] = deque(maxlen=1024)  # of the newest versions

    def publish(self, version: Version) -> None:
        """A version; one that was published again keeps what is known of its making."""
        if version.updates or version.version not in self.versions:
            self.versions[version.version] = version
            self._times.append(version.time)

    def tell(self, event: Event) -> None:
        """An event."""
        if event.what == "evaluation" and event.version is not None and event.metrics:
            self.evaluations[event.version] = event.metrics
        elif event.what == "error":
            self.failed += event.device is not None  # else it is the evaluator's
            self.errors.setdefault(event.reason or "", event)
        elif event.outcome in ("applied", "buffered"):
            self.failed = self.refused = 0
        elif event.outcome == "dead":
            self.failed += 1
        elif event.outcome == "refused":
            self.refused += 1
        self.events.append(event)

    @property
    def newest(self) -> int:
        """The newest version; -1 before the first."""
        return max(self.versions, default=-1)

    @property
    def measured(self) -> tuple[int, dict[str, float]] | None:
        """The newest version that was measured, and its metrics."""
        version = max(self.evaluations, default=None)
        return None if version is None else (version, self.evaluations[version])

    @property
    def best_accuracy(self) -> tuple[int, float] | None:
        """The best accuracy and its first version."""
        known = [(m["accuracy"], -v) for v, m in self.evaluations.items() if "accuracy" in m]
        if not known:
            return None
        accuracy, version = max(known)
        return -version, accuracy

    def staleness(self) -> Counter[int]:
        """Updates by the number of versions that they came late."""
        return Counter(u.staleness for v in self.versions.values() for u in v.updates)

    @property
    def mean_staleness(self) -> float:
        """Over all updates; 0 if there are none."""
        late = self.staleness()
        return sum(d * n for d, n in late.items()) / late.total() if late else 0.0

    def updates_by_device(self) -> Counter[int]:
        """Updates by the device that made them."""
        return Counter(u.device for v in self.versions.values() for u in v.updates)

    def recent_staleness(self, versions: int = 100) -> float:
        """The mean over the newest versions."""
        new = list(self.versions.values())[-versions:]
        return fmean([u.staleness for v in new for u in v.updates] or [0.0])

    def rate(self, now: float) -> float:
        """Versions per second, lately; it sinks while nothing comes."""
        times = [t for t in self._times if t > now - _RATE_OVER_S] or list(self._times)[-5:]
        if len(times) < 2:
            return 0.0
        return (len(times) - 1) / max(now - times[0], times[-1] - times[0], 1e-6)


class Observer:
    """Reads a run's streams from their beginning, and its view, into ``history`` and ``view``."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.ledger = Ledger(client, keys, "observer")
        self.history = History()
        self.view: View | None = None  # until the run is there
        self.keys = keys
        self._reader = Reader(client, {keys.models: "0", keys.events: "0"})
        self._looked = 0.0

    async def step(self, *, block_ms: int = 250) -> bool:
        """Reads what is new, and looks if the last look is a while ago: whether there was news.

        The events are read before the view: whatever the view shows as done was told. Raises NoRun
        before the run is there.
        """
        found = await self._reader.read(count=1000, block_ms=block_ms)
        for version in _messages(found.get(self.keys.models, ()), Version):
            self.history.publish(version)
        for event in _messages(found.get(self.keys.events, ()), Event):
            self.history.tell(event)
        if time.monotonic() - self._looked >= _LOOK_S:
            await self.look()
        return bool(found)

    async def look(self) -> View:
        """Everything countable now. Raises NoRun before the run is there."""
        self.view = await self.ledger.look()
        self._looked = time.monotonic()
        return self.view

    async def catch_up(self) -> None:
        """Reads until there is nothing new."""
        while await self.step(block_ms=0):
            pass


def _messages(entries: Iterable[Entry], kind: type[M]) -> Iterator[M]:
    """What can be read of the entries: a foreign one is nothing to fail about."""
    for entry in entries:
        with suppress(BadMessage):
            yield kind.decode(entry.data)
