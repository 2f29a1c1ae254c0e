"""Answers to requests on uploads: the offset, the receipt, refusals, and early stops."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

from aiohttp import hdrs, web

from fedstream.broker.blobs import CHUNK
from fedstream.coordinator.gateway import offers
from fedstream.coordinator.gateway.device_sessions import NotHeld
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.coordinator.gateway.upload_notes import EXPIRE_S
from fedstream.core import reasons
from fedstream.protocol import headers
from fedstream.protocol.messages import Receipt, WrongOffset

if TYPE_CHECKING:
    from fedstream.broker.partial_blobs import PartialBlob
    from fedstream.coordinator.gateway.device_sessions import DeviceSessions, Held
    from fedstream.coordinator.gateway.receipts import Receipts
    from fedstream.coordinator.gateway.run_cache import RunCache
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.coordinator.gateway.upload_notes import UploadNote


_ASK_AGAIN_S = (1, 3)  # range of a random wait, so that devices don't retry together
_STATUS: Final = {"admitted": 200, "received": 202, "refused": 422, "given up": 422}


@dataclass(frozen=True, slots=True)
class UploadEnd:
    """The receipt of an update, and the note of its upload if it still exists."""

    receipt: Receipt
    note: UploadNote | None

    def answer(self, method: str) -> web.Response:
        """Answer a request on this upload. Raises Refusal."""
        if method == hdrs.METH_DELETE:
            raise complete()
        if method != hdrs.METH_HEAD:
            return receipt(self.receipt)
        if self.note is None or not self.note.complete:
            raise over()  # the length is unknown, or the upload was incomplete
        return state(204, self.note, self.note.length)


def state(status: int, note: UploadNote, at: int, *, path: str | None = None) -> web.Response:
    """Answer with an upload's offset. ``path``: of a new upload."""
    about = {
        headers.OFFSET: str(at),
        headers.COMPLETE: headers.as_boolean(note.complete),
        headers.LENGTH: str(note.length),
        hdrs.CACHE_CONTROL: "no-store",
        **limits(note.length),
    }
    if path is not None:
        about[hdrs.LOCATION] = path
    return web.Response(status=status, headers=about)


def receipt(said: Receipt) -> web.Response:
    """Answer with the receipt, to the request that completes the upload and to later ones."""
    about = {headers.COMPLETE: headers.as_boolean(True), hdrs.CACHE_CONTROL: "no-store"}
    if said.state == "received":
        about[hdrs.RETRY_AFTER] = str(random.randint(*_ASK_AGAIN_S))
    return web.Response(
        status=_STATUS[said.state],
        body=said.encode(),
        headers=about,
        content_type=headers.CONTENT_TYPE,
    )


def limits(most: int) -> dict[str, str]:
    """The header Upload-Limit, for uploads of at most ``most`` bytes."""
    by_name = {headers.MOST: most, headers.LEAST_PART: CHUNK, headers.AGE: round(EXPIRE_S)}
    return {headers.LIMIT: headers.as_limits(by_name)}


class OffsetRefused(Refusal):
    """A part does not begin at its upload's offset."""

    def __init__(self, *, expected: int, provided: int) -> None:
        super().__init__(
            409,
            "offset",
            f"the upload goes on at byte {expected}, not at {provided}",
            headers={headers.OFFSET: str(expected), headers.COMPLETE: headers.as_boolean(False)},
        )
        self._problem = WrongOffset(expected=expected, provided=provided)

    def document(self) -> tuple[bytes, str]:
        """A problem document of the draft's type, with both offsets."""
        return self._problem.encode(), headers.PROBLEM


def no_upload() -> Refusal:
    """The refusal if there is no upload to continue."""
    return Refusal(404, "no upload", "no upload has begun here, or it expired: begin with POST")


def over() -> Refusal:
    """The refusal if only the receipt is left of the upload."""
    return Refusal(410, "no upload", "the upload is over: its end, sent again, is answered by how")


def complete() -> Refusal:
    """The refusal to cancel a complete upload."""
    return Refusal(409, "complete", "the update is complete, so it can't be cancelled any more")


def taken_over() -> Refusal:
    """The refusal of a request that a newer one has replaced."""
    return Refusal(409, "taken over", "a newer request for this upload has come: ask with HEAD")


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
