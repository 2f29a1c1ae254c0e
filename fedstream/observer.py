"""Follows a run from outside: its versions, its events, and what can be counted now."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice
from math import inf
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from fedstream.broker.client import Client
from fedstream.broker.errors import BadMessage
from fedstream.broker.keys import POOL, Keys
from fedstream.broker.ledger import Ledger
from fedstream.broker.messages import Event, Message, Version
from fedstream.broker.records import View
from fedstream.broker.streams import Entry, Reader

M = TypeVar("M", bound=Message)

_LOOK_S = 0.25  # between two looks at what can be counted
_RATE_OVER_S = 10.0
_EVENTS_SHOWN = 100
_KINDS_KEPT = 20  # of errors, of each site: it says itself what kind they are


class Update(NamedTuple):
    """What is kept of an update: little, because a run may have millions."""

    task: str
    device: int
    staleness: int
    weight: float
    loss: float | None


class Made(NamedTuple):
    """What is kept of a version."""

    time: float
    updates: tuple[Update, ...]


class History:
    """What was published and told, in order. Pure: it has no clock and does no I/O.

    ``most``: so many versions are remembered, the newest, and as many measurements; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self.versions: dict[int, Made] = {}
        self.evaluations: dict[int, dict[str, float]] = {}  # version -> metrics
        self.measured: tuple[int, dict[str, float]] | None = None  # the last of them
        self.best_accuracy: tuple[int, float] | None = None  # and its first version
        self.tried: int | None = None  # the version last measured, also where that failed
        self.unmeasured: Event | None = None  # where it failed
        # The first of each kind that a user's task raised, by whose trainer said it and where.
        self.errors: dict[tuple[str, str], Event] = {}
        # In a row, of the pool's: what a site says or does wrong must not end the operator's run.
        self.failed = 0  # tasks that raised or killed their trainers
        self.refused = 0  # updates
        self.events: deque[Event] = deque(maxlen=_EVENTS_SHOWN)
        self._times: deque[float] = deque(maxlen=1024)  # of the newest versions
        self._most = most

    def publish(self, version: Version) -> None:
        """A version; one that was published again keeps what is known of its making."""
        if version.updates or version.version not in self.versions:
            self.versions[version.version] = Made(
                version.time,
                tuple(
                    Update(u.task, u.device, u.staleness, u.weight, u.loss) for u in version.updates
                ),
            )
            self._forget(self.versions)
            self._times.append(version.time)

    def recall(self, number: int, made: Made) -> None:
        """A version of before, as the journal has it."""
        self.versions[number] = made
        self._forget(self.versions)

    def tell(self, event: Event) -> None:
        """An event."""
        site = event.site or POOL
        ours = site == POOL
        if event.what == "evaluation" and event.version is not None:
            self.measure(event.version, event.metrics or {})
        elif event.what == "error":
            if event.device is None:  # the evaluator's
                self.tried, self.unmeasured = event.version, event
            else:
                self.failed += ours
            self._raised(site, event)
        elif event.outcome in ("applied", "buffered"):
            self.failed = self.refused = 0
        elif event.outcome == "dead":
            self.failed += ours
        elif event.outcome == "refused":
            self.refused += ours
        self.events.append(event)

    def _raised(self, site: str, event: Event) -> None:
        if sum(known == site for known, _ in self.errors) < _KINDS_KEPT:
            self.errors.setdefault((site, event.reason or ""), event)

    def measure(self, version: int, metrics: dict[str, float]) -> None:
        """A version was measured, or there was nothing to measure it by."""
        self.tried, self.unmeasured = version, None
        if not metrics:  # the task has none to offer
            return
        self.evaluations[version] = metrics
        self._forget(self.evaluations)
        self.measured = version, metrics
        if metrics.get("accuracy", -inf) > (self.best_accuracy[1] if self.best_accuracy else -inf):
            self.best_accuracy = version, metrics["accuracy"]

    def _forget(self, known: dict[int, Any]) -> None:
        if self._most is not None and len(known) > self._most:
            del known[next(iter(known))]

    def forget_failures(self) -> None:
        """What failed so far does not count any more: the run goes on from here."""
        self.failed = self.refused = 0
        self.errors.clear()

    @property
    def newest(self) -> int:
        """The newest version; -1 before the first."""
        return max(self.versions, default=-1)

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
        new = islice(reversed(self.versions.values()), versions)
        return fmean([u.staleness for v in new for u in v.updates] or [0.0])

    def rate(self, now: float) -> float:
        """Versions per second, lately; it sinks while nothing comes."""
        times = [t for t in self._times if t > now - _RATE_OVER_S] or list(self._times)[-5:]
        if len(times) < 2:
            return 0.0
        return (len(times) - 1) / max(now - times[0], times[-1] - times[0], 1e-6)

    @property
    def usual_s(self) -> float:
        """Seconds between two versions, lately; 0 before the second."""
        times = self._times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    def idle_s(self, now: float) -> float:
        """Seconds since the newest version, by the clock that it was published by."""
        return now - self._times[-1] if self._times else 0.0


class Observer:
    """Reads a run's streams from their beginning, and its view, into ``history`` and ``view``."""

    def __init__(self, client: Client, keys: Keys, *, most: int | None = None) -> None:
        self.ledger = Ledger(client, keys, "observer")
        self.history = History(most)
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
        events = list(_messages(found.get(self.keys.events, ()), Event))
        # What is shown of the run must not be older than what was measured of it.
        seen = self.view.head.version if self.view else -1
        if any(event.what == "evaluation" and (event.version or 0) > seen for event in events):
            await self.look()
        for event in events:
            if event.what != "evaluation" or self._is_known(event):
                self.history.tell(event)
        if time.monotonic() - self._looked >= _LOOK_S:
            await self.look()
        return bool(found)

    def _is_known(self, evaluation: Event) -> bool:
        """Whether an evaluation can be the evaluator's: of a version that there is, of no device.

        The evaluator alone writes them: a trainer's rights don't reach so far (`broker/rights.py`),
        and a coordinator passes nothing but a trainer's errors on. This is for what may stand in
        the stream of a Redis without users.
        """
        newest = max(self.history.newest, self.view.head.version if self.view else -1)
        version = evaluation.version
        return evaluation.device is None and version is not None and version <= newest

    async def look(self) -> View:
        """Everything countable now. Raises NoRun before the run is there."""
        self.view = await self.ledger.look(inboxes=True)
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
