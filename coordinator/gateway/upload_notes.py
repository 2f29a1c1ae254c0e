"""Notes about uploads in Redis, with which any replica can continue; and stopping uploads."""

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

EXPIRE_S: Final = 600.0  # expiry of an incomplete upload after its last chunk


def upload_blob(client: Client, keys: Keys, site: str, task: str, attempt: str) -> PartialBlob:
    """The blob and the note of an attempt's upload."""
    name = f"{task}.{attempt}"
    key, note_key = keys.update(f"{site}/{name}"), keys.upload_note(site, name)
    return PartialBlob(client, key, note_key, expire_s=EXPIRE_S)


class Source(BaseModel):
    """The task of an update, as handed to this site."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    device: int
    seed: int
    stream: str
    entry: str  # its id in the stream


class UploadNote(BaseModel):
    """An upload's task, length and report."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    source: Source
    length: int  # bytes
    report: UpdateReport
    complete: bool = False  # the device has sent the last byte

    def encode(self) -> bytes:
        """Encode the note for Redis."""
        return self.model_dump_json().encode()

    @classmethod
    def parsed(cls, data: bytes | None) -> Self | None:
        """Decode a note; None if there is none or another release wrote it."""
        if data is None:
            return None
        try:
            return cls.model_validate_json(data)
        except ValidationError:
            return None

    def at(self, chunks: int) -> int:
        """The number of bytes in the first ``chunks`` chunks."""
        return min(chunks * CHUNK, self.length)


Revoked: TypeAlias = "Callable[[], Awaitable[Set[int]]]"


class StoppedUpload(Exception):
    """The task has ended, so its update is no longer needed."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt.state)
        self.receipt = receipt


class UploadStops:
    """Stops uploads whose update is no longer needed; called between chunks."""

    def __init__(
        self,
        sessions: DeviceSessions,
        run_cache: RunCache,
        tasks: Tasks,
        receipts: Receipts,
        revoked: Revoked,
    ) -> None:
        """``revoked``: reads the revoked devices."""
        self._sessions = sessions
        self._run_cache = run_cache
        self._tasks = tasks
        self._receipts = receipts
        self._revoked = revoked

    async def admit(self, device: int, blob: PartialBlob) -> None:
        """Raise Refusal if a device was revoked since its request began.

        A replica that holds the task gives it up by itself; a replica that has only the upload's
        note would accept the rest.
        """
        if device in await self._revoked():
            await blob.discard()
            raise Refusal(403, "revoked", "the operator has revoked this device")

    async def go_on(self, device: int, task: str, attempt: str) -> None:
        """Check, like a heartbeat, whether the rest of an upload is still needed.

        Raises StoppedUpload if its task has ended, or ends now.
        """
        try:
            held = self._sessions.held(task, device)
        except NotHeld:  # ended, or at another replica
            if (receipt := await self._receipts.now(task, attempt)) is not None:
                raise StoppedUpload(receipt) from None
            return
        if (why := await self._why_over(held, attempt)) is not None:
            await self._tasks.give_up(held, why)
            # A decision on an answer through another replica takes precedence.
            decided = await self._receipts.now(task, attempt)
            raise StoppedUpload(decided or Receipt(state="given up", reason=why))

    async def _why_over(self, held: Held, attempt: str) -> str | None:
        """The reason to give up a held task; None for none."""
        run, head = self._run_cache.run, self._run_cache.head
        if self._run_cache.is_over:
            return reasons.RUN_FINISHED
        if (why := await self._tasks.overdue(held)) is not None:
            return why
        advice = offers.advice(held, attempt, run, head, self._tasks.now())
        return reasons.BECAME_STALE if advice.why == "too stale" else None
