"""What the updater sees to besides updates: room in Redis, and a run that stands still."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fedstream.broker.client import Client
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.runtime.service import Context
from fedstream.updater.publisher import Publisher
from fedstream.updater.state import RunState

_SILENT_S = 600.0  # without a version, until that is logged


@dataclass(kw_only=True)
class Upkeep:
    """Frees older models when Redis is full, and logs when no version is made."""

    context: Context
    client: Client
    ledger: UpdaterLedger
    publisher: Publisher
    heard: float = field(default_factory=time.monotonic)  # of a version, or of the last such log

    async def look(self, state: RunState) -> None:
        """See to everything; call it while there is nothing else to do."""
        used, limit = await self.ledger.memory()
        if limit and used + state.layout.nbytes > limit:
            # That may be why the queue is empty, and only the updater may free models.
            await self.make_room()
        await self._break_silence(state)

    async def make_room(self) -> None:
        """Delete older models: nothing can be written before."""
        removed = await self.publisher.make_room()
        if removed:
            self.context.log.warning("Redis is full: older models removed", models=removed)

    async def _break_silence(self, state: RunState) -> None:
        """Log an error now and then while tasks are open but no version is made."""
        now = time.monotonic()
        if now - self.heard < _SILENT_S or state.finished:
            return
        silent, self.heard = now - self.heard, now
        waiting = await self.client.call("HLEN", self.ledger.keys.open)
        if waiting:
            self.context.log.error(
                "tasks are open but no version is made: see docs/how-to/alerts.md, "
                "FedstreamStalled",
                open=waiting,
                seconds=round(silent),
            )
