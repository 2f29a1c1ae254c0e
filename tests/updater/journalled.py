"""What the tests of the journalling updater share: what it wrote, and a Redis that goes back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.core.errors import NoRun
from fedstream.core.messages import Upload
from fedstream.journal import EntryRecord, segments
from fedstream.strategies import FedAsyncSettings
from fedstream.strategies.staleness import Constant
from fedstream.updater.service import Updater
from fedstream.updater.state import RunState
from tests.support import Hand, context, running, wait_until

HALF = FedAsyncSettings(alpha=0.5, staleness=Constant())


def records(folder: Path) -> list[EntryRecord]:
    """Every record that counts, in order."""
    found: list[EntryRecord] = []
    chain = segments(folder)
    for segment, successor in zip(chain, [*chain[1:], None], strict=True):
        cut = successor.follows if successor else None
        found.extend(record.entry for record in segment.records(cut))
    for segment in chain:
        segment.close()
    return found


def has_compared(updater: Updater) -> bool:
    """Whether it leads, and has found Redis where the journal is."""
    state: RunState | None = getattr(updater._loop, "state", None)  # None: not recovered yet
    return state is not None and state.compared == updater._lease.number > 0


async def makes(hand: Hand, updater: Updater, *values: float) -> None:
    """Runs an updater until it has made a version of each of these updates."""
    async with running(updater, context()):
        await hand.join()
        for value in values:
            version = await hand.version()
            await hand.admitted(value)
            await hand.reaches(version + 1)


async def fails(updater: Updater, error: type[Exception], match: str) -> None:
    """The updater ends by itself, with this error."""
    with pytest.raises(BaseExceptionGroup) as raised:
        # A lease whose holder could not say good-bye runs out first.
        await asyncio.wait_for(updater.run(context()), 60)
    assert raised.group_contains(error, match=match)


async def reasons(hand: Hand, outcome: str, expected: dict[str, int]) -> bool:
    try:
        return (await hand.ledger.look()).reasons(outcome) == expected
    except NoRun:
        return False


async def held(hand: Hand, n: int) -> bool:
    head = await hand.ledger.head()
    return head is not None and head.buffered == n


_DUMP = """
local found = {}
for i, name in ipairs(redis.call('KEYS', '*')) do
  found[i] = {name, redis.call('DUMP', name), redis.call('PTTL', name)}
end
return found
"""


async def backed_up(client: Client) -> dict[bytes, Any]:
    """Everything in Redis at one moment, to go back to: key by key, services write in between."""
    found = await client.call("EVAL", _DUMP, 0)
    return {name: (value, max(0, expiry)) for name, value, expiry in found}


async def go_back(client: Client, backup: dict[bytes, Any]) -> None:
    """Redis is as it was, as after the fail-over to a replica that lagged."""
    restore = [("RESTORE", name, expiry, value) for name, (value, expiry) in backup.items()]
    await client.pipeline([("MULTI",), ("FLUSHALL",), *restore, ("EXEC",)])


async def forget_newest(hand: Hand, upload: Upload, *more: Command) -> None:
    """Redis forgets that it admitted this update, the newest in the queue: entry, bytes and all.

    ``more`` happens in the same step.
    """
    entry, _ = (await hand.queue())[-1]
    await hand.client.pipeline(
        [
            ("MULTI",),
            ("XDEL", hand.keys.queue, entry),
            ("UNLINK", hand.keys.queued(upload.blob)),
            ("HDEL", hand.keys.admitted, upload.task),
            *more,
            ("EXEC",),
        ]
    )


async def refused(hand: Hand, reason: str, n: int = 1) -> None:
    """Waits until so many updates were refused for a reason."""

    async def are() -> bool:
        return (await hand.ledger.look()).reasons("refused").get(reason) == n

    await wait_until(are, what=f"{n} refused: {reason}")
