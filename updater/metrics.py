"""The updater's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary


class UpdaterMetrics:
    """What the process counts and times; names and meanings are in docs/reference/metrics.md."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.updates = Counter(
            "fedstream_updates", "Updates, by outcome.", ["outcome", "reason"], registry=registry
        )
        for outcome in ("applied", "buffered", "refused"):
            self.updates.labels(outcome, "")  # from the start, so that a rate sees the first one
        self.staleness = Histogram(
            "fedstream_staleness", "How many versions late an update arrived.", registry=registry,
            buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128),
        )  # fmt: skip
        self.weight = Histogram(
            "fedstream_weight", "Weight that an update was given.", registry=registry,
            buckets=(0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0),
        )  # fmt: skip
        self.version = Gauge("fedstream_version", "The newest version.", registry=registry)
        self.repaired = Counter(
            "fedstream_models_repaired",
                "Newest models that were missing from Redis and written again.",
            registry=registry,
        )  # fmt: skip
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
            "fedstream_journal_sync_seconds", "How long the disk took to sync.", registry=registry,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )  # fmt: skip
        self.seconds = Summary(
            "fedstream_updater_seconds", "Where the time goes.", ["part"], registry=registry
        )
