"""Tasks that raised: what a trainer reports of them, and its rest after each."""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

from fedstream.broker.errors import FedstreamError, innermost
from fedstream.broker.messages import Assignment, Event
from fedstream.runtime.backoff import pause
from fedstream.runtime.plugins import users_traceback, words

if TYPE_CHECKING:
    from fedstream.broker.ledger.trainer import Outbox
    from fedstream.runtime.backoff import Backoff
    from fedstream.runtime.service import Context


class Failures:
    """Reports tasks that raised, and makes the trainer rest after each.

    Without a rest, a task that always raises would be triggered, taken and given up at full speed.
    """

    def __init__(self, context: Context, outbox: Outbox, name: str, rests: Backoff) -> None:
        self._context = context
        self._outbox = outbox
        self._name = name
        self._rests = rests
        self._seen: set[str] = set()  # places that raised before
        self._rest_s = 0.0  # before the next task

    @property
    def rests(self) -> bool:
        """Whether the last task raised and the trainer has not rested since."""
        return self._rest_s > 0

    async def rest(self) -> None:
        """Rest if the last task raised, at most until told to stop."""
        if self._rest_s and await pause(self._context.stop, self._rest_s):
            return
        self._rest_s = 0.0

    def trained(self) -> None:
        """Note that a task has trained: the next rest is short again."""
        self._rests.reset()

    async def raised(self, error: Exception, task: Assignment, version: int) -> None:
        """Report a task that raised: with a traceback the first time, then in one line."""
        self._rest_s = self._rests.next()
        inner = innermost(error)
        frames = traceback.extract_tb(inner.__traceback__)
        where = f"{type(inner).__name__} at {frames[-1].filename}:{frames[-1].lineno}"
        log = self._context.log.bind(version=version)
        if isinstance(error, FedstreamError):
            text = str(error)
            log.error("task failed", error=type(error).__name__, reason=text)
        elif where in self._seen:
            text = f"{where}: {inner}"
            log.error("task raised again", error=type(inner).__name__, reason=str(inner))
        else:
            text = users_traceback(error) or words(error)
            log.error("task raised", exc_info=error)
        self._seen.add(where)
        await self._outbox.say(
            Event(
                what="error", service=self._name, time=time.time(), task=task.task,
                device=task.device, version=version, reason=where, text=text[-8000:],
            )
        )  # fmt: skip
