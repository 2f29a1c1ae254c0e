"""A trainer's data in Redis: workspaces of interrupted tasks, error feedback, local values.

Storing is best effort. A task without a workspace starts over, and lost feedback counts as zero.

Error feedback: the encoding error of a device's update is added to its next update. A trainer that
owns devices keeps it in memory. In the pool, any replica may train for a device next, so feedback
is in Redis, among the pool's workspaces. The script that sends the answer also replaces the
feedback, so that it is never added twice.
"""

from __future__ import annotations

import os
import secrets
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedstream.broker import workspaces
from fedstream.core.errors import BadMessage, ConfigError, FedstreamError, OutOfMemory
from fedstream.core.layout import Floats, Layout, Model
from fedstream.trainer import local_values
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.broker.ledger.trainer import TrainerLedger
    from fedstream.core.records import Run
    from fedstream.trainer.metrics import TrainerMetrics
    from fedstream.trainer.settings import TrainerSettings


# Share of Redis's memory above which no workspace is kept. The scheduler lets models and updates
# grow to 0.8, and they need that room.
SHARE = 0.5
_LOCAL_S = 24 * 3600.0  # expiry of local values; coordinators shorten a longer one


class SavedWork:
    """The workspace of one task, for one attempt at it."""

    def __init__(
        self,
        key: str,
        client: Client,
        ledger: TrainerLedger,
        settings: TrainerSettings,
        log: FilteringBoundLogger,
        *,
        private: bool = False,
    ) -> None:
        """``private``: nothing is kept, as anybody at Redis could read it."""
        self._key = key
        self._client = client
        self._ledger = ledger
        self._settings = settings
        self._log = log
        self._private = private
        self._exists = False  # this attempt read or saved a workspace

    async def read(self, layout: Layout) -> Workspace | None:
        """Read the workspace; None if there is no usable one. ``layout``: its models' layout."""
        if self._private:
            return None
        # Other trainers of the site may write any bytes there, so bound the read.
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
        if workspace is None or self._private:
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
        # Check afterwards, so that of many concurrent saves each counts the others.
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


class Feedback:
    """The error feedback of one trainer's devices, from each one's last answered update."""

    def __init__(
        self,
        client: Client,
        ledger: TrainerLedger,
        keys: Keys,
        settings: TrainerSettings,
        parameters: int,
        metrics: TrainerMetrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._keys = keys
        self._settings = settings
        self._bytes = 4 * parameters
        self._metrics = metrics
        self._log = log
        self._has_room = True  # whether Redis had room at the last staging
        self._own: OrderedDict[int, Floats] = OrderedDict()  # least recently answered first

    async def of(self, device: int) -> Floats | None:
        """The feedback of the device's last update; None, and counted, if there is none."""
        found = self._own.get(device) if self._settings.owns else await self._read(device)
        if found is None:
            self._metrics.from_zero.inc()
        return found

    async def _read(self, device: int) -> Floats | None:
        data = await workspaces.read(self._client, self._key(device), most=self._bytes)
        unsent = np.frombuffer(data, "<f4") if len(data) == self._bytes else None
        if unsent is None or not np.isfinite(unsent).all():  # any pool trainer may write there
            if data:
                self._metrics.lost_feedback("unusable")
                self._log.warning("discarding unusable error feedback", bytes=len(data))
            return None
        return unsent

    def _key(self, device: int) -> str:
        # No task's workspace has this name: their ids have no dot.
        return self._keys.workspace(self._settings.site, f"unsent.{device}")

    async def stage(self, device: int, attempt: str, unsent: Floats) -> tuple[str, ...]:
        """Write an update's feedback; return the keys for ``Outbox.answer``.

        Without room, nothing is written, and the device's next update begins from zero.
        """
        if self._settings.owns:
            return ()
        key, self._has_room = self._key(device), False
        staged = f"{key}.{attempt}"
        try:
            used, most = await self._ledger.memory()
            if self._bytes > self._settings.workspace_bytes or (most and used > SHARE * most):
                self._log.warning("no room for error feedback", used=used, maxmemory=most)
                return staged, key
            await workspaces.write(
                self._client,
                staged,
                unsent.view(np.uint8).data,
                expire_s=self._settings.workspace_expiry_s,
            )
            self._has_room = True
        except OutOfMemory as error:
            self._log.warning("error feedback not kept", reason=str(error))
        return staged, key

    def answered(self, device: int, unsent: Floats, *, said: bool, dropped: bool = False) -> None:
        """Keep an update's feedback if its answer counts (``said``), and count lost feedback.

        Otherwise forget the device's feedback, as an answer whose reply was lost may still count.
        ``dropped``: the previous feedback was too large to be added.
        """
        if said and dropped:
            self._metrics.lost_feedback("outlier")
        if not self._settings.owns:  # the script that sent the answer has replaced it
            if said and not self._has_room:
                self._metrics.lost_feedback("no room")
            return
        if not said:
            if self._own.pop(device, None) is not None:
                self._metrics.lost_feedback("in doubt")
            return
        self._own[device] = unsent
        self._own.move_to_end(device)
        most = max(1, self._settings.feedback_bytes // max(1, self._bytes))
        while len(self._own) > most:
            self._own.popitem(last=False)
            self._metrics.lost_feedback("no room")


class LocalValues:
    """The local values of the devices that a trainer serves.

    In a folder (``trainer.local_dir``), or in Redis among the site's workspaces, where any trainer
    of the site may write: what is not sound counts as missing.
    """

    def __init__(
        self,
        client: Client,
        keys: Keys,
        settings: TrainerSettings,
        run: Run,
        log: FilteringBoundLogger,
    ) -> None:
        """Raises ConfigError if all devices' values may exceed ``trainer.local_bytes``, and if
        their folder cannot be made.
        """
        self._client = client
        self._keys = keys
        self._settings = settings
        self._layout = run.layout
        self._log = log
        self._folder: Path | None = None
        devices = len(settings.owns) or run.devices
        local_values.check_room(run.layout, devices, settings.local_bytes)
        if settings.local_dir is not None and local_values.layout_of(run.layout) is not None:
            self._folder = Path(settings.local_dir) / f"{keys.name}-{run.lineage}"
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"trainer.local_dir: {self._folder}: {error.strerror}") from error

    async def of(self, device: int) -> Model | None:
        """The device's values; None: those of version 0. Raises ConfigError."""
        if (local := local_values.layout_of(self._layout)) is None:
            return None
        if self._folder is None:
            data = await workspaces.read(self._client, self._key(device), most=local.nbytes)
        else:
            data = self._in_file(self._folder / str(device))
        values = local_values.of_bytes(data, self._layout)
        if data and values is None:
            self._log.warning("discarding unusable local values", device=device, bytes=len(data))
        return values

    async def stage(self, device: int, attempt: str, values: Model | None) -> tuple[str, ...]:
        """Write an attempt's values; return the keys for ``Outbox.answer``.

        Without room in Redis, nothing is written, and the device keeps its earlier values.
        """
        if values is None or self._folder is not None:
            return ()
        key = self._key(device)
        staged = f"{key}.{attempt}"
        try:
            await workspaces.write(self._client, staged, values.buffer.data, expire_s=_LOCAL_S)
        except OutOfMemory as error:
            self._log.warning("local values not kept", device=device, reason=str(error))
            return ()
        return staged, key

    def answered(self, device: int, values: Model | None) -> None:
        """Keep the values of an accepted answer, unless the answer's script did.

        If the disk is full, the device keeps its earlier values.
        """
        if values is None or self._folder is None:
            return
        aside = self._folder / f".{device}.{secrets.token_hex(4)}"
        try:
            with open(aside, "xb", opener=_private) as file:
                file.write(values.buffer.data)
                file.flush()
                os.fsync(file.fileno())  # or a power cut leaves zeros, which look sound
            aside.replace(self._folder / str(device))
        except OSError as error:
            self._log.warning("local values not kept", device=device, reason=str(error))
            aside.unlink(missing_ok=True)

    def _in_file(self, file: Path) -> bytes:
        try:
            return file.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise ConfigError(f"trainer.local_dir: {file}: {error.strerror}") from error

    def _key(self, device: int) -> str:
        # No task's workspace has this name: their ids have no dot.
        return self._keys.workspace(self._settings.site, f"local.{device}")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
