"""Reading queue entries, and prefetching their updates."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.keys import Keys
from fedstream.broker.link import Started
from fedstream.broker.streams import Entry, Look, Reader
from fedstream.core.errors import BadMessage, BlobDamaged, BlobMissing, BrokerError
from fedstream.core.formats import F32
from fedstream.core.layout import Layout, Payload
from fedstream.core.messages import (
    DevicesEvaluated,
    RoundEnd,
    SetQuarantine,
    StepProposed,
    Upload,
    decode,
)
from fedstream.updater.buffers import BufferPool
from fedstream.updater.decider import LARGE, QueueMessage, refusal_by_format
from fedstream.updater.state import Ends

BATCH = 16  # entries per read; small updates share a journal write


def is_small(layout: Layout) -> bool:
    """Whether a model fits into one chunk, so that updates are fetched and committed together."""
    return layout.nbytes <= blobs.CHUNK


def together(layout: Layout) -> int:
    """The number of updates that are decided on together."""
    return max(1, min(BATCH, LARGE // max(1, layout.nbytes)))


@dataclass(frozen=True, slots=True)
class Queued:
    """An entry of the queue, and its message."""

    entry: Entry
    message: QueueMessage | BadMessage


class Intake:
    """Reads the queue in order, without a consumer group.

    Fetches small updates together, and prefetches at most one large update.
    """

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._reader = Reader(client, {keys.queue: "0"})
        self.backlog: deque[Queued] = deque()
        self.looking: Started | None = None  # a blocking read of the queue under way
        self.fetches: dict[str, asyncio.Task[Payload]] = {}  # of large updates, by entry
        self.arrived: dict[str, Fetched] = {}  # small updates, by entry
        self.spares = BufferPool()

    # entries

    async def read(self, block_ms: int) -> bool:
        """Read new queue entries into the backlog; return whether there were any.

        A read under way (:meth:`look`) is completed instead; ``block_ms`` is then ignored.
        """
        looking, self.looking = self.looking, None
        if looking is None:
            reply = await self._client.call(*self._command(block_ms), wait_s=block_ms / 1000)
        else:
            reply = await looking.last()
        entries = self._reader.found(reply).get(self._keys.queue, [])
        self.backlog.extend(Queued(entry, _message(entry)) for entry in entries)
        return bool(entries)

    def look(self, block_ms: int) -> Look:
        """A read to send behind other commands in one exchange; :meth:`read` then completes it."""
        return Look(self._command(block_ms), block_ms / 1000, self._begun)

    def _begun(self, look: Started) -> None:
        self.looking = look

    def _stop_looking(self) -> None:
        looking, self.looking = self.looking, None
        if looking is not None:
            looking.close()

    def _command(self, block_ms: int) -> Command:
        return self._reader.command(count=BATCH, block_ms=block_ms)

    async def left(self) -> int:
        """The number of entries in the queue, whether we have read them or not."""
        return int(await self._client.call("XLEN", self._keys.queue))

    def rewind(self) -> None:
        """Go back to the beginning of the queue."""
        self._stop_looking()
        self.backlog.clear()
        self._reader.rewind(self._keys.queue)

    # updates

    async def fetched(self, entry: Entry, upload: Upload, layout: Layout, ends: Ends) -> Payload:
        """The update as received: a Model unless it is encoded.

        The upload must have passed the checks of its metadata. A small update is fetched together
        with the next ones in the backlog; a large one was usually prefetched during the previous
        update's mixing. Raises BlobMissing or BlobDamaged.
        """
        if is_small(layout):
            if entry.id not in self.arrived:
                await self._fetch_together(Queued(entry, upload), layout, ends)
            arrived = self.arrived.pop(entry.id)
            if arrived.failure is not None:
                self.spares.give_back(arrived.update)
                raise arrived.failure
            return arrived.update
        fetch = self.fetches.pop(entry.id, None) or self._fetch(upload, layout)
        self._fetch_ahead(1, layout, ends)
        try:
            return await fetch
        except asyncio.CancelledError:
            fetch.cancel()
            raise

    async def read_ahead(self, layout: Layout, ends: Ends) -> None:
        """Start prefetching the next update if it is large and already queued."""
        if is_small(layout):
            return
        if not self.backlog:
            await self.read(block_ms=0)
        self._fetch_ahead(0, layout, ends)

    async def unfetch(self, entry: Entry) -> None:
        """Free the memory of a fetched update that will not be used."""
        arrived = self.arrived.pop(entry.id, None)
        if arrived is not None:
            self.spares.give_back(arrived.update)
        fetch = self.fetches.pop(entry.id, None)
        if fetch is not None:
            with suppress(BrokerError):
                self.spares.give_back(await fetch)

    async def close(self) -> None:
        """Abandon the read under way and all prefetches."""
        self._stop_looking()
        await self.forget_fetches()

    async def forget_fetches(self) -> None:
        """Cancel all prefetches, and free the memory of fetched updates."""
        for id_ in [*self.arrived]:
            self.spares.give_back(self.arrived.pop(id_).update)
        for fetch in self.fetches.values():
            fetch.cancel()
        await asyncio.gather(*self.fetches.values(), return_exceptions=True)
        self.fetches.clear()

    async def _fetch_together(self, first: Queued, layout: Layout, ends: Ends) -> None:
        """Fetch a small update and the next ones in the backlog, in one exchange."""
        group = {first.entry.id: first}
        for queued in islice(self.backlog, together(layout)):
            message = queued.message
            if isinstance(message, Upload) and _is_fit(message, layout, ends):
                group.setdefault(queued.entry.id, queued)
        for id_ in self.arrived.keys() - group.keys():  # of entries that Redis has forgotten
            self.spares.give_back(self.arrived.pop(id_).update)
        wanted: dict[str, blobs.Wanted] = {}
        for id_, queued in group.items():
            upload = queued.message
            if id_ not in self.arrived and isinstance(upload, Upload):
                key, into = self._keys.queued(upload.blob), self._room(upload, layout)
                wanted[id_] = blobs.Wanted(key, into, upload.digest, upload.chunks)
        try:
            failures = await blobs.read_together(self._client, [*wanted.values()])
        except BaseException:
            for one in wanted.values():
                self.spares.give_back(one.into)
            raise
        for (id_, one), failure in zip(wanted.items(), failures, strict=True):
            self.arrived[id_] = Fetched(one.into, failure)

    def _room(self, upload: Upload, layout: Layout) -> Payload:
        """Memory for an update whose size was checked."""
        spares = self.spares
        return spares.model(layout) if upload.format == F32.name else spares.room(upload.size)

    def _fetch(self, upload: Upload, layout: Layout) -> asyncio.Task[Payload]:
        into = self._room(upload, layout)
        key = self._keys.queued(upload.blob)

        async def read() -> Payload:
            await blobs.read(self._client, key, into, digest=upload.digest, chunks=upload.chunks)
            return into

        return asyncio.create_task(read(), name=f"fetch {upload.blob}")

    def _fetch_ahead(self, place: int, layout: Layout, ends: Ends) -> None:
        """Prefetch one update of the backlog, so that four models are in memory at most.

        An encoded update is decoded only when it is processed, so memory then has three models
        and two encoded updates.
        """
        if len(self.backlog) <= place or self.fetches:
            return
        following = self.backlog[place]
        upload = following.message
        if isinstance(upload, Upload) and _is_fit(upload, layout, ends):
            self.fetches[following.entry.id] = self._fetch(upload, layout)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetched small update, or the error of its fetch."""

    update: Payload
    failure: BlobMissing | BlobDamaged | None


def _message(entry: Entry) -> QueueMessage | BadMessage:
    try:
        return decode(entry.data, Upload, RoundEnd, SetQuarantine, DevicesEvaluated, StepProposed)
    except BadMessage as error:
        return error


def _is_fit(upload: Upload, layout: Layout, ends: Ends) -> bool:
    """Whether an update may be fetched early, as its size is right and its task is open."""
    return (
        upload.layout == layout.signature
        and not refusal_by_format(upload, layout)
        and ends.get(upload.task) is None
    )
