"""Check-ins: requests of devices for a task, which may wait for one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedstream.coordinator.gateway import offers
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.messages import Evaluation
from fedstream.runtime.limits import LogLimiter

if TYPE_CHECKING:
    from fedstream.coordinator.gateway.device_sessions import Held, Woken
    from fedstream.coordinator.gateway.metrics import GatewayMetrics
    from fedstream.coordinator.gateway.models import ModelCopies
    from fedstream.coordinator.gateway.replica import Replica
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.protocol.messages import CheckIn
    from fedstream.runtime.service import Context

# Waits end only at multiples of a quarter of a second, so that one wake-up ends many.
_TOGETHER_S = 0.25
_LONG_S = 10.0  # waits at least this long are rounded

IsThere: TypeAlias = Callable[[], bool]  # whether a waiting device is still connected


class CheckIns:
    """Answers check-ins."""

    def __init__(
        self,
        replica: Replica,
        models: ModelCopies,
        tasks: Tasks,
        metrics: GatewayMetrics,
        context: Context,
    ) -> None:
        self._settings = replica.settings
        self._sessions = replica.sessions
        self._run_cache = replica.run_cache
        self._models = models
        self._tasks = tasks
        self._metrics = metrics
        self._context = context
        self._other_tasks = LogLimiter(burst=1, per_s=1 / 3600)  # log lines per device

    async def answer(self, device: int, said: CheckIn, is_there: IsThere) -> bytes | None:
        """Answer a check-in: the offer of a task, or None if there was none in time.

        Raises Refusal.
        """
        was_answered, offer = self._sessions.answered(device, said.nonce)
        if was_answered:
            self._sessions.heard(device, time.monotonic())
            return offer
        run, head = self._run_cache.run, self._run_cache.head
        self._check_run()
        self.check_device(device)
        if differs := run.difference(said.layout, said.devices):
            if self._other_tasks.passes(device) is not None:
                self._context.log.warning(
                    "a device's task is not the run's", device=device, reason=differs
                )
            raise Refusal(409, "another task", differs)
        if not said.eligible or head.bars(device):
            self._sessions.leave(device)
            return None
        if offers.model_format(head) not in said.formats:
            raise Refusal(
                406, "format", f"the run's models are published in {offers.model_format(head)}"
            )
        private = self._run_cache.private
        if private is not None and self._run_cache.update.name not in said.formats:
            raise Refusal(
                406,
                "format",
                "the run is private: start the device with its policy (fedstream device --policy)",
            )
        held = await self.task_for(device, said.wait_s, is_there, evaluates=said.evaluates)
        if held == "replaced":
            return None
        if held == "nothing":
            self._check_run()
            offer = None
        else:
            offer = self._offer(held, said)
        self._sessions.answer(device, said.nonce, offer)  # for repetition
        return offer

    def check_device(self, device: int) -> None:
        """Raise Refusal unless the run has a device of this number."""
        devices = self._run_cache.run.devices
        if device >= devices:
            raise Refusal(403, "unknown device", f"the run has {devices} devices, numbered from 0")

    async def task_for(
        self,
        device: int,
        wait_s: float,
        is_there: IsThere = lambda: True,
        *,
        evaluates: bool = False,
    ) -> Held | Literal["nothing", "replaced"]:
        """Note that a device has come, and wait at most ``wait_s`` for its next task.

        ``evaluates``: whether that may be an evaluation.

        "nothing": there was no task in time, or the run is over. "replaced": the device sent a
        newer request, hung up, or may no longer take part. Raises Refusal if too many devices are
        present.
        """
        loop = asyncio.get_running_loop()
        self._sessions.arrive(device, time.monotonic())
        end = shared_end(loop.time(), min(wait_s, self._settings.poll_s))
        if self._sessions.first(device) is not None:
            await self._run_cache.look()  # the task may have come a while ago
        while not self._tasks.is_over:
            if (held := await self._tasks.due(device, evaluates=evaluates)) is not None:
                return held
            if end <= loop.time() or self._context.stop.is_set():
                break
            poll: asyncio.Future[Woken] = loop.create_future()
            self._sessions.park(device, poll, time.monotonic())
            timer = loop.call_at(end, _end, poll)
            try:
                woken = await poll
            finally:
                timer.cancel()
                self._sessions.unpark(device, poll)
            if woken == "replaced" or not is_there():
                return "replaced"
            self._sessions.heard(device, time.monotonic())
        return "nothing"

    def _offer(self, held: Held, said: CheckIn) -> bytes:
        task, run, head = held.task, self._run_cache.run, self._run_cache.head
        if isinstance(task, Evaluation):
            head = self._run_cache.evaluated(task)
        held.tau = head.version
        self._metrics.offered.inc()
        if said.has != head.given:
            self._models.prepare(head)
        changes, now = self._models.changes_url(head, said.has), self._tasks.now()
        model = offers.model(run, head, changes)
        heartbeat_s = self._settings.heartbeat_s
        if isinstance(task, Evaluation):
            return offers.evaluation_offer(
                task, held.attempt, run, model, now, heartbeat_s=heartbeat_s
            ).encode()
        update = offers.format_for(said.formats, self._run_cache.update)
        return offers.offer(
            task,
            held.attempt,
            run,
            model,
            update,
            now,
            private=self._run_cache.private,
            heartbeat_s=heartbeat_s,
        ).encode()

    def _check_run(self) -> None:
        """Raise Refusal if there are no more tasks."""
        if self._tasks.is_over:
            raise Refusal(410, "run over", "the run is finished: there are no more tasks")


def shared_end(now: float, wait_s: float) -> float:
    """The end of a wait of ``wait_s`` seconds; long waits are rounded to end together."""
    end = now + wait_s
    return end if wait_s < _LONG_S else end - end % _TOGETHER_S


def _end(poll: asyncio.Future[Woken]) -> None:
    if not poll.done():
        poll.set_result("nothing")
