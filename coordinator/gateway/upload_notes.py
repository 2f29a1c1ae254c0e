"""What is kept in Redis beside an upload, for any replica to go on with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Set
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, ValidationError

from fedstream.broker.blobs import CHUNK
from fedstream.broker.partial_blobs import PartialBlob
from fedstream.coordinator.gateway import offers
from fedstream.coordinator.gateway.device_sessions import NotHeld
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core import reasons
from fedstream.protocol.messages import Receipt, UpdateReport

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.coordinator.gateway.device_sessions import DeviceSessions, Held
    from fedstream.coordinator.gateway.receipts import Receipts
    from fedstream.coordinator.gateway.run_cache import RunCache
    from fedstream.coordinator.gateway.tasks import Tasks

EXPIRE_S: Final = 600.0  # after the last chunk came, an upload that was not completed is gone


def upload_blob(client: Client, keys: Keys, site: str, task: str, attempt: str) -> PartialBlob:
    """The blob that an attempt's update arrives in, and its note."""
    name = f"{task}.{attempt}"
    key, note_key = keys.update(f"{site}/{name}"), keys.upload_note(site, name)
    return PartialBlob(client, key, note_key, expire_s=EXPIRE_S)


class Source(BaseModel):
    """The task that an update answers, as it was handed to this site."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    device: int
    seed: int
    stream: str
    entry: str  # its id in the stream


class UploadNote(BaseModel):
    """An upload: the task that it answers, how long it is, and what the device says of it."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    source: Source
    length: int  # bytes
    report: UpdateReport
    complete: bool = False  # the device has sent the end

    def encode(self) -> bytes:
        """As Redis has it."""
        return self.model_dump_json().encode()

    @classmethod
    def parsed(cls, data: bytes | None) -> Self | None:
        """The note as it was written; None if there is none, or one of another release."""
        if data is None:
            return None
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None

    def at(self, chunks: int) -> int:
        """How many bytes so many chunks of the upload have."""
        return min(chunks * CHUNK, self.length)


Revoked: TypeAlias = "Callable[[], Awaitable[Set[int]]]"


class StoppedUpload(Exception):
    """The task has ended, so its update is not waited for."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt.state)
        self.receipt = receipt


class UploadStops:
    """Asked between the chunks of an upload, with what is known without a heartbeat."""

    def __init__(
        self,
        sessions: DeviceSessions,
        run_cache: RunCache,
        tasks: Tasks,
        receipts: Receipts,
        revoked: Revoked,
    ) -> None:
        """``revoked``: the devices that an operator has revoked."""
        self._sessions = sessions
        self._run_cache = run_cache
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
            held = self._sessions.held(task, device)
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
        run, head = self._run_cache.run, self._run_cache.head
        if self._run_cache.is_over:
            return reasons.RUN_FINISHED
        if (why := await self._tasks.overdue(held)) is not None:
            return why
        advice = offers.advice(held, attempt, run, head, self._tasks.now())
        return reasons.BECAME_STALE if advice.why == "too stale" else None
