"""What is saved of one interrupted task: when its workspace is kept, used and deleted.

Saving is best effort. A task without a workspace starts over.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from fedstream.broker import workspaces
from fedstream.broker.errors import BadMessage, FedstreamError
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from fedstream.broker.client import Client
    from fedstream.broker.layout import Layout
    from fedstream.broker.ledger.trainer import TrainerLedger
    from fedstream.trainer.settings import TrainerSettings

# Share of Redis's memory above which no workspace is kept. The scheduler lets models and updates
# grow to 0.8, and they need that room.
SHARE = 0.5


class SavedWork:
    """The workspace of one task, for one attempt at it."""

    def __init__(
        self,
        key: str,
        client: Client,
        ledger: TrainerLedger,
        settings: TrainerSettings,
        log: FilteringBoundLogger,
    ) -> None:
        self._key = key
        self._client = client
        self._ledger = ledger
        self._settings = settings
        self._log = log
        self._exists = False  # this attempt read or saved it

    async def read(self, layout: Layout) -> Workspace | None:
        """The workspace, if there is a usable one; ``layout`` is that of its models."""
        # Other trainers of the site may write anything there, so don't read beyond the size limit.
        most = self._settings.workspace_bytes
        data = await workspaces.read(self._client, self._key, most=most)
        if not data:
            return None
        if len(data) > most:
            self._unusable(BadMessage(f"a workspace of more than {most} bytes"))
            return None
        try:
            workspace = Workspace.decode(data)
            workspace.models(layout)
        except FedstreamError as error:
            self._unusable(error)
            return None
        self._exists = True
        self._log.info(
            "continuing from a workspace", version=workspace.version, step=workspace.step
        )
        return workspace

    async def save(self, workspace: Workspace | None) -> None:
        """Save a workspace, if training left one."""
        if workspace is None:
            return
        data = workspace.encode()
        if len(data) > self._settings.workspace_bytes:
            self._log.warning("workspace too large to save", bytes=len(data))
            return
        expire_s = self._settings.workspace_expiry_s
        try:
            await workspaces.write(self._client, self._key, data, expire_s=expire_s)
        except FedstreamError as error:
            self._log.warning("workspace not saved", reason=str(error))
            return
        self._exists = True
        # Check afterwards: if many save at once, each then counts the workspaces saved before it.
        try:
            used, most = await self._ledger.memory()
        except FedstreamError as error:
            self._log.warning("workspace saved, room not known", reason=str(error))
            return
        if most and used > SHARE * most:
            self._log.warning("no room for a workspace", used=used, maxmemory=most)
            await self.discard()
            return
        self._log.info("workspace saved", step=workspace.step, bytes=len(data))

    async def reject(self, error: Exception) -> None:
        """Delete a workspace from which training could not resume."""
        self._unusable(error)
        await workspaces.delete(self._client, self._key)
        self._exists = False

    async def discard(self) -> None:
        """Delete the workspace, if this attempt saved or read one."""
        if self._exists:
            with suppress(FedstreamError):  # else it expires
                await workspaces.delete(self._client, self._key)
                self._exists = False

    def _unusable(self, error: Exception) -> None:
        self._log.warning("discarding unusable workspace", reason=str(error))
