"""The newest version, read from Redis, as where training starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedstream.broker import blobs
from fedstream.broker.errors import BlobDamaged, BlobMissing, Unavailable
from fedstream.broker.layout import Floats, Layout, Model, vector_of
from fedstream.trainer.start import Start
from fedstream.wire.newest import read_newest

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.broker.ledger.trainer import TrainerLedger
    from fedstream.broker.records import Head
    from fedstream.trainer.metrics import TrainerMetrics


class Newest:
    """The newest version, kept for all tasks that start from it."""

    def __init__(
        self, client: Client, ledger: TrainerLedger, keys: Keys, site: str, layout: Layout,
        metrics: TrainerMetrics,
    ) -> None:  # fmt: skip
        self._client = client
        self._ledger = ledger
        self._keys = keys
        self._site = site
        self._layout = layout
        self._metrics = metrics
        self._version: tuple[Head, Model] | None = None  # None: not read, or only in part

    async def start(self, device: int, newest: Head | None) -> Start:
        """A start from the newest version, with what the strategy remembers of the device.

        ``newest``: which one that is; None: not known.
        """
        head, model = await self._read(newest)
        control: Floats | None = None
        if self._layout.controls:
            control = np.zeros(self._layout.parameters, np.float32)  # zero the first time
            key = self._keys.control(self._site, device)
            try:
                await blobs.recall(self._client, key, vector_of(control))
            except (BlobDamaged, BlobMissing) as error:
                raise Unavailable(f"device {device}'s control is being written") from error
        return Start(head.version, head.given, model, control)

    async def _read(self, head: Head | None) -> tuple[Head, Model]:
        """Read the newest version; if it vanishes meanwhile, it was superseded, so try again."""
        with self._metrics.timed("download"):
            while True:
                if head is None and (head := await self._ledger.head()) is None:
                    raise Unavailable(f"run {self._keys.name!r} is gone from Redis")
                if self._version is not None and self._version[0].given == head.given:
                    # A new version may have the same bits.
                    self._version = (head, self._version[1])
                    return self._version
                model = self._version[1] if self._version is not None else Model(self._layout)
                self._version = None
                try:
                    await read_newest(self._client, self._keys, head, model)
                except BlobMissing as error:
                    now = await self._ledger.head()
                    if now is not None and now.version == head.version:
                        raise Unavailable(f"version {head.version} is gone: {error}") from error
                    head = now
                    continue
                self._version = (head, model)
                return self._version
