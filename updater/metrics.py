"""The updater's Prometheus metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from fedstream.journal.progress import OUT_OF_RANGE


class UpdaterMetrics:
    """Counters and timers; names and meanings are in docs/reference/metrics.md."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.updates = Counter(
            "fedstream_updates", "Updates, by outcome.", ["outcome", "reason"], registry=registry
        )
        for outcome in ("applied", "buffered", "refused"):
            self.updates.labels(outcome, "")  # at 0, so that a rate includes the first
        self.staleness = Histogram(
            "fedstream_staleness",
            "How many versions late an update arrived.",
            registry=registry,
            buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128),
        )
        self.weight = Histogram(
            "fedstream_weight",
            "Weight that an update was given.",
            registry=registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0),
        )
        self.version = Gauge("fedstream_version", "The newest version.", registry=registry)
        self.sums = Counter(
            "fedstream_sums",
            "Private batches whose sum was opened, or dropped for another outcome.",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("opened", OUT_OF_RANGE):
            self.sums.labels(outcome)
        self.dropped = Counter(
            "fedstream_rounds_dropped",
            "Rounds dropped at their timeout: too few answers.",
            registry=registry,
        )
        self.repaired = Counter(
            "fedstream_models_repaired",
            "Newest models that were missing from Redis and written again.",
            registry=registry,
        )
        self.journal = Gauge(
            "fedstream_journal_bytes",
            "Bytes written to the journal by this process.",
            registry=registry,
        )
        self.unsynced = Gauge(
            "fedstream_journal_unsynced_bytes",
            "Bytes of the journal that are not on disk yet.",
            registry=registry,
        )
        self.sync = Histogram(
            "fedstream_journal_sync_seconds",
            "How long the disk took to sync.",
            registry=registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )
        self._seconds: dict[str, _Part] = {}
        registry.register(_Seconds(self._seconds))

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Time the block as a part of the updater's work. A part must not contain itself."""
        found = self._seconds.get(part)
        if found is None:
            found = self._seconds[part] = _Part()
        return found


class _Part(AbstractContextManager[None]):
    """The number and total duration of one part of the work.

    Each update times several parts, and a prometheus_client Summary takes twenty calls for each.
    """

    __slots__ = ("began", "count", "seconds")

    def __init__(self) -> None:
        self.began = self.seconds = 0.0
        self.count = 0

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self.began
        self.count += 1


class _Seconds(Collector):
    """Collects the parts at each scrape."""

    def __init__(self, parts: dict[str, _Part]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        family = SummaryMetricFamily(
            "fedstream_updater_seconds", "Where the time goes.", labels=["part"]
        )
        for name, part in tuple(self._parts.items()):  # a thread may add a part
            family.add_metric([name], part.count, part.seconds)
        yield family
