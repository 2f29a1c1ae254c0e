"""Trainers that joined a run from another terminal: they leave with it, and it waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from fedstream.broker.errors import FedstreamError

if TYPE_CHECKING:
    from fedstream.broker.ledger import Ledger


async def gone(ledger: Ledger, ours: Collection[str], most_s: float) -> None:
    """Waits until no other trainers than ``ours`` are on the register, ``most_s`` at most."""
    until = time.monotonic() + most_s
    while time.monotonic() < until:
        try:
            there = await ledger.trainers()
        except FedstreamError:
            return  # whatever it is: nobody can say good-bye there
        if not there.keys() - ours:
            return
        await asyncio.sleep(0.1)
