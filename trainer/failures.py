"""Tasks that a trainer gives up: what it reports of those that raised, and its rest after each."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from fedstream.broker import reasons
from fedstream.broker.errors import FedstreamError, innermost
from fedstream.broker.messages import Assignment, Event
from fedstream.runtime.backoff import pause
from fedstream.runtime.plugins import place_of, users_traceback, words

if TYPE_CHECKING:
    from fedstream.broker.ledger.trainer import Outbox
    from fedstream.runtime.backoff import Backoff
    from fedstream.runtime.service import Context

_DEVICES = 3  # that fail one after the other
_TASKS = 20  # the same, of a trainer that has trained before


class Failures:
    """Reports tasks that raised, and makes the trainer rest after each one that it gives up.

    Without a rest, a trainer that fails on every device would take and give up the tasks of a large
    pool at full speed. It also says so with each task that it gives up, because only the trainer
    knows that it trained nothing in between: then devices are not blamed for it.
    """

    def __init__(self, context: Context, outbox: Outbox, name: str, rests: Backoff) -> None:
        self._context = context
        self._outbox = outbox
        self._name = name
        self._rests = rests
        self._seen: set[str] = set()  # places that raised before
        self._rest_s = 0.0  # before the next task
        self._given_up = 0  # tasks in a row
        self._devices: set[int] = set()  # of these tasks, at most _DEVICES of them
        self._has_trained = False

    @property
    def in_a_row(self) -> int:
        """Tasks given up in a row, if rather the trainer than some devices is the cause; else 0.

        So it seems after several devices if it never trained any, and else only after many tasks: a
        round may have only devices left that fail.
        """
        most = _TASKS if self._has_trained else _DEVICES
        is_cause = len(self._devices) == _DEVICES and self._given_up >= most
        return self._given_up if is_cause else 0

    @property
    def rests(self) -> bool:
        """Whether the last task was given up and the trainer has not rested since."""
        return self._rest_s > 0

    async def rest(self) -> None:
        """Rest if the last task was given up, at most until told to stop."""
        if self._rest_s and await pause(self._context.stop, self._rest_s):
            return
        self._rest_s = 0.0

    def trained(self) -> None:
        """Note that a task has trained: the next rest is short again."""
        self._rests.reset()
        if self.in_a_row:
            self._context.log.info("this trainer works again")
        self._has_trained = True
        self._given_up = 0
        self._devices.clear()

    def gave_up(self, device: int, reason: str) -> None:
        """Note that a task was given up. Reasons that say nothing of the trainer are ignored."""
        if reason in reasons.OF_THE_RUN:
            return
        self._rest_s = self._rests.next()
        self._given_up += 1
        was_known = self.in_a_row > 0
        if len(self._devices) < _DEVICES:
            self._devices.add(device)
        if self.in_a_row and not was_known:
            self._context.log.error(
                "this trainer fails on every device, and rests", tasks=self._given_up, reason=reason
            )

    async def raised(self, error: Exception, task: Assignment, version: int) -> None:
        """Report a task that raised: with a traceback the first time, then in one line."""
        inner, where = innermost(error), place_of(error)
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
