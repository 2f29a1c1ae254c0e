"""A client for services that others send requests to: its connections are bounded.

A client connects once for each exchange that is under way. A crowd of devices that comes while
Redis hangs would so take up all connections that Redis allows, and no service could connect.
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
    """A client with a limit on the exchanges under way; the others wait for their turn.

    One that has waited for the settings' ``timeout_s`` raises Unavailable: nothing was sent. Those
    that may block (``wait_s``, and :meth:`start`) don't count: the service itself makes them, a few
    at once, and they must not keep others waiting.
    """

    def __init__(
        self, settings: RedisSettings, name: str = "", *, links: int, loads_scripts: bool = True
    ) -> None:
        """``links``: exchanges under way at most, and so connections."""
        super().__init__(settings, name, loads_scripts=loads_scripts)
        self._links = links
        self._free = asyncio.Semaphore(links)

    async def call(self, *command: Argument, wait_s: float = 0.0) -> Any:
        """As of any client."""
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
        """As of any client."""
        if wait_s:
            return await super().pipeline(commands, wait_s=wait_s, most=most, into=into)
        async with self._turn():
            return await super().pipeline(commands, most=most, into=into)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """One of the places inside the block. Raises Unavailable."""
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
