"""Check-ins: requests of devices for a task, which may wait for one."""

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

# Waits end only at multiples of a quarter of a second, so that one wake-up ends many.
_TOGETHER_S = 0.25
_LONG_S = 10.0  # waits at least this long are rounded

IsThere: TypeAlias = Callable[[], bool]  # whether a waiting device is still connected


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
        """``update``: the wanted format of updates. ``stop``: set at the end of the service."""
        self._log = log
        self._other_tasks = LogLimiter(burst=1, per_s=1 / 3600)  # log lines per device
        self._settings = settings
        self._sessions = sessions
        self._run_cache = run_cache
        self._models = models
        self._tasks = tasks
        self._metrics = metrics
        self._stop = stop
        self._update = update

    async def answer(self, device: int, said: CheckIn, is_there: IsThere) -> bytes | None:
        """Answer a check-in: the offer of a task, or None if there was none in time.

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
        """Offer a task as soon as there is one; None if there was none in time.

        The answer is stored for repetition, unless the device sent a newer request, hung up, or may
        no longer take part. Raises Refusal.
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
        """Note that a device is still present after its wait; False if it has hung up.

        A device that has hung up is offered no task. Raises Refusal if there are no more tasks.
        """
        if not is_there():
            return False
        self._sessions.heard(device, time.monotonic())
        self.check_run()
        return True

    async def _offer(self, device: int, said: CheckIn) -> bytes | None:
        """Offer the device's oldest task, giving up its overdue tasks."""
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
    """The end of a wait of ``wait_s`` seconds; long waits are rounded to end together."""
    end = now + wait_s
    return end if wait_s < _LONG_S else end - end % _TOGETHER_S


def _end(poll: asyncio.Future[Woken]) -> None:
    if not poll.done():
        poll.set_result("nothing")
