"""What a gateway answers to requests to an upload: how far it has got, and what became of it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from fedstream.broker.blobs import CHUNK
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.coordinator.gateway.upload_notes import EXPIRE_S
from fedstream.protocol import headers
from fedstream.protocol.messages import Receipt, WrongOffset

if TYPE_CHECKING:
    from fedstream.coordinator.gateway.upload_notes import UploadNote


_ASK_AGAIN_S = (1, 3)  # whoever asked together would come together again
_STATUS: Final = {"admitted": 200, "received": 202, "refused": 422, "given up": 422}


@dataclass(frozen=True, slots=True)
class UploadEnd:
    """What became of an update, and the note of its upload if that is still there."""

    receipt: Receipt
    note: UploadNote | None

    def answer(self, method: str) -> web.Response:
        """Answer any request to the upload. Raises Refusal."""
        if method == hdrs.METH_DELETE:
            raise complete()
        if method != hdrs.METH_HEAD:
            return receipt(self.receipt)
        if self.note is None or not self.note.complete:
            raise over()  # how long it was is not known, or it never got there
        return state(204, self.note, self.note.length)


def state(status: int, note: UploadNote, at: int, *, path: str | None = None) -> web.Response:
    """How far an upload has got. ``path``: where it goes on, if it is new."""
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
    """What became of an update, for the request that completes its upload and for those after."""
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
    """The header Upload-Limit, for uploads of at most so many bytes."""
    by_name = {headers.MOST: most, headers.LEAST_PART: CHUNK, headers.AGE: round(EXPIRE_S)}
    return {headers.LIMIT: headers.as_limits(by_name)}


class OffsetRefused(Refusal):
    """A part that does not begin where its upload has got to."""

    def __init__(self, *, expected: int, provided: int) -> None:
        super().__init__(
            409,
            "offset",
            f"the upload goes on at byte {expected}, not at {provided}",
            headers={headers.OFFSET: str(expected), headers.COMPLETE: headers.as_boolean(False)},
        )
        self._problem = WrongOffset(expected=expected, provided=provided)

    def document(self) -> tuple[bytes, str]:
        """A problem of the draft's type, which says both offsets."""
        return self._problem.encode(), headers.PROBLEM


def no_upload() -> Refusal:
    """Nothing is there to go on with."""
    return Refusal(404, "no upload", "no upload has begun here, or it expired: begin with POST")


def over() -> Refusal:
    """Nothing is left of the upload but what became of it."""
    return Refusal(410, "no upload", "the upload is over: its end, sent again, is answered by how")


def complete() -> Refusal:
    """It is too late to cancel."""
    return Refusal(409, "complete", "the update is complete, so it can't be cancelled any more")


def taken_over() -> Refusal:
    """The request was the older one of two."""
    return Refusal(409, "taken over", "a newer request for this upload has come: ask with HEAD")
