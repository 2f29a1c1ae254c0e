"""How long a trainer's tasks took, as Prometheus sees it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from fedstream.trainer.metrics import TrainerMetrics


def test_parts_of_a_task_are_counted_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails; those that never happened are not shown."""
    clock = iter([1.0, 1.5, 2.0, 6.0])
    monkeypatch.setattr("fedstream.trainer.metrics.time.perf_counter", lambda: next(clock))
    registry = CollectorRegistry()
    metrics = TrainerMetrics(registry)
    with metrics.timed("upload"):
        pass
    with pytest.raises(ValueError, match="no room"), metrics.timed("upload"):
        raise ValueError("no room")
    metrics.took(4000.0)

    def shown(what: str, part: str, **bound: str) -> float | None:
        name = f"fedstream_task_seconds_{what}"
        return registry.get_sample_value(name, {"part": part, **bound})

    assert (shown("count", "upload"), shown("sum", "upload")) == (2, 4.5)
    below = [shown("bucket", "upload", le=le) for le in ("0.2", "0.5", "2.0", "5.0", "+Inf")]
    assert below == [0, 1, 1, 2, 2]  # a bound belongs to what is below it
    assert [shown("bucket", "whole", le=le) for le in ("3600.0", "+Inf")] == [0, 1]
    assert shown("sum", "whole") == 4000
    assert shown("count", "training") is None
