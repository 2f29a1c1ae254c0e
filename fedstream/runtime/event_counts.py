"""Counters of what happens for every task, cheaper than those of prometheus_client."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from prometheus_client import CollectorRegistry


class EventCounts(Collector):
    """Counts by labels, shown at each scrape. To be used by one thread.

    prometheus_client makes five calls and takes a lock for each that is added.
    """

    def __init__(
        self, name: str, about: str, labels: Sequence[str], *, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._about = about
        self._labels = labels
        self._counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
        registry.register(self)

    def add(self, *labels: str) -> None:
        """Count one more."""
        self._counts[labels] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the counter, for the registry."""
        family = CounterMetricFamily(self._name, self._about, labels=self._labels)
        for labels, count in tuple(self._counts.items()):  # a scrape may come from another thread
            family.add_metric(labels, count)
        yield family
