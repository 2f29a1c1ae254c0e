"""Health: loops that must beat (liveness), checks that must hold (readiness), and their routes.

Liveness says that the process is doing its job, readiness that it can take work now. Neither probes
anything outside the process: an outage of Redis must not get the services restarted.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client import generate_latest as render
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class EventCounts(Collector):
    """A counter with labels, collected at each scrape. Use it from one thread.

    prometheus_client would make five calls and take a lock for each increment.
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


# Without this, every counter has a second series, `_created`, that we don't use.
disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped in its package


@dataclass
class _Loop:
    within_s: float
    last: float


class Health:
    """The heartbeats and checks of a process. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loops: dict[str, _Loop] = {}
        self._checks: dict[str, Callable[[], bool]] = {}

    def expect(self, name: str, within_s: float) -> None:
        """Require a beat of ``name`` at least every ``within_s`` seconds from now on."""
        self._loops[name] = _Loop(within_s, self._clock())

    def beat(self, name: str) -> None:
        """Record that ``name`` is alive. Raises KeyError if it is not expected."""
        self._loops[name].last = self._clock()

    def release(self, name: str) -> None:
        """Remove ``name``, which ended as intended, from liveness and readiness."""
        del self._loops[name]
        self._checks.pop(name, None)

    def overdue(self) -> list[str]:
        """List the overdue loops, and by how much they are late; empty: alive."""
        now = self._clock()
        late = {name: now - loop.last - loop.within_s for name, loop in self._loops.items()}
        return [f"{name}: {by:.1f} s overdue" for name, by in late.items() if by > 0]

    def ready_when(self, name: str, check: Callable[[], bool]) -> None:
        """Be ready only while ``check()`` is true; it must not block."""
        self._checks[name] = check

    def not_ready(self) -> list[str]:
        """List the names of the checks that fail; empty: ready."""
        return [name for name, check in self._checks.items() if not check()]


def routes(health: Health, registry: CollectorRegistry) -> list[web.RouteDef]:
    """``/livez`` and ``/readyz`` (200 or 503 and the reasons as JSON), ``/metrics`` (Prometheus).

    The metrics are those of ``registry`` and of the process (CPU, memory, files).
    """
    process = CollectorRegistry()
    ProcessCollector(registry=process)

    async def livez(_request: web.Request) -> web.Response:
        overdue = health.overdue()
        return web.json_response(
            {"alive": not overdue, "overdue": overdue}, status=503 if overdue else 200
        )

    async def readyz(_request: web.Request) -> web.Response:
        missing = health.not_ready()
        return web.json_response(
            {"ready": not missing, "missing": missing}, status=503 if missing else 200
        )

    async def metrics(_request: web.Request) -> web.Response:
        body = render(registry) + render(process)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return [web.get("/livez", livez), web.get("/readyz", readyz), web.get("/metrics", metrics)]
