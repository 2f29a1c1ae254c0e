"""Check-ins that only wait, as nearly all do: without a task, a request or a timer of their own.

Whatever else a check-in needs (to be refused, to arrive, to be offered a task that is there) takes
a task. Once there is a task of the run for a device that waits, it is offered as there.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.protocol.messages import BadBody, CheckIn

if TYPE_CHECKING:
    from collections.abc import Callable

    from fedstream.coordinator.gateway.check_ins import CheckIns
    from fedstream.coordinator.gateway.desk import Desk, Woken
    from fedstream.runtime.plain import PlainRequest
    from fedstream.runtime.quick import Exchange


class AnswerCancelled(Exception):
    """The task that was to answer a request was cancelled; whoever asked is answered all the same.

    aiohttp closes the connection of such a request; one of a quick route has no timer.
    """


class QuickCheckIns:
    """The check-ins that were taken, until they are answered."""

    def __init__(
        self,
        check_ins: CheckIns,
        desk: Desk,
        answered: Callable[[bytes | Exception | None], bytes],
        is_stopping: Callable[[], bool],
    ) -> None:
        """``answered``: the response with an offer, without one, or to an error. ``is_stopping``:
        whether connections end with their next response.
        """
        self._check_ins = check_ins
        self._desk = desk
        self._answered = answered
        self._is_stopping = is_stopping
        self._by_end: dict[float, set[_Wait]] = {}
        self._offering: set[asyncio.Task[None]] = set()

    def wait(self, device: int, said: CheckIn, exchange: Exchange) -> None:
        """Let a check-in wait that has nothing else to do."""
        loop = asyncio.get_running_loop()
        end = self._check_ins.end_of_wait(loop.time(), said)
        wait = _Wait(self, device, said, exchange, end)
        self._desk.park(device, wait, time.monotonic())
        if end not in self._by_end:
            self._by_end[end] = set()
            loop.call_at(end, self._end, end)
        self._by_end[end].add(wait)

    def _end(self, end: float) -> None:
        loop = asyncio.get_running_loop()
        for wait in self._by_end.pop(end):
            wait.is_done = True
            self._desk.unpark(wait.device, wait)
            loop.call_soon(self._woken, wait, "nothing")  # one that fails leaves the others alone

    def woken(self, wait: _Wait, why: Woken) -> None:
        """Answer a check-in later in this turn of the loop: whoever wakes it is amid others."""
        if (together := self._by_end.get(wait.end)) is not None:
            together.discard(wait)
        asyncio.get_running_loop().call_soon(self._woken, wait, why)

    def _woken(self, wait: _Wait, why: Woken) -> None:
        if why == "look":
            task = asyncio.create_task(self._offer(wait), name=f"offer to {wait.device}")
            self._offering.add(task)
            task.add_done_callback(partial(self._offered, wait))
            return
        try:
            if why == "nothing" and self._check_ins.waited(wait.device, wait.exchange):
                self._desk.answer(wait.device, wait.said.nonce, None)
            self._answer(wait, None)
        except Refusal as refusal:
            self._answer(wait, refusal)

    async def _offer(self, wait: _Wait) -> None:
        try:
            offer = None
            if self._check_ins.waited(wait.device, wait.exchange):
                offer = await self._check_ins.go_on(wait.device, wait.said, wait.end, wait.exchange)
        except Exception as error:  # whatever it is, the device has to be answered
            self._answer(wait, error)
        else:
            self._answer(wait, offer)

    def _offered(self, wait: _Wait, task: asyncio.Task[None]) -> None:
        self._offering.discard(task)
        if task.cancelled():
            self._answer(wait, AnswerCancelled())

    def _answer(self, wait: _Wait, said: bytes | Exception | None) -> None:
        wait.exchange.answer(self._answered(said), is_last=self._is_stopping())


class _Wait:
    """A check-in that waits; to the desk, a future of why it ends."""

    __slots__ = ("_all", "device", "end", "exchange", "is_done", "said")

    def __init__(
        self, all_: QuickCheckIns, device: int, said: CheckIn, exchange: Exchange, end: float
    ) -> None:
        self._all = all_
        self.device = device
        self.said = said
        self.exchange = exchange
        self.end = end  # by the loop's clock
        self.is_done = False

    def done(self) -> bool:
        return self.is_done

    def set_result(self, why: Woken) -> None:
        self.is_done = True
        self._all.woken(self, why)


def check_in_of(request: PlainRequest) -> CheckIn | None:
    """What a request says; None if it is no check-in."""
    try:
        return CheckIn.decode(request.body)
    except BadBody:
        return None
