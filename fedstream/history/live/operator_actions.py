"""What an operator may do from the page. It needs rights that a coordinator doesn't have.

So these are done with a connection of the operator's own user, which is made for one act and closed
after it. Without a password for that user, the coordinator's connection is used: Redis then refuses
unless it has no users.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.core.errors import FedstreamError
from fedstream.settings.config import Settings

if TYPE_CHECKING:
    from fedstream.core.messages import Trigger
    from fedstream.core.records import Run
    from fedstream.operate.dead import DeadLetters

WHY_STOPPED = "stopped by an operator"


class OperatorActions:
    """An operator's acts on one run."""

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
        """The dead letters, and how the run stands. Raises FedstreamError."""
        from fedstream.operate import dead

        async with self._connected() as client:
            letters = await dead.read(client, self._keys)
            return letters, await OperatorLedger(client, self._keys, "page").run()

    async def retry(self, letter: str) -> Trigger:
        """Retry a dead letter, given by its id. Raises FedstreamError if it can't be."""
        from fedstream.operate import dead

        async with self._connected() as client:
            (found,) = (await dead.read(client, self._keys)).find([letter])
            return await dead.retry(client, self._keys, found)

    async def stop(self) -> bool:
        """End the run with its newest version: whether it was running. Raises FedstreamError."""
        async with self._connected() as client:
            return await OperatorLedger(client, self._keys, "page").finish(WHY_STOPPED)

    def explained(self, error: FedstreamError) -> str:
        """Why an act failed, and what may help."""
        if " refuses: " in str(error) and self._settings.page.operator_password is None:
            return (
                "the coordinator's own user in Redis may not do this: set page.operator_password "
                f"(FEDSTREAM_PAGE__OPERATOR_PASSWORD) to that of the user "
                f"{self._settings.page.operator_username!r}"
            )
        return str(error)
