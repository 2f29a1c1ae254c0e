"""Requests on uploads and their answers: headers, parts, chunks, receipts, interim responses.

An upload keeps whole chunks of equal length (except the last), so its offset is a multiple of that
length, or the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from aiohttp import HttpVersion11, hdrs, web

from fedstream.broker.blobs import CHUNK
from fedstream.coordinator.gateway.refusals import Refusal, json_answer
from fedstream.coordinator.gateway.upload_state import EXPIRE_S
from fedstream.protocol import headers
from fedstream.protocol.messages import BadBody, Receipt, UpdateReport, WrongOffset

if TYPE_CHECKING:
    from fedstream.coordinator.gateway.upload_state import UploadNote

METHODS: Final = (hdrs.METH_POST, hdrs.METH_HEAD, hdrs.METH_PATCH, hdrs.METH_DELETE)

_ASK_AGAIN_S = (1, 3)  # range of a random wait, so that devices don't retry together
_STATUS: Final = {"admitted": 200, "received": 202, "refused": 422, "given up": 422}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SUPPORTED = "HTTP/1.1 104 Upload Resumption Supported\r\n"

T = TypeVar("T")
Flaw = Literal["offset", "length", "too short"]


class TooLong(ValueError):
    """More bytes than the upload's length."""


@dataclass(frozen=True, slots=True)
class UploadPart:
    """The position of a request's body in its upload."""

    offset: int
    size: int | None  # bytes; None: not stated
    completes: bool  # whether the upload ends with this part

    def flaw(self, *, length: int, at: int, chunk: int = CHUNK) -> Flaw | None:
        """Why an upload of ``length`` bytes at offset ``at`` can't continue with this part.

        None if it can. "too short": the part would fill no chunk.
        """
        if self.offset != at:
            return "offset"
        if self.size is None:
            return None
        end = at + self.size
        if end > length or (self.completes and end < length):
            return "length"
        if not self.completes and 0 < self.size < chunk and end < length:
            return "too short"
        return None

    def repeats_the_end(self, *, length: int, at: int) -> bool:
        """Whether this part, perhaps empty, is the end of an upload that has all its bytes."""
        if not self.completes or at < length or self.offset > length:
            return False
        return self.size is None or self.offset + self.size == length


class Chunks:
    """Splits the bytes of an upload into chunks, from an offset on; buffers one chunk."""

    def __init__(self, length: int, at: int, *, chunk: int = CHUNK) -> None:
        """``at``: a multiple of ``chunk``, or ``length``."""
        self._length = length
        self._chunk = chunk
        self._begin = at  # offset of the chunk being filled
        self._held = bytearray()

    @property
    def received(self) -> int:
        """Received bytes of the upload, including an incomplete chunk."""
        return self._begin + len(self._held)

    @property
    def offset(self) -> int:
        """Bytes of the upload in whole chunks."""
        return self._begin

    @property
    def missing(self) -> int:
        """Bytes of the upload that are not yet in whole chunks."""
        return self._length - self._begin

    @property
    def is_whole(self) -> bool:
        """Whether all bytes have arrived."""
        return not self.missing

    @property
    def number(self) -> int:
        """The number of the chunk being filled."""
        return -(-self._begin // self._chunk)

    def take(self, data: bytes) -> Iterator[tuple[int, bytearray]]:
        """Add bytes; yield the number and the bytes of each chunk that they fill.

        Raises TooLong above the upload's length.
        """
        rest = memoryview(data)
        while rest:
            size = min(self._chunk, self._length - self._begin)
            room = size - len(self._held)
            if not room:
                raise TooLong
            self._held += rest[:room]
            rest = rest[room:]
            if len(self._held) == size:
                number, whole = self.number, self._held
                self._begin += size
                self._held = bytearray()
                yield number, whole


# requests


@dataclass(frozen=True, slots=True)
class Creation:
    """The headers of a request to create an upload."""

    length: int  # bytes
    report: UpdateReport
    part: UploadPart  # the part in the request's body


def creation(request: web.Request) -> Creation:
    """Parse the headers of a request to create an upload. Raises Refusal."""
    completes, size = _completes(request), _size(request)
    length = stated_length(request)
    if length is None and completes:
        length = size
    if length is None:
        raise Refusal(411, "length", f"{headers.LENGTH} must say how many bytes will come")
    report = _header(request, headers.REPORT, _report)
    if report is None:
        raise Refusal(400, "malformed", f"{headers.REPORT} must say what the update is")
    return Creation(length, report, UploadPart(0, size, completes))


def part(request: web.Request) -> UploadPart:
    """Parse the headers of a request to continue an upload. Raises Refusal."""
    media_type = request.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0]
    if media_type.strip().lower() != headers.PARTIAL:
        raise Refusal(
            415,
            "malformed",
            f"Content-Type must be {headers.PARTIAL}",
            headers={"Accept-Patch": headers.PARTIAL},
        )
    offset = _header(request, headers.OFFSET, headers.integer)
    if offset is None:
        raise Refusal(400, "malformed", f"{headers.OFFSET} must say where the part begins")
    return UploadPart(offset, _size(request), _completes(request))


def stated_length(request: web.Request) -> int | None:
    """The stated length of the whole upload in bytes; None if not stated. Raises Refusal."""
    return _header(request, headers.LENGTH, headers.integer)


def _header(request: web.Request, name: str, parse: Callable[[str, str], T]) -> T | None:
    """A header's value, or None. Raises Refusal if the header is malformed or repeated."""
    values = request.headers.getall(name, ())
    if not values:
        return None
    if len(values) > 1:
        raise Refusal(400, "malformed", f"{name} is there {len(values)} times")
    try:
        return parse(name, values[0])
    except (headers.BadHeader, BadBody) as error:
        raise Refusal(400, "malformed", str(error)) from error


def _report(name: str, value: str) -> UpdateReport:
    if len(value) > headers.REPORT_CHARS:
        raise headers.BadHeader(f"{name}: more than {headers.REPORT_CHARS} characters")
    return UpdateReport.decode(value)


def _completes(request: web.Request) -> bool:
    completes = _header(request, headers.COMPLETE, headers.boolean)
    if completes is None:
        raise Refusal(400, "malformed", f"{headers.COMPLETE} must say whether this is the end")
    return completes


def _size(request: web.Request) -> int | None:
    """The stated size of a request's body, or None. Raises Refusal for a coded body."""
    if hdrs.CONTENT_ENCODING in request.headers:
        raise Refusal(415, "malformed", "content codings are not supported: send the bytes alone")
    return request.content_length if request.body_exists else 0


async def wait_for_checks(_request: web.Request) -> None:
    """Suppress aiohttp's automatic 100 (Continue), as the handler may refuse the body."""


async def go_ahead(request: web.Request) -> None:
    """Send 100 (Continue) to a client that waits for it."""
    expected = request.headers.get(hdrs.EXPECT, "").lower()
    if request.version == HttpVersion11 and expected == "100-continue":
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0  # the response is still to come


async def announce(request: web.Request, about: Mapping[str, str]) -> None:
    """Send an interim response (104) to a client that can read it.

    Such a client names its version of the draft. Other clients may mistake an interim response
    other than 100 for the final one, as Python's ``http.client`` does.
    """
    said = request.headers.getall(headers.INTEROP, ())
    if request.version != HttpVersion11 or [*said] != [headers.INTEROP_VERSION]:
        return
    about = {headers.INTEROP: headers.INTEROP_VERSION, **about}
    lines = "".join(f"{name}: {value}\r\n" for name, value in about.items())
    await request.writer.write(f"{_SUPPORTED}{lines}\r\n".encode())
    request.writer.output_size = 0  # the response is still to come


# answers


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
    """Answer with an upload's offset. ``path``: the path of a new upload."""
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
    return json_answer(said, _STATUS[said.state], about)


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
