"""Failures: tasks that raise or hang, and outages of Redis."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from fedstream.core import reasons
from fedstream.core.errors import FedstreamError, OutOfMemory, innermost
from fedstream.core.messages import Assignment, Evaluation, Event
from fedstream.runtime.backoff import pause
from fedstream.runtime.plugins import place_of, users_traceback, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fedstream.broker.ledger.trainer import Outbox
    from fedstream.runtime.backoff import Backoff
    from fedstream.runtime.service import Context


class OutageLimit:
    """Raises once Redis has served no request for ``most_s`` seconds; None: never.

    A Redis that answers but can't serve (loading, failing over, read-only) counts as unavailable.
    """

    def __init__(self, most_s: float | None) -> None:
        self._most_s = most_s
        self.heard = time.monotonic()  # time of the last served request

    @contextmanager
    def requesting(self) -> Iterator[None]:
        """Wrap a regular request to Redis. Raises FedstreamError after a too long outage."""
        try:
            yield
        except FedstreamError as error:
            now, most_s = time.monotonic(), self._most_s
            if not error.retriable or isinstance(error, OutOfMemory):  # Redis serves
                self.heard = now
            elif most_s is not None and now - self.heard > most_s:
                raise FedstreamError(
                    f"Redis has not served this trainer for {most_s:g} s (trainer.redis_away_s), "
                    f"last: {error}: restart it when Redis is back, unless the run is over"
                ) from error
            raise
        self.heard = time.monotonic()


_DEVICES = 3  # different devices that fail in a row
_TASKS = 20  # failed tasks in a row, if the trainer has trained before


class Failures:
    """Reports tasks that raised, and makes the trainer rest after each given-up task.

    Without rests, a trainer that fails on every device would give up the tasks of a large pool at
    full speed. Each give-up also states the number of failures in a row, so that no device is
    blamed for a trainer's fault: only the trainer knows that no task succeeded in between.
    """

    def __init__(
        self,
        context: Context,
        outbox: Outbox,
        name: str,
        rests: Backoff,
        *,
        private: bool = False,
    ) -> None:
        """``private``: an error's text is told to this trainer's log alone."""
        self._context = context
        self._outbox = outbox
        self._name = name
        self._rests = rests
        self._private = private
        self._seen: set[str] = set()  # places that raised before
        self._rest_s = 0.0  # before the next task
        self._given_up = 0  # tasks in a row
        self._devices: set[int] = set()  # of these tasks, at most _DEVICES of them
        self._has_trained = False

    @property
    def in_a_row(self) -> int:
        """The tasks given up in a row if the trainer is the likely cause; else 0.

        The trainer is the likely cause once 3 devices have failed. If it has trained before, 20
        tasks must have failed too, because a round may have only failing devices left.
        """
        most = _TASKS if self._has_trained else _DEVICES
        is_cause = len(self._devices) == _DEVICES and self._given_up >= most
        return self._given_up if is_cause else 0

    @property
    def rests(self) -> bool:
        """Whether a rest is due after a given-up task."""
        return self._rest_s > 0

    async def rest(self) -> None:
        """Rest if the last task was given up, at most until told to stop."""
        if self._rest_s and await pause(self._context.stop, self._rest_s):
            return
        self._rest_s = 0.0

    def trained(self) -> None:
        """Note that a task was trained: the next rest is short again."""
        self._rests.reset()
        if self.in_a_row:
            self._context.log.info("this trainer works again")
        self._has_trained = True
        self._given_up = 0
        self._devices.clear()

    def gave_up(self, device: int, reason: str) -> None:
        """Note that a task was given up. Reasons that lie in the run don't count."""
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

    async def raised(self, error: Exception, task: Assignment | Evaluation, version: int) -> None:
        """Report an error of a task: with its traceback the first time, then in one line."""
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
                what="error",
                service=self._name,
                time=time.time(),
                task=task.task,
                device=task.device,
                version=version,
                reason=where,
                text="" if self._private else text[-8000:],  # it may quote the device's data
            )
        )


_HANGING_S = 1.0  # between checks whether training hangs


class Guard(AbstractContextManager[None]):
    """Detects hanging training inside the block, as a thread can't be stopped from outside.

    Calls ``hangs`` once if the block still runs ``patience_s`` after ``cancelled()``.
    """

    def __init__(
        self, cancelled: Callable[[], bool], hangs: Callable[[], None], *, patience_s: float
    ) -> None:
        self._cancelled = cancelled
        self._hangs = hangs
        self._patience_s = patience_s
        self._told_at: float | None = None

    def __enter__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._look_later()

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()

    def _look_later(self) -> None:
        # A timer and no task, since most training ends before the first check.
        self._timer = self._loop.call_later(min(_HANGING_S, self._patience_s), self._look)

    def _look(self) -> None:
        now = time.monotonic()
        if not self._cancelled():
            self._told_at = None
        elif self._told_at is None:
            self._told_at = now
        elif now - self._told_at >= self._patience_s:
            self._hangs()
            return
        self._look_later()
