"""What ends an upload while it arrives: nobody has to send what nobody waits for."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from typing import TYPE_CHECKING, TypeAlias

from fedstream.coordinator.gateway import offers
from fedstream.coordinator.gateway.desk import NotHeld
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core import reasons
from fedstream.protocol.messages import Receipt

if TYPE_CHECKING:
    from fedstream.broker.partial_blobs import PartialBlob
    from fedstream.coordinator.gateway.current import Current
    from fedstream.coordinator.gateway.desk import Desk, Held
    from fedstream.coordinator.gateway.receipts import Receipts
    from fedstream.coordinator.gateway.tasks import Tasks

Revoked: TypeAlias = "Callable[[], Awaitable[Set[int]]]"


class StoppedUpload(Exception):
    """The task has ended, so its update is not waited for."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt.state)
        self.receipt = receipt


class UploadStops:
    """Asked between the chunks of an upload, with what is known without a heartbeat."""

    def __init__(
        self, desk: Desk, current: Current, tasks: Tasks, receipts: Receipts, revoked: Revoked
    ) -> None:
        """``revoked``: the devices that an operator has revoked."""
        self._desk = desk
        self._current = current
        self._tasks = tasks
        self._receipts = receipts
        self._revoked = revoked

    async def admit(self, device: int, blob: PartialBlob) -> None:
        """Raise Refusal if a device was revoked since its request began.

        A replica that has the task gives it up by itself; one that knows only the upload's note
        would take the rest.
        """
        if device in await self._revoked():
            await blob.discard()
            raise Refusal(403, "revoked", "the operator has revoked this device")

    async def go_on(self, device: int, task: str, attempt: str) -> None:
        """See whether the rest of an upload is waited for, as a heartbeat would.

        Raises StoppedUpload if its task has ended, or ends now.
        """
        try:
            held = self._desk.held(task, device)
        except NotHeld:  # it ended, or is at another replica
            if (receipt := await self._receipts.now(task, attempt)) is not None:
                raise StoppedUpload(receipt) from None
            return
        if (why := await self._why_over(held, attempt)) is not None:
            await self._tasks.give_up(held, why)
            # Another replica may have had an answer decided meanwhile: then that counts.
            decided = await self._receipts.now(task, attempt)
            raise StoppedUpload(decided or Receipt(state="given up", reason=why))

    async def _why_over(self, held: Held, attempt: str) -> str | None:
        """Why a task in hand is to be given up; None: it isn't."""
        run, head = self._current.run, self._current.head
        if self._current.is_over:
            return reasons.RUN_FINISHED
        if (why := await self._tasks.overdue(held)) is not None:
            return why
        advice = offers.advice(held, attempt, run, head, self._tasks.now())
        return reasons.BECAME_STALE if advice.why == "too stale" else None
