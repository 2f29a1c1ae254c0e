"""Ending a run before its last version."""

from __future__ import annotations

from fedstream.broker.ledger.base import Ledger, packed
from fedstream.broker.scripts import Script

FINISH_RUN = Script("finish_run")


class Finishing(Ledger):
    """What ends a run: the evaluator at its target, and operators."""

    async def finish(self, why: str) -> bool:
        """End the run: whether it was running."""
        event = self._event(what="run", text=f"finished: {why}")
        now = self.now()
        return bool(await self._run(FINISH_RUN, why, repr(now), packed(event)))
