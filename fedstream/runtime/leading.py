"""Leadership of a role: wait for its lease, and work while holding it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Gauge

from fedstream.broker.errors import FedstreamError, Fenced
from fedstream.broker.lease import Lease
from fedstream.runtime.backoff import pause
from fedstream.runtime.service import Context, repeat

_PAUSE_S = 10.0  # at most, between checks of a lease: a loop must beat within 30 s


async def lead(
    context: Context, lease: Lease, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Wait for the role, then work and renew the lease until stop.

    Releases the lease at the end, so that a successor need not wait for it to expire. A waiting
    process is ready: it could take over. Raises Fenced if the role is taken away.
    """
    pause_s = min(lease.seconds / 4, _PAUSE_S)
    leading = Gauge(
        "fedstream_leading", "1: this process holds the role.", ["role"], registry=context.registry
    ).labels(lease.role)

    async def take() -> bool:
        if not await lease.acquire():
            await pause(context.stop, pause_s)
        return lease.number > 0

    async def hold() -> None:
        # If it is not held, Redis lost it: take it back, unless another process was quicker.
        if not await lease.hold() and not await lease.acquire(at_least=lease.number):
            raise Fenced(f"another {lease.role} took over while Redis was away")
        await pause(context.stop, pause_s)

    await repeat(context, "standby", take)
    if not lease.number:
        return  # stopped while waiting
    context.log.info("leading", epoch=lease.number)
    leading.set(1)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(repeat(context, "lease", hold))
            group.create_task(work())
    finally:
        leading.set(0)
        try:
            await lease.release()
        except FedstreamError as error:
            context.log.warning("lease not released: it will expire", reason=str(error))
