"""A trainer's metrics: ends of its tasks, and durations of their parts."""

from __future__ import annotations

import time
from bisect import bisect_left
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from fedstream.runtime.health import EventCounts

if TYPE_CHECKING:
    from collections.abc import Iterator

PartOfTask = Literal["download", "training", "upload"]
WhyLost = Literal["no room", "outlier", "in doubt", "unusable"]  # of error feedback

# Histogram buckets: from a small model's download to an hour of training.
_SECONDS = (
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1,
    2,
    5,
    10,
    30,
    60,
    180,
    600,
    1800,
    3600,
)


class TrainerMetrics:
    """The metrics of one trainer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = EventCounts(
            "fedstream_trainer_tasks",
            "Tasks, by what became of them here.",
            ["end"],
            registry=registry,
        )
        self._seconds: dict[str, _Durations] = {}
        registry.register(_Seconds(self._seconds))

        self.from_zero = Counter(
            "fedstream_trainer_feedback_from_zero",
            "Updates sent without what their device's last one lost: its first, or it was dropped.",
            registry=registry,
        )

        self._feedback_lost = Counter(
            "fedstream_trainer_feedback_lost",
            "What devices' updates left unsent, and was dropped, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in get_args(WhyLost):
            self._feedback_lost.labels(reason)

    def lost_feedback(self, reason: WhyLost) -> None:
        """Count lost error feedback of a device."""
        self._feedback_lost.labels(reason).inc()

    def ended(self, end: str) -> None:
        """Count a task by its end at this trainer."""
        self._ended.add(end)

    def took(self, seconds: float) -> None:
        """Record the duration of a whole task."""
        self._of("whole").add(seconds)

    def timed(
        self, part: Literal["download", "training", "upload"]
    ) -> AbstractContextManager[None]:
        """Record the duration of the block as a part of a task."""
        return self._of(part)

    def _of(self, part: PartOfTask | Literal["whole"]) -> _Durations:
        try:
            return self._seconds[part]
        except KeyError:
            return self._seconds.setdefault(part, _Durations())


class _Durations(AbstractContextManager[None]):
    """A histogram of the durations of one part.

    A prometheus_client Histogram would make twenty calls for each of a task's four durations.
    """

    __slots__ = ("began", "counts", "sum")

    def __init__(self) -> None:
        self.began = self.sum = 0.0
        self.counts = [0] * (len(_SECONDS) + 1)  # by bucket; the last one is unbounded

    def __enter__(self) -> None:
        self.began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.add(time.perf_counter() - self.began)

    def add(self, seconds: float) -> None:
        self.sum += seconds
        self.counts[bisect_left(_SECONDS, seconds)] += 1


class _Seconds(Collector):
    """Collects the parts at each scrape."""

    def __init__(self, parts: dict[str, _Durations]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "fedstream_task_seconds", "How long a task took.", labels=["part"]
        )
        bounds = [*map(floatToGoString, _SECONDS), "+Inf"]
        for name, part in tuple(self._parts.items()):  # a thread may add a part
            family.add_metric(
                [name], [*zip(bounds, accumulate(part.counts), strict=True)], part.sum
            )
        yield family
