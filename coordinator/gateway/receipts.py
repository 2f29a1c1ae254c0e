"""Receipts of updates: one periodic query for all requests that wait for a decision."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from fedstream.core import reasons
from fedstream.protocol.messages import Receipt

if TYPE_CHECKING:
    from fedstream.broker.ledger.gateway import Fate
    from fedstream.coordinator.gateway.upload_locks import UploadLock

WAIT_S: Final = 2.0  # wait for a coordinator's decision; then the device asks again
_LOOK_S = 0.02  # between two looks

Fates: TypeAlias = "Callable[[Sequence[str]], Awaitable[Sequence[Fate]]]"
IsOpen: TypeAlias = "Callable[[str], Awaitable[bool]]"

ADMITTED: Final = Receipt(state="admitted")
RECEIVED: Final = Receipt(state="received")
_TWICE: Final = Receipt(state="refused", reason=reasons.ANSWERED_TWICE)


def receipt_of(fate: Fate, attempt: str) -> Receipt | None:
    """The receipt of an attempt at a task; None while undecided."""
    if fate.admitted is not None:
        return ADMITTED if fate.admitted == attempt else _TWICE
    match fate.outcome:
        case None:
            return None
        case "applied" | "buffered" | "refused" if fate.attempt != attempt:
            return _TWICE
        case "applied" | "buffered":
            return ADMITTED
        case "refused":
            return Receipt(state="refused", reason=fate.reason)
        case _:  # given up or dead
            return Receipt(state="given up", reason=fate.reason)


class Receipts:
    """The receipts of one replica's devices."""

    def __init__(self, fates: Fates, is_open: IsOpen) -> None:
        """``fates``: reads the state of tasks. ``is_open``: whether a task is open."""
        self._fates = fates
        self._is_open = is_open
        self._waiting: dict[tuple[str, str], asyncio.Future[Receipt]] = {}  # by task and attempt
        self._looking: asyncio.Task[None] | None = None

    async def now(self, task: str, attempt: str) -> Receipt | None:
        """The receipt at this moment; None while undecided."""
        [fate] = await self._fates([task])
        return receipt_of(fate, attempt)

    async def of(self, task: str, attempt: str, lock: UploadLock) -> Receipt | None:
        """Wait for the receipt; "received" if the decision takes longer than two seconds.

        None if there will be no decision, because Redis has forgotten the task: it was emptied or
        fell back, or the task ended long ago. Raises TakenOver.
        """
        loop = asyncio.get_running_loop()
        found = self._waiting[task, attempt] = loop.create_future()
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            return await lock.within(loop.time() + WAIT_S, lambda: found)
        except TimeoutError:
            if await self._is_open(task):
                return RECEIVED
            return await self.now(task, attempt)  # the task may have ended a moment ago
        finally:
            del self._waiting[task, attempt]

    async def _look(self) -> None:
        """Query periodically until no request waits; an error fails all waiting requests."""
        try:
            while waiting := dict(self._waiting):
                fates = await self._fates([task for task, _ in waiting])
                for (key, found), fate in zip(waiting.items(), fates, strict=True):
                    receipt = receipt_of(fate, key[1])
                    if receipt is not None and not found.done():
                        found.set_result(receipt)
                await asyncio.sleep(_LOOK_S)
        except Exception as error:
            for found in self._waiting.values():
                if not found.done():
                    found.set_exception(error)
        finally:
            self._looking = None
