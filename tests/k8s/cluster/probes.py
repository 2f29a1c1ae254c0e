"""Probes, asked as the kubelet asks them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

from tests.k8s.cluster.manifests import Unsupported
from tests.k8s.cluster.network import client
from tests.k8s.cluster.pod import CannotStart, Container, Spec

_HANDLERS = ("httpGet", "tcpSocket", "exec")
_FAILED = (aiohttp.ClientError, OSError, TimeoutError, CannotStart)


@dataclass(frozen=True)
class Probe:
    """One probe of a container, with Kubernetes' defaults."""

    container: Container
    address: str
    handler: str
    how: Spec
    initial_delay_s: float
    period_s: float
    timeout_s: float
    failures: int
    successes: int

    @classmethod
    def of(cls, container: Container, address: str, kind: str) -> Self | None:
        """The container's probe of a kind (``startupProbe`` and so on); None if it has none."""
        spec = container.spec.get(kind)
        if spec is None:
            return None
        handler = next((name for name in _HANDLERS if name in spec), None)
        if handler is None or spec[handler].get("scheme", "HTTP") != "HTTP":
            raise Unsupported(f"{container.name}: {kind} {spec}")
        return cls(
            container, address, handler, spec[handler],
            initial_delay_s=spec.get("initialDelaySeconds", 0),
            period_s=spec.get("periodSeconds", 10), timeout_s=spec.get("timeoutSeconds", 1),
            failures=spec.get("failureThreshold", 3), successes=spec.get("successThreshold", 1),
        )  # fmt: skip

    async def holds(self) -> bool:
        """Asks once."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await ask(self.container, self.address, self.handler, self.how)
        except _FAILED:
            return False

    async def asked(self, tell: Callable[[bool], bool], peek_s: float | None = None) -> None:
        """Asks; tells each time that a threshold is reached, until whoever listens has enough.

        With ``peek_s`` good news is not waited for: after a failure it is asked so often, and what
        counts is the first that holds, as if its time had come just then.
        """
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self.initial_delay_s)
        last, times = False, 0
        while True:
            next_at = loop.time() + self.period_s
            now = await self.holds()
            while True:
                times = times + 1 if now == last else 1
                last = now
                if times >= (self.successes if now else self.failures) and tell(now):
                    return
                if now or peek_s is None or not await self._comes_to_hold(peek_s, next_at):
                    break
                now, next_at = True, loop.time() + self.period_s
            await asyncio.sleep(max(0.0, next_at - loop.time()))

    async def _comes_to_hold(self, peek_s: float, until: float) -> bool:
        loop = asyncio.get_running_loop()
        while loop.time() + peek_s < until:
            await asyncio.sleep(peek_s)
            if await self.holds():
                return True
        return False


async def ask(container: Container, address: str, handler: str, how: Any) -> bool:
    """One question, or one hook. Raises what goes wrong on the way."""
    if handler == "exec":
        running = await container.execute(how["command"])
        try:
            return await running.process.wait() == 0
        finally:
            running.signal(signal.SIGKILL)  # what it left behind
    port = container.port(how["port"])
    if port is None:
        raise CannotStart(f"{container.name} has no port {how['port']!r}")
    host = how.get("host") or address
    if handler == "tcpSocket":
        _, writer = await asyncio.open_connection(host, port)
        writer.close()
        return True
    headers = {one["name"]: one["value"] for one in how.get("httpHeaders", ())}
    url = f"http://{host}:{port}{how.get('path', '/')}"
    async with (
        client() as session,
        session.get(url, headers=headers, allow_redirects=False) as answer,
    ):
        return 200 <= answer.status < 400
