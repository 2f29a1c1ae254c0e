"""Resumable uploads: an update arrives in one or many requests, and becomes a task's answer.

Uploads follow draft-ietf-httpbis-resumable-upload. Each whole chunk is written to the update's blob
at once; an interrupted upload continues after the chunks in Redis, at any replica. Device, site and
task come from the held task and not from the request, and sizes are checked against the run's
layout before the body is read.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import hdrs, web

from fedstream.broker.blobs import CHUNK, chunks_of
from fedstream.broker.partial_blobs import Written
from fedstream.broker.streams import Entry
from fedstream.coordinator.gateway import upload_messages
from fedstream.coordinator.gateway.device_sessions import NotHeld
from fedstream.coordinator.gateway.handover import HeldElsewhere
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.coordinator.gateway.upload_locks import TakenOver, UploadLocks
from fedstream.coordinator.gateway.upload_messages import (
    Chunks,
    OffsetRefused,
    TooLong,
    UploadEnd,
    UploadPart,
)
from fedstream.coordinator.gateway.upload_state import (
    EXPIRE_S,
    Receipts,
    Source,
    UploadNote,
    upload_blob,
)
from fedstream.core.errors import BlobMissing
from fedstream.core.messages import Assignment, Upload
from fedstream.protocol import headers
from fedstream.protocol.messages import ATTEMPT_ID, TASK_ID, Receipt

if TYPE_CHECKING:
    from fedstream.broker.commands import Command
    from fedstream.broker.partial_blobs import PartialBlob
    from fedstream.coordinator.gateway.device_sessions import Held
    from fedstream.coordinator.gateway.handover import HandOvers
    from fedstream.coordinator.gateway.metrics import GatewayMetrics
    from fedstream.coordinator.gateway.replica import Replica
    from fedstream.coordinator.gateway.tasks import Tasks
    from fedstream.coordinator.gateway.upload_locks import UploadLock
    from fedstream.protocol.messages import UpdateReport

_NOTE_S = 60.0  # expiry of the note of an update that came in one request
PLACE = 2 << 20  # bytes of memory per upload: a chunk, and bytes that arrive meanwhile
_NOTHING = Written(note=None, chunks=None)
_NAMES = re.compile(f"{TASK_ID}/{ATTEMPT_ID}")


class StoppedUpload(Exception):
    """The task has ended, so its update is no longer needed."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt.state)
        self.receipt = receipt


@dataclass(frozen=True, slots=True)
class _Mine:
    """An upload, while a request holds its lock."""

    task: str
    attempt: str
    source: Source
    lock: UploadLock
    blob: PartialBlob
    in_hand: bool  # the task was held when the request came; else only the note is known
    is_first: bool = False  # the first request at any replica, so there can be no blob yet


class Uploads:
    """The uploads at one replica."""

    def __init__(
        self,
        replica: Replica,
        tasks: Tasks,
        moves: HandOvers,
        metrics: GatewayMetrics,
        revoked: Callable[[], Awaitable[Set[int]]],
    ) -> None:
        """``revoked``: reads the revoked devices."""
        self._client = replica.client
        self._keys = replica.keys
        self._outbox = replica.outbox
        self._run_cache = replica.run_cache
        self._sessions = replica.sessions
        self._settings = replica.settings
        self._name = replica.name
        self._receipts = Receipts(replica.ledger.fates, replica.ledger.is_open)
        self._tasks = tasks
        self._moves = moves
        self._metrics = metrics
        self._revoked = revoked
        self._locks = UploadLocks()
        self._methods = {
            hdrs.METH_POST: self._create,
            hdrs.METH_PATCH: self._append,
            hdrs.METH_HEAD: self._look,
            hdrs.METH_DELETE: self._cancel,
        }
        self._receiving = 0  # places taken by bodies

    async def end(self) -> None:
        """Wait until all requests on uploads are answered."""
        await self._locks.end()

    async def answer(self, request: web.Request, device: int) -> web.Response:
        """Answer a request on an upload; ``device``: by the request's token.

        Raises Refusal, and BrokerError while Redis is away or full; the device then continues the
        upload later, after the chunks in Redis.
        """
        task, attempt = request.match_info["task"], request.match_info["attempt"]
        if not _NAMES.fullmatch(f"{task}/{attempt}"):
            raise NotHeld(task)
        blob = upload_blob(self._client, self._keys, self._outbox.site, task, attempt)
        source = await self._source(task, attempt, device, blob)
        if isinstance(source, UploadEnd):
            return source.answer(request.method)
        in_hand = task in self._sessions
        is_first = in_hand and self._sessions.held(task, device).is_untouched
        if is_first:
            self._sessions.held(task, device).is_untouched = False
        try:
            async with self._locks.taken(f"{task}.{attempt}") as lock:
                mine = _Mine(task, attempt, source, lock, blob, in_hand, is_first)
                return await self._methods[request.method](request, mine)
        except TakenOver:
            raise upload_messages.taken_over() from None
        except StoppedUpload as error:
            return upload_messages.receipt(error.receipt)
        except BlobMissing:
            receipt = await self._receipts.now(task, attempt)
            if receipt is None:
                raise upload_messages.no_upload() from None
            return UploadEnd(receipt, None).answer(request.method)  # the task ended meanwhile

    async def _source(
        self, task: str, attempt: str, device: int, blob: PartialBlob
    ) -> Source | UploadEnd:
        """The task that an upload answers, or the end of the upload. Raises Refusal."""
        try:
            held = self._sessions.held(task, device)
        except NotHeld:
            note = UploadNote.parsed((await blob.written()).note)
            if note is not None and note.source.device != device:
                raise
            receipt = await self._receipts.now(task, attempt)
            if receipt is not None:
                return UploadEnd(receipt, note)
            if note is not None and note.complete:
                return note.source  # answered, but not decided yet
            try:
                held = await self._moves.find(task, device)
            except (NotHeld, HeldElsewhere):
                if note is None:
                    raise
                return note.source  # begun at a replica that is away
        if held.attempt != attempt:
            raise Refusal(
                404, "unknown task", f"attempt {attempt} is not the current one: check in again"
            )
        return _source_of(held)

    # the four methods

    async def _create(self, request: web.Request, mine: _Mine) -> web.Response:
        """Create an upload, with a first part, the whole update, or no bytes yet.

        A repeated request continues the upload; a different report begins it anew.
        """
        asked = upload_messages.creation(request)
        self._fits(asked.length, asked.report)
        note = UploadNote(source=mine.source, length=asked.length, report=asked.report)
        part = asked.part
        written = _NOTHING if mine.is_first else await mine.blob.written()
        was = UploadNote.parsed(written.note)
        if was is not None and was.complete:
            with suppress(BlobMissing):
                return await self._finished(mine, was)
        goes_on = written.note == note.encode() and written.chunks is not None
        if part.size == 0 and not part.completes:
            if not goes_on:
                await self._begin(mine, note)
            at = note.at(written.chunks or 0) if goes_on else 0
            return upload_messages.state(201, note, at, path=request.path)
        self._check(part, note.length, at=0)
        if part.completes and note.length <= CHUNK:
            return await self._whole(request, mine, note)
        return await self._received(request, mine, note, part, anew=not goes_on)

    async def _append(self, request: web.Request, mine: _Mine) -> web.Response:
        """Append a part at the upload's offset; for an ended upload, answer with the receipt."""
        part = upload_messages.part(request)
        note, at = await self._begun(mine)
        if part.repeats_the_end(length=note.length, at=at):
            return await self._finished(mine, note)
        self._check(part, note.length, at=at)
        if upload_messages.stated_length(request) not in (None, note.length):
            raise Refusal(400, "length", f"the upload was to have {note.length} bytes")
        return await self._received(request, mine, note, part)

    async def _look(self, _request: web.Request, mine: _Mine) -> web.Response:
        note, at = await self._begun(mine)
        return upload_messages.state(204, note, at)

    async def _cancel(self, _request: web.Request, mine: _Mine) -> web.Response:
        """Delete the upload; the task stays held."""
        note, _ = await self._begun(mine)
        if note.complete:
            raise upload_messages.complete()
        await mine.blob.discard()
        return web.Response(status=204)

    async def _begin(self, mine: _Mine, note: UploadNote) -> None:
        """Begin the blob, unless the task was given up meanwhile. Raises NotHeld."""
        await mine.blob.begin(note.length, note.encode())
        if mine.in_hand and mine.task not in self._sessions:
            await mine.blob.discard()
            raise NotHeld(mine.task)

    async def _begun(self, mine: _Mine) -> tuple[UploadNote, int]:
        """The note and the offset of an upload. Raises Refusal if there is no upload."""
        written = await mine.blob.written()
        note = UploadNote.parsed(written.note)
        if note is None or (written.chunks is None and not note.complete):
            raise upload_messages.no_upload()
        chunks = chunks_of(note.length) if written.chunks is None else written.chunks
        return note, note.at(chunks)

    # receiving

    @contextmanager
    def place(self, places: int = 1) -> Iterator[None]:
        """Take places for a body inside the block, each for ``PLACE`` bytes.

        A single body always gets its places. Raises Refusal.
        """
        if self._receiving and self._receiving + places > self._settings.uploads:
            raise Refusal(
                503,
                "busy",
                "too many uploads are in progress (gateway.uploads): try again later",
                retry_after_s=self._settings.retry_s[0],
            )
        self._receiving += places
        try:
            with self._metrics.uploads.track_inprogress():
                yield
        finally:
            self._receiving -= places

    async def _whole(self, request: web.Request, mine: _Mine, note: UploadNote) -> web.Response:
        """Receive an update of one chunk in one request, and write it with the task's answer."""
        found: list[bytearray] = []
        note = note.model_copy(update={"complete": True})

        async def keep(_number: int, chunk: bytearray) -> None:
            found.append(chunk)

        with self.place():
            await self._take(request, mine, Chunks(note.length, 0), keep, completes=True)
            data = memoryview(found.pop())
            ahead = mine.blob.whole(data, note.encode(), note_expire_s=_NOTE_S)
            await self._hand_over(mine, note, ahead)
            del data, ahead  # free the bytes during the wait for the receipt
        return await self._told(mine, note)

    async def _received(
        self,
        request: web.Request,
        mine: _Mine,
        note: UploadNote,
        part: UploadPart,
        *,
        anew: bool = False,
    ) -> web.Response:
        """Write the chunks of this part as they arrive, and answer the task after the last part.

        ``anew``: the upload begins with this part.
        """
        last = chunks_of(note.length) - 1
        begun, done = note.encode(), note.model_copy(update={"complete": True})

        async def write(number: int, chunk: bytearray) -> None:
            ends = part.completes and number == last
            await mine.blob.put(number, memoryview(chunk), begun, done.encode() if ends else None)
            await upload_messages.announce(request, {headers.OFFSET: str(chunks.offset)})

        chunks = Chunks(note.length, part.offset)
        with self.place():
            if anew:
                await self._begin(mine, note)
            if request.method == hdrs.METH_POST:
                about = {hdrs.LOCATION: request.path, **upload_messages.limits(note.length)}
                await upload_messages.announce(request, about)
            await self._take(request, mine, chunks, write, completes=part.completes)
        if part.completes:
            return await self._finished(mine, done)
        if request.method == hdrs.METH_POST:
            return upload_messages.state(201, note, chunks.offset, path=request.path)
        return upload_messages.state(204, note, chunks.offset)

    async def _take(
        self,
        request: web.Request,
        mine: _Mine,
        chunks: Chunks,
        use: Callable[[int, bytearray], Awaitable[None]],
        *,
        completes: bool,
    ) -> None:
        """Read the body, and call ``use`` with each whole chunk. Raises Refusal, TakenOver."""
        loop = asyncio.get_running_loop()
        if chunks.missing > CHUNK:
            await self._go_on(mine.source.device, mine.task, mine.attempt)
        await upload_messages.go_ahead(request)
        until = loop.time() + self._settings.chunk_s
        try:
            while data := await mine.lock.within(until, request.content.readany):
                self._metrics.upload_bytes.inc(len(data))
                self._sessions.heard(mine.source.device, time.monotonic())
                for number, chunk in chunks.take(data):
                    await self._check_revoked(mine.source.device, mine.blob)
                    await use(number, chunk)
                    if chunks.missing:
                        await self._go_on(mine.source.device, mine.task, mine.attempt)
                    until = loop.time() + self._settings.chunk_s
        except TimeoutError:
            raise Refusal(
                408, "too slow", f"not {CHUNK} bytes within {self._settings.chunk_s:g} s"
            ) from None
        except TooLong:
            await mine.blob.discard()
            raise Refusal(400, "length", "more bytes than the upload has") from None
        if completes and not chunks.is_whole:
            raise Refusal(400, "length", f"the upload ends after {chunks.received} bytes")

    # an upload that is no longer needed

    async def _check_revoked(self, device: int, blob: PartialBlob) -> None:
        """Raise Refusal if a device was revoked since its request began.

        A replica that holds the task gives it up by itself; a replica that has only the upload's
        note would accept the rest.
        """
        if device in await self._revoked():
            await blob.discard()
            raise Refusal(403, "revoked", "the operator has revoked this device")

    async def _go_on(self, device: int, task: str, attempt: str) -> None:
        """Check, like a heartbeat, whether the rest of an upload is still needed.

        Raises StoppedUpload if its task has ended, or ends now.
        """
        try:
            held = self._sessions.held(task, device)
        except NotHeld:  # ended, or at another replica
            if (receipt := await self._receipts.now(task, attempt)) is not None:
                raise StoppedUpload(receipt) from None
            return
        _, why = await self._tasks.advise(held, attempt)
        if why is not None:
            await self._tasks.give_up(held, why)
            # A decision on an answer through another replica takes precedence.
            decided = await self._receipts.now(task, attempt)
            raise StoppedUpload(decided or Receipt(state="given up", reason=why))

    async def deliver(self, held: Held, report: UpdateReport, data: memoryview) -> None:
        """Answer a task with an update in memory, as if its device had uploaded it.

        Raises Refusal, and BrokerError while Redis is away or full; the caller may then retry.
        """
        self._fits(data.nbytes, report)
        task, attempt = held.task.task, held.attempt
        source = _source_of(held)
        note = UploadNote(source=source, length=data.nbytes, report=report)
        done = note.model_copy(update={"complete": True})
        blob = upload_blob(self._client, self._keys, self._outbox.site, task, attempt)
        last = chunks_of(data.nbytes) - 1
        ahead: Sequence[Command] = ()
        self._metrics.upload_bytes.inc(data.nbytes)
        try:
            async with self._locks.taken(f"{task}.{attempt}") as lock:
                mine = _Mine(task, attempt, source, lock, blob, in_hand=True)
                if not last:
                    ahead = blob.whole(data, done.encode(), note_expire_s=_NOTE_S)
                else:
                    await self._begin(mine, note)
                    for number in range(last + 1):
                        chunk = data[number * CHUNK : (number + 1) * CHUNK]
                        changed = done.encode() if number == last else None
                        await blob.put(number, chunk, note.encode(), changed)
                await self._hand_over(mine, done, ahead)
        except TakenOver:
            raise upload_messages.taken_over() from None

    # the end

    async def _finished(self, mine: _Mine, note: UploadNote) -> web.Response:
        """Answer the task, unless it was answered before, and wait for the receipt.

        Raises BlobMissing if the update is gone, so the upload must begin anew.
        """
        if not note.complete:
            note = note.model_copy(update={"complete": True})
            await mine.blob.mark(note.encode())
        await self._hand_over(mine, note)
        return await self._told(mine, note)

    async def _hand_over(
        self, mine: _Mine, note: UploadNote, ahead: Sequence[Command] = ()
    ) -> None:
        """Answer the task unless it was answered. ``ahead``: commands that write the blob."""
        source, upload = mine.source, self._upload(mine, note)
        said = await self._outbox.answer(
            source.stream, Entry(source.entry, b""), upload, expire_s=EXPIRE_S, ahead=ahead
        )
        if said == "unwritten":
            await mine.blob.discard()
            raise BlobMissing(upload.blob)
        self._tasks.answered(upload, said=said == "said")

    async def _told(self, mine: _Mine, note: UploadNote) -> web.Response:
        """Wait for the receipt. Raises BlobMissing if Redis has forgotten task and update."""
        receipt = await self._receipts.of(mine.task, mine.attempt, mine.lock)
        if receipt is not None and receipt.state == "received":
            if (await mine.blob.written()).chunks is not None:
                await mine.blob.mark(note.encode())  # for requests that come much later
                return upload_messages.receipt(receipt)
            # Without a blob, either a decision took it, so there is a receipt, or it expired.
            receipt = await self._receipts.now(mine.task, mine.attempt)
        if receipt is None:
            await mine.blob.discard()
            raise BlobMissing(f"{mine.task}.{mine.attempt}")
        return upload_messages.receipt(receipt)

    def _upload(self, mine: _Mine, note: UploadNote) -> Upload:
        """The task's answer, with only those of the device's values that the gateway can't know."""
        report = note.report
        return Upload(
            task=mine.task,
            attempt=mine.attempt,
            device=mine.source.device,
            trainer=self._name,
            tau=report.tau,
            base=report.base,
            layout=report.layout,
            digest=report.digest,
            size=note.length,
            samples=report.samples,
            steps=report.steps,
            lr=report.lr,
            loss=report.loss,
            seconds=report.seconds,
            seed=mine.source.seed,
            sends=self._run_cache.run.sends,
            site=self._outbox.site,
            chunks=chunks_of(note.length),
            format=report.format,
            sealed=report.seal,
        )

    # requests and responses

    def _fits(self, length: int, report: UpdateReport) -> None:
        """Raise Refusal if the length or report can't be of an update of this run."""
        layout = self._run_cache.run.layout
        formats = self._run_cache.formats
        wire = formats.get(report.format)
        if wire is None:
            raise Refusal(
                422,
                "format",
                f"an update in {report.format}; expected {' or '.join(formats)}",
            )
        if wire.is_masked and report.sealed is None:
            raise Refusal(422, "format", "an update of a private run needs the seal of its mask")
        if report.layout != layout.signature:
            raise Refusal(422, "format", "the layout is not that of the run's model")
        least, most = wire.sizes(layout)
        if length > most:
            raise Refusal(
                413,
                "too large",
                f"{length} bytes; an update in {wire.name} has at most {most}",
                headers=upload_messages.limits(most),
            )
        if length < least:
            raise Refusal(
                400, "length", f"{length} bytes; an update in {wire.name} has at least {least}"
            )

    def _check(self, part: UploadPart, length: int, *, at: int) -> None:
        """Raise Refusal if the upload can't continue with this part."""
        match part.flaw(length=length, at=at):
            case "offset":
                raise OffsetRefused(expected=at, provided=part.offset)
            case "length":
                raise Refusal(
                    400,
                    "length",
                    f"{part.size} bytes at {at} of {length}: too many, or too few for the end",
                )
            case "too short":
                raise Refusal(
                    400,
                    "length",
                    f"{part.size} bytes: all parts but the last have at least {CHUNK}",
                    headers=upload_messages.limits(length),
                )


def _source_of(held: Held) -> Source:
    """The source of a held task's update. Raises NotHeld for an evaluation."""
    task = held.task
    if not isinstance(task, Assignment):
        raise NotHeld(task.task)
    return Source(device=task.device, seed=task.seed, stream=held.stream, entry=held.entry.id)
