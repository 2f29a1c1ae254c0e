"""Health: loops that must beat (liveness), checks that must hold (readiness), and their routes.

Liveness says that the process does what it is for, readiness that it can take work now. Neither
looks at anything outside the process: a Redis that is down must not get the services restarted.
"""

from __future__ import annotations

import time
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

if TYPE_CHECKING:
    from collections.abc import Callable

# A second series for every counter, which nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]  # its package has no type for it


@dataclass
class _Loop:
    within_s: float
    last: float


class Health:
    """What a process promises, and whether it keeps it. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._loops: dict[str, _Loop] = {}
        self._checks: dict[str, Callable[[], bool]] = {}

    def expect(self, name: str, within_s: float) -> None:
        """From now on ``name`` must beat at least every ``within_s`` seconds."""
        self._loops[name] = _Loop(within_s, self._clock())

    def beat(self, name: str) -> None:
        """``name`` is alive. KeyError if it is not expected."""
        self._loops[name].last = self._clock()

    def release(self, name: str) -> None:
        """``name`` has ended as it should: it need not beat any more, nor be ready."""
        del self._loops[name]
        self._checks.pop(name, None)

    def overdue(self) -> list[str]:
        """The loops that should have beaten by now, and by how much; empty: alive."""
        now = self._clock()
        late = {name: now - loop.last - loop.within_s for name, loop in self._loops.items()}
        return [f"{name}: {by:.1f} s overdue" for name, by in late.items() if by > 0]

    def ready_when(self, name: str, check: Callable[[], bool]) -> None:
        """Work can be taken only while ``check()`` is true; it must not wait for anything."""
        self._checks[name] = check

    def not_ready(self) -> list[str]:
        """The names of the checks that do not hold; empty: ready."""
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
