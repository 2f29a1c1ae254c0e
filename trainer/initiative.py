"""A device's own initiative: anarchic trainers trigger tasks for their devices themselves.

Anarchic Federated Learning, section 3: each worker decides when it takes part and how long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fedstream.broker.errors import NoRun
from fedstream.broker.messages import Trigger, task_id
from fedstream.runtime.backoff import pause
from fedstream.runtime.participation import Participation, ParticipationGroup

if TYPE_CHECKING:
    from fedstream.broker.ledger.trainer import Outbox, TrainerLedger
    from fedstream.runtime.service import Context
    from fedstream.trainer.settings import InitiativeSettings


class Initiative:
    """Decides for one trainer's devices, while it is idle."""

    def __init__(
        self,
        settings: InitiativeSettings,
        groups: Sequence[ParticipationGroup],
        devices: Sequence[int],
        *,
        name: str,
        outbox: Outbox,
        ledger: TrainerLedger,
        context: Context,
        is_idle: Callable[[], bool],
        is_eligible: Callable[[int], bool],
    ) -> None:
        """``name``: the trainer's; ``is_eligible``: whether a device may work now."""
        self._parts = Participation(settings.steps, groups)
        self._devices = devices
        self._rate = settings.rate * self._parts.mean(devices)
        self._name = name
        self._outbox = outbox
        self._ledger = ledger
        self._context = context
        self._is_idle = is_idle
        self._is_eligible = is_eligible
        self._rng = random.Random()

    @property
    def patience_s(self) -> float:
        """Seconds to allow for one decision: 20 times the mean wait is practically impossible."""
        return 30.0 + 20.0 / self._rate

    async def decide(self) -> None:
        """Trigger a task for one of the devices, if the trainer is idle by then."""
        rng, stop = self._rng, self._context.stop
        await pause(stop, rng.expovariate(self._rate))
        if stop.is_set() or not self._is_idle():
            return
        try:
            run = await self._ledger.run()
        except NoRun:
            return  # Redis was emptied; the updater will publish the run again
        if run.state == "finished":
            return
        device = self._devices[self._parts.pick(rng, self._devices)]
        if not self._is_eligible(device):
            return  # an ineligible device does not act
        length = self._parts.length(rng, device)
        await self._outbox.say(
            Trigger(
                task=task_id(time.time_ns() // 1_000_000), device=device, seed=rng.getrandbits(63),
                steps=length.steps, epochs=length.epochs, seconds=length.seconds,
                why="own initiative", origin=self._name,
            )
        )  # fmt: skip
