"""The sinks' operations on Redis: read the run, and save each tracker's cursor."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from fedstream.broker import blobs
from fedstream.broker.ledger.base import Ledger, Rights
from fedstream.core.records import mapping

RIGHTS = Rights(
    both=("sinks",),
    reads=("run", "head", "counts", "models", "events", "model:*"),
    # With the last two, `doctor` tests the commands that a user without scripts may send.
    commands=("xread", "hgetall", "hset", *blobs.READS, "multi", "discard"),
)


@dataclass(frozen=True)
class Cursor:
    """The progress of a sink."""

    run: str  # lineage; a cursor of another run with this name is ignored
    version: int = -1  # the newest written version
    evaluation: int = -1  # the newest version with written measurements
    lost: int = 0  # versions that Redis deleted before the sink wrote them
    ended: bool = False  # the sink has written the end of the run
    devices: int = -1  # the newest version with written metrics of devices


class SinksLedger(Ledger):
    """The sinks' view of the run, and their cursors."""

    async def cursor(self, sink: str, run: str) -> Cursor:
        """Read a sink's cursor; a new cursor if the sink has none for this run."""
        packed = await self._client.call("HGET", self.keys.sinks, sink)
        if packed is None:
            return Cursor(run)
        cursor = Cursor(**msgpack.unpackb(packed))
        return cursor if cursor.run == run else Cursor(run)

    async def save(self, sink: str, cursor: Cursor) -> None:
        """Write a sink's cursor."""
        await self._client.call("HSET", self.keys.sinks, sink, msgpack.packb(cursor.__dict__))

    async def counts(self) -> dict[str, int]:
        """Read the counts of tasks by outcome and reason."""
        record = mapping(await self._client.call("HGETALL", self.keys.counts))
        return {name: int(value) for name, value in record.items()}
