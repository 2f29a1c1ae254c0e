"""What the evaluator does in Redis: it tells its measurements, and ends the run at its target."""

from __future__ import annotations

import time

from fedstream.broker import blobs
from fedstream.broker.ledger.grants import Rights
from fedstream.broker.ledger.plumbing import Ledger, packed
from fedstream.broker.messages import Event
from fedstream.broker.scripts import Script

_FINISH_RUN = Script("finish_run")
_TELL = Script("tell")

RIGHTS = Rights(
    both=("run",),  # it ends a run whose target is reached
    reads=("head", "models", "model:*"),
    writes=("events",),
    commands=("xread", "hgetall", *blobs.READS),
    scripts=(_FINISH_RUN, _TELL),
)


class EvaluatorLedger(Ledger):
    """The run as the evaluator sees and changes it."""

    async def tell(self, event: Event) -> None:
        """Write an event for observers."""
        await self._run(_TELL, event.encode())

    async def finish(self, why: str) -> bool:
        """End the run: whether it was running."""
        event = self._event(what="run", text=f"finished: {why}")
        now = time.time()
        return bool(await self._run(_FINISH_RUN, why, repr(now), packed(event)))
