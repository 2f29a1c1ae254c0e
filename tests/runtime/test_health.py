"""Health: what is overdue, what is not ready, and the metrics."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Counter, generate_latest
from pydantic import ValidationError

from fedstream.runtime.health import EventCounts, Health, routes
from fedstream.runtime.http import HttpSettings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_loop_is_overdue_until_it_beats_again() -> None:
    clock = Clock()
    health = Health(clock)
    health.expect("claim", 2.0)
    health.expect("renew", 10.0)
    clock.now += 2.0
    assert health.overdue() == []
    clock.now += 3.5
    assert health.overdue() == ["claim: 3.5 s overdue"]
    health.beat("claim")
    assert health.overdue() == []


def test_released_loop_need_not_beat() -> None:
    clock = Clock()
    health = Health(clock)
    health.expect("claim", 2.0)
    health.release("claim")
    clock.now += 60.0
    assert health.overdue() == []


def test_ready_while_every_check_passes() -> None:
    health = Health()
    connected = [False]
    assert health.not_ready() == []
    health.ready_when("redis", lambda: connected[0])
    health.ready_when("model", lambda: True)
    assert health.not_ready() == ["redis"]
    connected[0] = True
    assert health.not_ready() == []


@pytest.mark.parametrize("port", [-1, 65536, "80"])
def test_port_must_be_in_range(port: object) -> None:
    with pytest.raises(ValidationError):
        HttpSettings.model_validate({"port": port})


async def test_metrics_include_the_registry_and_the_process() -> None:
    registry, app = CollectorRegistry(), web.Application()
    app.add_routes(routes(Health(), registry))
    Counter("applied", "Updates applied.", registry=registry).inc(3)
    async with TestClient(TestServer(app)) as client, client.get("/metrics") as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=")
        lines = (await reply.text()).splitlines()
    assert "applied_total 3.0" in lines
    assert any(line.startswith("process_resident_memory_bytes ") for line in lines)


# counts by labels


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
