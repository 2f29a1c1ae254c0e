"""What the updater counts and times by itself, as Prometheus sees it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from fedstream.updater.metrics import UpdaterMetrics


def test_parts_of_the_work_are_counted_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that fails; those that never happened are not shown."""
    clock = iter([1.0, 1.5, 2.0, 4.0, 10.0, 11.0])
    monkeypatch.setattr("fedstream.updater.metrics.time.perf_counter", lambda: next(clock))
    registry = CollectorRegistry()
    metrics = UpdaterMetrics(registry)
    with metrics.timed("mix"):
        pass
    with pytest.raises(ValueError, match="no room"), metrics.timed("mix"):
        raise ValueError("no room")
    with metrics.timed("journal"):
        pass

    def shown(what: str, part: str) -> float | None:
        return registry.get_sample_value(f"fedstream_updater_seconds_{what}", {"part": part})

    assert (shown("count", "mix"), shown("sum", "mix")) == (2, 2.5)
    assert (shown("count", "journal"), shown("sum", "journal")) == (1, 1.0)
    assert shown("count", "digest") is None
