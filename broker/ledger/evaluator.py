"""The evaluator's operations on Redis: report measurements, and end the run at its target."""

from __future__ import annotations

from fedstream.broker import blobs
from fedstream.broker.ledger.base import FINISH_RUN, Finishing, Rights
from fedstream.broker.scripts import Script
from fedstream.core.messages import Event

_TELL = Script("tell")

RIGHTS = Rights(
    both=("run", "events"),  # to end a run by the measurements of this evaluator and earlier ones
    reads=("head", "models", "model:*"),
    commands=("xread", "hgetall", *blobs.READS),
    scripts=(FINISH_RUN, _TELL),
)


class EvaluatorLedger(Finishing):
    """The evaluator's view of the run, and its changes to it."""

    async def tell(self, event: Event) -> None:
        """Write an event for observers."""
        await self._run(_TELL, event.encode())
