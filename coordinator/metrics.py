"""Metrics for Prometheus; names and meanings are in docs/reference/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from fedstream.coordinator.scheduling import HELD_BY
from fedstream.core.records import Tally

Labels = Mapping[tuple[str, ...], float]


class SchedulerMetrics:
    """Metrics of the leading scheduler."""

    def __init__(self, registry: CollectorRegistry, *, max_queue: int) -> None:
        self.triggered = Counter("fedstream_tasks_triggered", "Tasks opened.", registry=registry)
        self.open = 0  # open tasks; exported at each scrape only
        self.limit = 0  # tasks that may be open
        Gauge("fedstream_tasks_open", "Tasks open.", registry=registry).set_function(
            lambda: self.open
        )
        Gauge(
            "fedstream_tasks_limit", "Tasks that may be open now.", registry=registry
        ).set_function(lambda: self.limit)
        self.again = Counter(
            "fedstream_rounds_again",
            "Rounds that continued past their timeout: too few answers.",
            registry=registry,
        )
        self._holding = Gauge(
            "fedstream_held_back",
            "1: fewer tasks are open than the policy wants, for this reason.",
            ["by"],
            registry=registry,
        )
        Gauge(
            "fedstream_queue_limit",
            "Queue entries at which the scheduler stops opening tasks.",
            registry=registry,
        ).set(max_queue)
        self.show_held("")

    def show_held(self, by: str) -> None:
        """Set the metric of the limit that holds tasks back; '': none."""
        for reason in HELD_BY:
            self._holding.labels(reason).set(reason == by)


@dataclass(frozen=True)
class Seen:
    """The result of one look at the run and its Redis."""

    at: float  # seconds since 1970, Redis's clock
    memory: int  # bytes that Redis uses
    memory_limit: int  # bytes that it may use; 0: no limit
    view: Tally | None = None  # None: there is no run
    training: int = 0  # tasks under a trainer's lease
    event_at: float = 0.0  # time of the newest event, seconds since 1970, Redis's clock


class RunMetrics:
    """Run-wide metrics, from a coordinator's last look at the run.

    Every coordinator exports the same values: take the maximum over replicas, never the sum.
    """

    def __init__(self, registry: CollectorRegistry, now: Callable[[], float]) -> None:
        """``now``: seconds since 1970, Redis's clock."""
        self._seen: Seen | None = None
        self._now = now
        registry.register(self)

    def saw(self, seen: Seen) -> None:
        """Store the result of the newest look."""
        self._seen = seen

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for the registry."""
        seen = self._seen
        at = seen.at if seen else 0.0
        yield _gauge("run_looked_timestamp_seconds", "When Redis last answered; 0: not yet.", at)
        if seen is None:
            return
        # Alerts compare the other times with this one, as Prometheus's clock may differ.
        yield _gauge("run_clock_timestamp_seconds", "Redis's clock.", self._now())
        yield _gauge("redis_memory_used_bytes", "Memory that Redis uses.", seen.memory)
        yield _gauge(
            "redis_memory_max_bytes", "Memory that Redis may use; 0: no limit.", seen.memory_limit
        )
        running = seen.view is not None and seen.view.run.state == "running"
        yield _gauge("run_running", "1: the run exists and is not finished.", running)
        if seen.view is not None:
            yield from _of_run(seen.view, seen.training, seen.event_at)


def _of_run(view: Tally, training: int, event_at: float) -> Iterator[Metric]:
    run, head = view.run, view.head
    yield _gauge("run_version", "The newest version.", head.version)
    yield _gauge("run_versions", "The version at which the run ends.", run.versions)
    yield _gauge(
        "run_published_timestamp_seconds", "When the newest version was published.", head.time
    )
    yield _gauge("run_event_timestamp_seconds", "When the newest event was reported.", event_at)
    yield _gauge(
        "run_mean_staleness", "Mean staleness (moving average), in versions.", head.mean_staleness
    )
    yield _counter("run_issued", "Tasks ever triggered.", (), {(): view.issued})
    yield _counter("run_tasks", "Ended tasks.", ("outcome", "reason"), _ends(view))
    yield _counter(
        "run_strays",
        "Answers and triggers that ended no task.",
        ("reason",),
        {(reason,): n for reason, n in view.reasons("stray").items()},
    )
    yield _counter(
        "run_device_evaluations",
        "Evaluations of a version on a device.",
        ("outcome",),
        {(outcome,): n for outcome, n in view.reasons("evaluated").items()},
    )
    yield _labelled("run_open", "Open tasks, by state.", "state", open_by_state(view, training))
    yield _gauge("run_queue", "Entries that the updater has not processed.", view.backlog)
    yield _gauge("run_trainers", "Trainers alive.", view.trainers)
    yield _gauge("run_devices", "Devices of the run.", run.devices)
    yield _gauge(
        "run_failing_devices",
        "Devices whose tasks fail, time after time: about 1,000 at most.",
        len(view.failing),
    )
    barred = len(head.quarantines.by_device)
    yield _gauge("run_quarantined_devices", "Devices in quarantine.", barred)
    yield _gauge("run_kept_versions", "Models kept in Redis.", view.kept)
    updates = view.admitted + head.retained
    blobs = {"models": view.kept_bytes, "updates": updates * run.layout.nbytes}
    yield _labelled("run_blob_bytes", "Models and updates in Redis.", "kind", blobs)
    yield _gauge("run_dead_letters", "Entries waiting for an operator.", view.dead)


def open_by_state(view: Tally, training: int) -> dict[str, int]:
    """Count open tasks by state: answered (in the queue), training, or waiting.

    The counts add up to the number of open tasks: each is capped, as an entry may briefly outlive
    its task.
    """
    left = view.tasks
    answered = min(left, view.admitted)
    training = min(left - answered, training)
    return {"waiting": left - answered - training, "training": training, "answered": answered}


def _ends(view: Tally) -> Labels:
    """Ended tasks by outcome and reason ('': none), zeros included, so that rates are right."""
    ends: dict[tuple[str, ...], float] = {}
    for outcome, count in view.outcomes.items():
        reasons = view.reasons(outcome)
        ends[outcome, ""] = count - sum(reasons.values())
        ends |= {(outcome, reason): n for reason, n in reasons.items()}
    return ends


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(f"fedstream_{name}", about, value=float(value))


def _labelled(name: str, about: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(f"fedstream_{name}", about, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _counter(name: str, about: str, labels: tuple[str, ...], values: Labels) -> Metric:
    family = CounterMetricFamily(f"fedstream_{name}", about, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family
