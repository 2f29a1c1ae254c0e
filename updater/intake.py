"""Reading queue entries, and prefetching the updates that they name."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.errors import BadMessage, BrokerError
from fedstream.broker.keys import Keys
from fedstream.broker.layout import Layout, Model, Payload
from fedstream.broker.messages import Upload, decode
from fedstream.broker.streams import Entry, Reader
from fedstream.updater.refusals import by_format
from fedstream.updater.state import Ends
from fedstream.wire import F32

BATCH = 16  # entries that are read together; small ones share a journal write


class Intake:
    """Reads the queue in order, without a consumer group, and prefetches one update."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._reader = Reader(client, {keys.queue: "0"})
        self.backlog: deque[Entry] = deque()
        self.fetches: dict[str, asyncio.Task[Payload]] = {}  # by entry
        self.free: list[Model] = []  # models to reuse

    # entries

    async def read(self, block_ms: int) -> bool:
        """Read new queue entries into the backlog; return whether there were any."""
        new = await self._reader.read(count=BATCH, block_ms=block_ms)
        entries = new.get(self._keys.queue, [])
        self.backlog.extend(entries)
        return bool(entries)

    async def left(self) -> int:
        """Number of entries in the queue, whether read or not."""
        return int(await self._client.call("XLEN", self._keys.queue))

    def rewind(self) -> None:
        """Go back to the beginning of the queue."""
        self.backlog.clear()
        self._reader.rewind(self._keys.queue)

    # updates

    def spare(self, layout: Layout) -> Model:
        """A model to write into."""
        return self.free.pop() if self.free else Model(layout)

    def take_back(self, used: Iterable[Model], in_use: Iterable[Model]) -> None:
        """Keep for reuse those of the ``used`` models that are not in use any more."""
        kept = {id(model) for model in in_use}
        self.free += [model for model in used if id(model) not in kept]

    def give_back(self, update: Payload) -> None:
        """Keep for reuse what :meth:`fetched` returned, if it is a model."""
        if isinstance(update, Model):
            self.free.append(update)

    async def fetched(self, entry: Entry, upload: Upload, layout: Layout, ends: Ends) -> Payload:
        """The update as it was sent, usually prefetched while the one before was being mixed in.

        It passed :func:`fedstream.updater.refusals.by_word`. A Model if it is not encoded.
        """
        fetch = self.fetches.pop(entry.id, None) or self._fetch(upload, layout)
        self._fetch_ahead(1, layout, ends)
        try:
            return await fetch
        except asyncio.CancelledError:
            fetch.cancel()
            raise

    async def read_ahead(self, layout: Layout, ends: Ends) -> None:
        """Start prefetching the next update, if there is one by now."""
        if not self.backlog:
            await self.read(block_ms=0)
        self._fetch_ahead(0, layout, ends)

    async def unfetch(self, entry: Entry) -> None:
        """Free the memory of a prefetched update that is not going to be used."""
        fetch = self.fetches.pop(entry.id, None)
        if fetch is not None:
            with suppress(BrokerError):
                self.give_back(await fetch)

    async def forget_fetches(self) -> None:
        """Cancel all prefetches."""
        for fetch in self.fetches.values():
            fetch.cancel()
        await asyncio.gather(*self.fetches.values(), return_exceptions=True)
        self.fetches.clear()

    def _fetch(self, upload: Upload, layout: Layout) -> asyncio.Task[Payload]:
        plain = upload.format == F32.name
        into = self.spare(layout) if plain else Payload.empty(upload.size)
        key = self._keys.queued(upload.blob)

        async def read() -> Payload:
            await blobs.read(self._client, key, into, digest=upload.digest, chunks=upload.chunks)
            return into

        return asyncio.create_task(read(), name=f"fetch {upload.blob}")

    def _fetch_ahead(self, place: int, layout: Layout, ends: Ends) -> None:
        """Prefetch an update of the backlog: only one, to keep memory at four models.

        What is encoded is decoded when its turn comes: then there are three models, and what two
        updates take as they were sent.
        """
        if len(self.backlog) <= place or self.fetches:
            return
        following = self.backlog[place]
        try:
            upload = decode(following.data, Upload)
        except BadMessage:
            return  # reported when its turn comes
        if (
            upload.layout == layout.signature
            and not by_format(upload, layout)
            and ends.get(upload.task) is None
        ):
            self.fetches[following.id] = self._fetch(upload, layout)
