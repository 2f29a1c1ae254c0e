"""The queue's entries and the updates that they name, read before their turn comes."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.errors import BadMessage, BrokerError
from fedstream.broker.keys import Keys
from fedstream.broker.layout import Layout, Model
from fedstream.broker.messages import Upload, decode
from fedstream.broker.streams import Entry, Reader
from fedstream.updater.course import Course

BATCH = 16  # entries that are read together, and share a write to the journal where they are small


class Intake:
    """Reads the queue in order, without a group, and one update ahead of its turn."""

    def __init__(self, client: Client, keys: Keys, course: Course) -> None:
        self._client = client
        self._keys = keys
        self._course = course
        self._reader = Reader(client, {keys.queue: "0"})
        self.backlog: deque[Entry] = deque()
        self.fetches: dict[str, asyncio.Task[Model]] = {}  # by entry
        self.free: list[Model] = []  # to read or write into

    # entries

    async def read(self, block_ms: int) -> bool:
        """Takes what is new in the queue into the backlog: whether there was anything."""
        new = await self._reader.read(count=BATCH, block_ms=block_ms)
        entries = new.get(self._keys.queue, [])
        self.backlog.extend(entries)
        return bool(entries)

    def rewind(self) -> None:
        """Reads the queue from its beginning."""
        self.backlog.clear()
        self._reader.rewind(self._keys.queue)

    # updates

    def spare(self, layout: Layout) -> Model:
        """A model to write into."""
        return self.free.pop() if self.free else Model(layout)

    async def fetched(self, entry: Entry, upload: Upload, layout: Layout) -> Model:
        """The update's model, whose reading began while the one before was being mixed."""
        fetch = self.fetches.pop(entry.id, None) or self._fetch(upload, layout)
        self._fetch_ahead(layout, 1)
        try:
            return await fetch
        except asyncio.CancelledError:
            fetch.cancel()
            raise

    async def read_ahead(self, layout: Layout) -> None:
        """Begins to fetch the next update, if there is one by now."""
        if not self.backlog:
            await self.read(block_ms=0)
        self._fetch_ahead(layout, 0)

    async def unfetch(self, entry: Entry) -> None:
        """The update that was read ahead is refused unread: its memory is free again."""
        fetch = self.fetches.pop(entry.id, None)
        if fetch is not None:
            with suppress(BrokerError):
                self.free.append(await fetch)

    async def forget_fetches(self) -> None:
        """What is being read is not wanted any more."""
        for fetch in self.fetches.values():
            fetch.cancel()
        await asyncio.gather(*self.fetches.values(), return_exceptions=True)
        self.fetches.clear()

    def _fetch(self, upload: Upload, layout: Layout) -> asyncio.Task[Model]:
        into = self.spare(layout)
        key = self._keys.queued(upload.blob)

        async def read() -> Model:
            await blobs.read(self._client, key, into, digest=upload.digest)
            return into

        return asyncio.create_task(read(), name=f"fetch {upload.blob}")

    def _fetch_ahead(self, layout: Layout, place: int) -> None:
        """Begins to read an update of the backlog: one, so that memory stays at four models."""
        if len(self.backlog) <= place or self.fetches:
            return
        following = self.backlog[place]
        try:
            upload = decode(following.data, Upload)
        except BadMessage:
            return  # its turn will come, and with it its error
        if upload.layout == layout.signature and not self._course.ended(upload.task):
            self.fetches[following.id] = self._fetch(upload, layout)
