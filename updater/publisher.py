"""What the updater has in Redis beside the ledger: models, and what devices have to know.

All of it is written before the script that names it, which asks for the token, and is deleted by
such a script. What none ever names expires.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedstream.broker import blobs
from fedstream.broker.client import Client, Command
from fedstream.broker.errors import BlobDamaged, BlobMissing
from fedstream.broker.layout import Model, vector_of
from fedstream.broker.lease import Lease
from fedstream.broker.ledger import Ledger
from fedstream.broker.messages import Version
from fedstream.updater.strategies import DeviceVectors

_UNNAMED_S = 600.0


class Publisher:
    """Models by their blobs' names, and a vector for each device (SCAFFOLD's c_i)."""

    def __init__(
        self, client: Client, ledger: Ledger, lease: Lease, *, keep_versions: int, keep_bytes: int
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._lease = lease
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._kept: dict[str, int] = {}  # blob -> version, oldest first
        self._written = ""  # the blob of the pending version, once all of it is there

    # models

    async def look(self) -> None:
        """Learns which models there are."""
        self._kept = await self._ledger.kept()

    async def prepare(self, version: Version | None, model: Model) -> Sequence[Command]:
        """Writes a version's model before the commit that publishes it, or has it ride along."""
        if version is None or version.blob == self._written:
            return ()  # a reply was lost: it may be published by now, and must not expire
        key = self._ledger.keys.model(version.blob)
        ahead = await blobs.prepare(self._client, key, model, expire_s=_UNNAMED_S)
        self._written = version.blob
        return ahead

    async def write(self, version: Version, model: Model) -> None:
        """Writes a version's model, whatever was there."""
        key = self._ledger.keys.model(version.blob)
        await self._client.call("UNLINK", key)
        await blobs.write(self._client, key, model, expire_s=_UNNAMED_S)

    async def keep(self, blob: str, size: int) -> bool:
        """Whether all of a version's model is there; an expiry that it was given late is gone."""
        return await blobs.keep(self._client, self._ledger.keys.model(blob), size)

    async def read(self, blob: str, model: Model, digest: str) -> None:
        """Reads a version's model. Raises BlobMissing, or BlobDamaged if it has another digest."""
        await blobs.read(self._client, self._ledger.keys.model(blob), model, digest=digest)

    def forget_written(self) -> None:
        """What was prepared expired while Redis was away, never got there, or is of no use."""
        self._written = ""

    def published(self, version: Version) -> None:
        """A version was committed."""
        self._kept[version.blob] = version.version

    def outlived(self, size: int) -> tuple[str, ...]:
        """Models of ``size`` bytes to delete so that with one more the limits hold."""
        by_bytes = self._keep_bytes // max(size, 1)
        # Two: whoever reads the newest when the next is published shall come to an end.
        most = max(2, min(self._keep_versions, by_bytes))
        surplus = len(self._kept) + 1 - most
        return tuple(list(self._kept)[:surplus]) if surplus > 0 else ()

    def deleted(self, outlived: Sequence[str]) -> None:
        """They are gone."""
        for blob in outlived:
            self._kept.pop(blob, None)

    async def make_room(self) -> int:
        """Redis is full: frees all models but the newest: how many."""
        self._kept = self._kept or await self._ledger.kept()
        older = list(self._kept)[:-1]
        if not older or await self._ledger.retire(self._lease.token, older) != "done":
            return 0
        self.deleted(older)
        return len(older)

    # devices

    async def hand_out(self, vectors: DeviceVectors, devices: set[int]) -> bool:
        """Hands out what whoever trains for these devices has to know: whether it did.

        False if Redis was emptied meanwhile.
        """
        keys = self._ledger.keys
        for device in devices:
            vector = vector_of(vectors[device])
            digest, size = vector.digest(), vector.layout.nbytes
            staged = keys.staged(device, digest)
            ahead = await blobs.prepare(self._client, staged, vector, expire_s=_UNNAMED_S)
            token = self._lease.token
            if await self._ledger.hand_out(token, device, digest, size, ahead=ahead) != "done":
                return False
        return True

    async def recall(self, vectors: DeviceVectors) -> list[str]:
        """Takes what was handed out in place of what is remembered; why some of it is lost."""
        keys, lost = self._ledger.keys, []
        for device in range(len(vectors)):
            vector = Model(vector_of(vectors[device]).layout)
            try:
                if await blobs.recall(self._client, keys.device(device), vector):
                    vectors.write(device)[:] = vector.floats
            except (BlobDamaged, BlobMissing) as error:
                lost.append(str(error))
        return lost
