"""A trainer's metrics: what became of its tasks, and how long their parts took."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Histogram

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

# Histogram buckets: from a small model's download to an hour of training.
_SECONDS = (
    0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 30, 60, 180, 600, 1800, 3600,
)  # fmt: skip


class TrainerMetrics:
    """The metrics of one trainer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._ended = Counter(
            "fedstream_trainer_tasks", "Tasks, by what became of them here.", ["end"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "fedstream_task_seconds", "How long a task took.", ["part"], registry=registry,
            buckets=_SECONDS,
        )  # fmt: skip

        self.from_zero = Counter(
            "fedstream_trainer_feedback_from_zero",
            "Updates sent without what their device's last one lost: its first, or it was dropped.",
            registry=registry,
        )

    def ended(self, end: str) -> None:
        """Count a task by what became of it here."""
        self._ended.labels(end).inc()

    def took(self, seconds: float) -> None:
        """Record how long a whole task took."""
        self._seconds.labels("whole").observe(seconds)

    def timed(
        self, part: Literal["download", "training", "upload"]
    ) -> AbstractContextManager[object]:
        """Record how long a part of a task takes: the block inside."""
        return self._seconds.labels(part).time()
