"""What the sinks do in Redis: they read the run, and note how far each tracker is."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from fedstream.broker import blobs
from fedstream.broker.ledger.base import Ledger, Rights
from fedstream.core.records import mapping

RIGHTS = Rights(
    both=("sinks",),
    reads=("run", "head", "counts", "models", "events", "model:*"),
    # The last two: with them `doctor` finds out which commands a user without scripts may send.
    commands=("xread", "hgetall", "hset", *blobs.READS, "multi", "discard"),
)


@dataclass(frozen=True)
class Cursor:
    """How far a sink is."""

    run: str  # the lineage: another run's cursor under the same name doesn't count
    version: int = -1  # the newest one written
    evaluation: int = -1  # the newest version whose measurements are written
    lost: int = 0  # versions that were gone before they could be written
    ended: bool = False  # whether the record is complete


class SinksLedger(Ledger):
    """The run as its sinks see it."""

    async def cursor(self, sink: str, run: str) -> Cursor:
        """Read a sink's cursor; a new one if it has none for this run."""
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
