"""What the evaluator does in Redis: it tells its measurements, and ends the run at its target."""

from __future__ import annotations

from fedstream.broker import blobs
from fedstream.broker.ledger.finishing import FINISH_RUN, Finishing
from fedstream.broker.ledger.grants import Rights
from fedstream.broker.scripts import Script
from fedstream.core.messages import Event

_TELL = Script("tell")

RIGHTS = Rights(
    both=("run", "events"),  # it ends a run by what it, and an evaluator before it, measured
    reads=("head", "models", "model:*"),
    commands=("xread", "hgetall", *blobs.READS),
    scripts=(FINISH_RUN, _TELL),
)


class EvaluatorLedger(Finishing):
    """The run as the evaluator sees and changes it."""

    async def tell(self, event: Event) -> None:
        """Write an event for observers."""
        await self._run(_TELL, event.encode())
