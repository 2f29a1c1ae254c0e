"""Roles that one process holds at a time: waiting for the lease, and working while it lasts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Gauge

from fedstream.broker.errors import FedstreamError, Fenced
from fedstream.broker.lease import Lease
from fedstream.runtime.backoff import pause
from fedstream.runtime.service import Context, repeat

_PAUSE_S = 10.0  # at most between two looks at a lease: a loop must beat within 30 s


async def lead(
    context: Context, lease: Lease, work: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Waits for the role, then works and renews the lease until stop.

    At the end it releases the lease: the next one need not wait for it to run out. A process that
    waits is ready: it could take over. Raises Fenced if the role is taken away.
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
        # Not held: Redis lost it. Nobody else can have had it since, unless they were quicker.
        if not await lease.hold() and not await lease.acquire(at_least=lease.number):
            raise Fenced(f"another {lease.role} took over while Redis was away")
        await pause(context.stop, pause_s)

    await repeat(context, "standby", take)
    if not lease.number:
        return  # stopped while it waited
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
            context.log.warning("lease left to run out", reason=str(error))
