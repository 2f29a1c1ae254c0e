"""The evaluator's operations on Redis: report measurements, keep the best model, end the run."""

from __future__ import annotations

from fedstream.broker import blobs
from fedstream.broker.ledger.base import FINISH_RUN, Finishing, Rights, packed
from fedstream.broker.scripts import Script
from fedstream.core.messages import Event, Goal
from fedstream.core.records import Best

_PIN = Script("pin")
_TELL = Script("tell")

RIGHTS = Rights(
    # To end a run by the measurements of this evaluator and earlier ones.
    both=("run", "events", "best"),
    reads=("head", "models", "model:*", "kept"),
    commands=("xread", "hgetall", *blobs.READS),
    scripts=(FINISH_RUN, _PIN, _TELL),
)


class EvaluatorLedger(Finishing):
    """The evaluator's view of the run, and its changes to it."""

    async def pin(self, blob: str) -> bool:
        """Keep a published model until the next event; False if it is gone already."""
        return bool(await self._run(_PIN, blob))

    async def tell(self, event: Event, found: Best | None = None, goal: Goal = "max") -> None:
        """Write an event for observers; keep the model ``found`` if it is better than the best.

        ``goal``: of the metric of ``found``, whose value is finite and whose model is pinned.
        """
        if found is None:
            await self._run(_TELL, event.encode())
            return
        about = {
            "goal": goal,
            "metric": found.metric,
            "value": repr(found.value),
            "version": str(found.version),
            "digest": found.digest,
            "blob": found.blob,
        }
        await self._run(_TELL, event.encode(), packed(about))
