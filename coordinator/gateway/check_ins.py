"""Check-ins: devices that ask for a task and wait for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from fedstream.coordinator.gateway import offers
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.runtime.limits import LogLimiter

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from fedstream.coordinator.gateway.device_sessions import DeviceSessions, Woken
    from fedstream.coordinator.gateway.metrics import GatewayMetrics
    from fedstream.coordinator.gateway.models import ModelCopies
    from fedstream.coordinator.gateway.run_cache import RunCache
    from fedstream.coordinator.gateway.settings import GatewaySettings
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.core.formats import Format
    from fedstream.protocol.messages import CheckIn

# Check-ins end their waits together, a quarter of a second apart: one wake-up answers them all.
_TOGETHER_S = 0.25
_LONG_S = 10.0  # a wait of which that much does not matter

IsThere: TypeAlias = Callable[[], bool]  # whether a device that waits is still connected


class CheckIns:
    """Answers check-ins."""

    def __init__(
        self,
        settings: GatewaySettings,
        sessions: DeviceSessions,
        run_cache: RunCache,
        models: ModelCopies,
        tasks: Tasks,
        metrics: GatewayMetrics,
        stop: asyncio.Event,
        log: FilteringBoundLogger,
        *,
        update: Format,
    ) -> None:
        """``update``: the format that devices send updates in, if they can. ``stop``: set once
        nobody is to wait any more.
        """
        self._log = log
        self._other_tasks = LogLimiter(burst=1, per_s=1 / 3600)  # lines of a device
        self._settings = settings
        self._sessions = sessions
        self._run_cache = run_cache
        self._models = models
        self._tasks = tasks
        self._metrics = metrics
        self._stop = stop
        self._update = update

    async def answer(self, device: int, said: CheckIn, is_there: IsThere) -> bytes | None:
        """The offer of a task; None: there was none, for as long as the device waited.

        Raises Refusal.
        """
        was_answered, offer = self._sessions.answered(device, said.nonce)
        if was_answered:
            self._sessions.heard(device, time.monotonic())
            return offer
        run, head = self._run_cache.run, self._run_cache.head
        self.check_run()
        if device >= run.devices:
            raise Refusal(
                403, "unknown device", f"the run has {run.devices} devices, numbered from 0"
            )
        if differs := run.difference(said.layout, said.devices):
            if self._other_tasks.passes(device) is not None:
                self._log.warning("a device's task is not the run's", device=device, reason=differs)
            raise Refusal(409, "another task", differs)
        if not said.eligible or device in head.quarantines.by_device:
            self._sessions.leave(device)
            return None
        if offers.model_format(head) not in said.formats:
            raise Refusal(
                406, "format", f"the run's models are published in {offers.model_format(head)}"
            )
        self._sessions.arrive(device, time.monotonic())
        if self._sessions.first(device) is not None:
            await self._run_cache.look()  # the task may have come a while ago
        return await self._wait(device, said, is_there)

    async def _wait(self, device: int, said: CheckIn, is_there: IsThere) -> bytes | None:
        """Offer a task, as soon as there is one; None: there was none in time.

        The answer is noted, to be repeated, unless the device said something newer meanwhile, hung
        up, or may not take part any more. Raises Refusal.
        """
        loop = asyncio.get_running_loop()
        end = shared_end(loop.time(), min(said.wait_s, self._settings.poll_s))
        while (offer := await self._offer(device, said)) is None:
            if end <= loop.time() or self._stop.is_set():
                break
            poll: asyncio.Future[Woken] = loop.create_future()
            self._sessions.park(device, poll, time.monotonic())
            timer = loop.call_at(end, _end, poll)
            try:
                woken = await poll
            finally:
                timer.cancel()
                self._sessions.unpark(device, poll)
            if woken == "replaced" or not self._waited(device, is_there):
                return None
        self._sessions.answer(device, said.nonce, offer)
        return offer

    def _waited(self, device: int, is_there: IsThere) -> bool:
        """Note that a device has waited till now; False if it has hung up.

        Then it was not there till now, and no task is offered to it. Raises Refusal if there are no
        more tasks.
        """
        if not is_there():
            return False
        self._sessions.heard(device, time.monotonic())
        self.check_run()
        return True

    async def _offer(self, device: int, said: CheckIn) -> bytes | None:
        """The offer of the device's oldest task, giving up those that came to nothing meanwhile."""
        held = await self._tasks.due(device)
        if held is None:
            return None
        run, head = self._run_cache.run, self._run_cache.head
        update = offers.format_for(said.formats, self._update)
        held.tau = head.version
        self._metrics.offered.inc()
        if said.has != head.given:
            self._models.prepare(head)
        return offers.offer(
            held,
            run,
            head,
            update,
            self._tasks.now(),
            changes=self._models.changes_url(head, said.has),
            heartbeat_s=self._settings.heartbeat_s,
        ).encode()

    def check_run(self) -> None:
        """Raise Refusal if there are no more tasks."""
        if self._run_cache.is_over:
            raise Refusal(410, "run over", "the run is finished: there are no more tasks")


def shared_end(now: float, wait_s: float) -> float:
    """When a wait of so many seconds ends: a long one together with others."""
    end = now + wait_s
    return end if wait_s < _LONG_S else end - end % _TOGETHER_S


def _end(poll: asyncio.Future[Woken]) -> None:
    if not poll.done():
        poll.set_result("nothing")
