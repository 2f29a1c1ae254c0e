"""Which services serve a run, and when a run may be deleted."""

from __future__ import annotations

import pytest

from fedstream.broker.errors import FedstreamError
from fedstream.operate.presence import purge
from tests.support import Hand


async def test_served_run_is_not_purged(hand: Hand) -> None:

    await hand.create()
    await hand.announce("t")
    with pytest.raises(FedstreamError, match="served by scheduler, updater, t: stop them"):
        await purge(hand.client, hand.keys, force=False)
    await hand.scheduler.release()
    await hand.updater.release()
    await hand.ledger.leave(b"t")
    there = len(await hand.ledger.stored())
    assert there > 3
    assert await purge(hand.client, hand.keys, force=False) == there
