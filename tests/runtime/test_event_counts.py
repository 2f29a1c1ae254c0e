"""Counts by labels, as Prometheus sees them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from fedstream.runtime.health import EventCounts


def test_counts_are_shown_by_their_labels() -> None:
    registry = CollectorRegistry()
    answers = EventCounts(
        "answers", "What became of them.", ["verdict", "reason"], registry=registry
    )
    for labels in (("admitted", ""), ("refused", "size"), ("admitted", ""), ("refused", "digest")):
        answers.add(*labels)
    assert generate_latest(registry).decode().splitlines() == [
        "# HELP answers_total What became of them.",
        "# TYPE answers_total counter",
        'answers_total{reason="",verdict="admitted"} 2.0',
        'answers_total{reason="size",verdict="refused"} 1.0',
        'answers_total{reason="digest",verdict="refused"} 1.0',
    ]
