"""Trainers that joined a run from another terminal: a finished run waits for them to leave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from fedstream.broker.errors import FedstreamError

if TYPE_CHECKING:
    from fedstream.broker.ledger import Ledger


async def gone(ledger: Ledger, ours: Collection[str], most_s: float) -> None:
    """Wait until only ``ours`` are on the trainers' register, for at most ``most_s`` seconds."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        try:
            there = await ledger.trainers()
        except FedstreamError:
            return  # without Redis, trainers can't sign off either
        if not there.keys() - ours:
            return
        await asyncio.sleep(0.1)
