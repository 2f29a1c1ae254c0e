"""Operators' actions from the page, which need rights that a coordinator lacks.

Each action opens a connection as Redis user ``page.operator_username`` and closes it afterwards.
Without ``page.operator_password``, the coordinator's connection is used; a Redis with users then
refuses the action.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.core.errors import FedstreamError
from fedstream.core.messages import Trigger
from fedstream.core.records import Run
from fedstream.operate import dead
from fedstream.operate.dead import DeadLetters
from fedstream.settings.config import Settings

WHY_STOPPED = "stopped by an operator"


class OperatorActions:
    """Operators' actions on one run."""

    def __init__(self, settings: Settings, client: Client, keys: Keys) -> None:
        self._settings = settings
        self._client = client
        self._keys = keys

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        page = self._settings.page
        if page.operator_password is None:
            yield self._client
            return
        own = self._settings.redis.model_copy(
            update={"username": page.operator_username, "password": page.operator_password}
        )
        client = Client(own, "page")
        try:
            yield client
        finally:
            await client.close()

    async def seen(self) -> tuple[DeadLetters, Run]:
        """The dead letters and the run's state. Raises FedstreamError."""
        async with self._connected() as client:
            letters = await dead.read(client, self._keys)
            return letters, await OperatorLedger(client, self._keys, "page").run()

    async def retry(self, letter: str) -> Trigger:
        """Retry a dead letter, given by its id. Raises FedstreamError."""
        async with self._connected() as client:
            (found,) = (await dead.read(client, self._keys)).find([letter])
            return await dead.retry(client, self._keys, found)

    async def stop(self) -> bool:
        """End the run; returns whether it was running. Raises FedstreamError."""
        async with self._connected() as client:
            return await OperatorLedger(client, self._keys, "page").finish(WHY_STOPPED)

    def explained(self, error: FedstreamError) -> str:
        """An error's text, or advice if the Redis user lacks rights."""
        if " refuses: " in str(error) and self._settings.page.operator_password is None:
            return (
                "the coordinator's own user in Redis may not do this: set page.operator_password "
                f"(FEDSTREAM_PAGE__OPERATOR_PASSWORD) to that of the user "
                f"{self._settings.page.operator_username!r}"
            )
        return str(error)
