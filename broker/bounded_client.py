"""A client with a bounded number of connections, for services that serve HTTP.

Each concurrent exchange takes a connection. If Redis hangs while many devices send requests, an
unbounded client would use up all connections that Redis allows, and no service could connect.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from math import inf
from typing import Any

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.commands import Argument, Command
from fedstream.broker.link import BulkPlace
from fedstream.core.errors import Unavailable


class BoundedClient(Client):
    """A client with at most ``links`` concurrent exchanges; further exchanges wait.

    After ``timeout_s`` of the settings, a waiting exchange raises Unavailable without sending.
    Blocking exchanges (``wait_s``, and :meth:`start`) don't count: the service itself makes only a
    few of them, and they must not delay requests.
    """

    def __init__(
        self, settings: RedisSettings, name: str = "", *, links: int, loads_scripts: bool = True
    ) -> None:
        """``links``: the most concurrent exchanges; each takes one connection."""
        super().__init__(settings, name, loads_scripts=loads_scripts)
        self._links = links
        self._free = asyncio.Semaphore(links)

    async def call(self, *command: Argument, wait_s: float = 0.0) -> Any:
        """Send one command, as :meth:`Client.call` does, once a connection is free."""
        if wait_s:
            return await super().call(*command, wait_s=wait_s)
        async with self._turn():
            return await super().call(*command)

    async def pipeline(
        self,
        commands: Sequence[Command],
        *,
        wait_s: float = 0.0,
        most: float = inf,
        into: Sequence[BulkPlace] | None = None,
    ) -> list[Any]:
        """Send several commands, as :meth:`Client.pipeline` does, once a connection is free."""
        if wait_s:
            return await super().pipeline(commands, wait_s=wait_s, most=most, into=into)
        async with self._turn():
            return await super().pipeline(commands, most=most, into=into)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Occupy one of the connections inside the block. Raises Unavailable."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._free.acquire()
        except TimeoutError:
            raise Unavailable(
                f"Redis at {self.address}: all {self._links} connections were in use for "
                f"{self._timeout_s:g} s"
            ) from None
        try:
            yield
        finally:
            self._free.release()
