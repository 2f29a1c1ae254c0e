"""Whoever watches while a run goes on: which version is the newest, through every restart."""

from __future__ import annotations

import asyncio
from typing import Protocol

import msgpack

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.streams import Reader
from fedstream.core.errors import Unavailable


class Lives(Protocol):
    """A Redis that dies and comes back: ``life`` counts, ``up`` says whether it is there."""

    client: Client
    life: int
    up: asyncio.Event


class Watcher:
    """Reads `models` from the beginning in every life of Redis."""

    def __init__(self, server: Lives, keys: Keys) -> None:
        self._server = server
        self._keys = keys
        self._news = asyncio.Condition()
        self.version = -1  # the newest ever
        self.published: set[tuple[int, str]] = set()  # with their digests

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._server.up.wait()
            life = self._server.life
            reader = Reader(self._server.client, {self._keys.models: "0"})
            try:
                while life == self._server.life:
                    await self._look(reader)
            except Unavailable:
                await asyncio.sleep(0.05)  # it died; `up` says when it is back

    async def _look(self, reader: Reader) -> None:
        new = await reader.read(count=1000, block_ms=500)
        told = [msgpack.unpackb(entry.data) for entry in new.get(self._keys.models, ())]
        if told:
            self.published |= {(said["version"], said["digest"]) for said in told}
            self.version = max(self.version, *(said["version"] for said in told))
            async with self._news:
                self._news.notify_all()

    async def reaches(self, version: int, within_s: float) -> bool:
        """Waits for a version: whether it came."""
        try:
            async with asyncio.timeout(within_s), self._news:
                await self._news.wait_for(lambda: self.version >= version)
        except TimeoutError:
            return False
        return True
