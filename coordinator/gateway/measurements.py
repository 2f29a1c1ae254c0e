"""A device's answer to an evaluation: its metrics, which become the task's answer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from fedstream.broker import workspaces
from fedstream.coordinator.gateway.device_sessions import NotHeld
from fedstream.core.messages import Evaluation
from fedstream.protocol.messages import ATTEMPT_ID, TASK_ID

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedstream.coordinator.gateway.device_sessions import Held
    from fedstream.coordinator.gateway.handover import HandOvers
    from fedstream.coordinator.gateway.replica import Replica
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.core.messages import Sum
    from fedstream.protocol.messages import MetricsReport

_REMEMBERED_S: Final = 600.0  # after an answer, in which a repeated request is answered alike
_NOTE: Final = 20  # most bytes of a note
_NAMES = re.compile(f"{TASK_ID}/{ATTEMPT_ID}")


class Measurements:
    """The measurements that devices send to one replica."""

    def __init__(self, replica: Replica, tasks: Tasks, moves: HandOvers) -> None:
        self._client = replica.client
        self._keys = replica.keys
        self._outbox = replica.outbox
        self._sessions = replica.sessions
        self._tasks = tasks
        self._moves = moves

    async def take(self, task: str, attempt: str, device: int, said: MetricsReport) -> None:
        """Answer an evaluation; ``device``: by the request's token. A repetition has no effect.

        Raises NotHeld if the evaluation is over or another device's, HeldElsewhere, and BrokerError
        while Redis is away or full; the device may then repeat the request.
        """
        if not _NAMES.fullmatch(f"{task}/{attempt}"):
            raise NotHeld(task)
        kept = self._keys.workspace(self._outbox.site, f"{task}.{attempt}")
        if task not in self._sessions and await self._has_answered(kept, device):
            return
        held = await self._moves.find(task, device)
        if held.attempt != attempt or not isinstance(held.task, Evaluation):
            raise NotHeld(task)
        is_said = await self.answer(held, held.task, said.samples, said.sums, said.seconds)
        if not is_said and not await self._has_answered(kept, device):
            raise NotHeld(task)  # it had ended

    async def answer(
        self,
        held: Held,
        task: Evaluation,
        samples: int,
        sums: Mapping[str, Sum],
        seconds: float,
    ) -> bool:
        """Answer a held evaluation; False if it was answered before, or had ended."""
        answer = self._tasks.measured(held, task, samples=samples, sums=dict(sums), seconds=seconds)
        # The note is kept only together with the answer.
        kept = self._keys.workspace(self._outbox.site, f"{task.task}.{held.attempt}")
        staged = f"{kept}.staged"
        note = ("SET", staged, task.device, "PX", round(1000 * _REMEMBERED_S))
        word = await self._outbox.answer(
            held.stream, held.entry, answer, ahead=(note,), renamed=(staged, kept)
        )
        self._tasks.answered(answer, said=word == "said")
        return word == "said"

    async def _has_answered(self, kept: str, device: int) -> bool:
        """Whether the note of an answer by this device is there."""
        note = await workspaces.read(self._client, kept, most=_NOTE)
        return note == str(device).encode()
