"""What the updater keeps in Redis besides the ledger: models, and the devices' vectors.

All of it is written before the script that names it, and deleted by such a script; these scripts
check the fencing token. What no script ever names expires.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.commands import Command
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.updater import UpdaterLedger
from fedstream.broker.published import read_newest
from fedstream.core.digest import algorithm_of
from fedstream.core.errors import BlobDamaged, BlobMissing
from fedstream.core.formats import Format
from fedstream.core.given import given
from fedstream.core.layout import Model, Payload, vector_of
from fedstream.core.messages import Sends, Version
from fedstream.core.records import Head
from fedstream.strategies import DeviceVectors

_UNNAMED_S = 600.0


def blob_of(version: int, epoch: int, nonce: str) -> str:
    """A unique name for a version's model, never reused for other bytes."""
    return f"{version}.{epoch}.{nonce}"


def version_of(
    model: Model,
    how: Format,
    sends: Sends,
    room: Callable[[int], Payload] = Payload.empty,
    *,
    version: int,
    **about: Any,
) -> tuple[Version, Payload]:
    """A version to be published in a format, and its bytes. ``about``: its other fields.

    ``room``: for so many bytes, if the format takes any of its own.
    """
    one = given(
        model, how, room, version=version, sends=sends, digests=algorithm_of(about["digest"])
    )
    size, encoded = one.payload.buffer.nbytes, one.encoded
    if encoded is not None:
        about |= {"format": encoded.format, "given": encoded.digest}
    about |= {"size": size, "chunks": blobs.chunks_of(size)}
    return Version(version=version, **about), one.payload


class Publisher:
    """Models by their blobs' names, and a vector for each device (SCAFFOLD's c_i)."""

    def __init__(
        self,
        client: Client,
        ledger: UpdaterLedger,
        lease: Lease,
        *,
        keep_versions: int,
        keep_bytes: int,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._lease = lease
        self._keep_versions = keep_versions
        self._keep_bytes = keep_bytes
        self._kept: dict[str, int] = {}  # blob -> version, oldest first
        self._written: set[str] = set()  # the blobs of pending versions, once completely written

    # models

    async def look(self) -> None:
        """Ask Redis which models it has."""
        self._kept = await self._ledger.kept()

    async def prepare(self, version: Version | None, payload: Payload | None) -> Sequence[Command]:
        """Write a version as it is given, or return the commands that do so ahead of its commit."""
        if version is None or payload is None or version.blob in self._written:
            return ()  # if a reply was lost, it may be published already and must not expire
        key = self._ledger.keys.model(version.blob)
        ahead = await blobs.prepare(
            self._client, key, payload, expire_s=_UNNAMED_S, encoded=version.encoded
        )
        self._written.add(version.blob)
        return ahead

    async def write(self, version: Version, payload: Payload) -> None:
        """Write a version as it is given, replacing whatever was there."""
        key = self._ledger.keys.model(version.blob)
        await self._client.call("UNLINK", key)
        await blobs.write(self._client, key, payload, expire_s=_UNNAMED_S, encoded=version.encoded)

    async def keep(self, head: Head, size: int) -> bool:
        """Remove any expiry of the newest model; return whether all of the model is there.

        ``size``: in bytes, unless it is encoded.
        """
        key = self._ledger.keys.model(head.blob)
        size = head.encoded.size if head.encoded else size
        return await blobs.keep(self._client, key, size, chunks=head.chunks, encoded=head.encoded)

    async def read(self, head: Head, model: Model) -> None:
        """Read the newest model, as devices are given it. Raises BlobMissing, or BlobDamaged."""
        await read_newest(self._client, self._ledger.keys, head, model)

    def forget_written(self) -> None:
        """Forget the prepared models: they are of no use."""
        self._written.clear()

    def unwritten(self, version: Version) -> None:
        """Take note that a version's model, though prepared, expired or never reached Redis."""
        self._written.discard(version.blob)

    def published(self, versions: Sequence[Version], retired: Sequence[str]) -> None:
        """Take note that versions were committed, and that these models were deleted.

        Of the versions, the last one's model is kept, and those that were written for an earlier
        try: it may have gone well, and only its reply got lost.
        """
        for version in versions:
            if version.blob in self._written:
                self._kept[version.blob] = version.version
                self._written.remove(version.blob)
        for blob in retired:
            self._kept.pop(blob, None)

    def _most(self, size: int) -> int:
        """How many models of ``size`` bytes are kept."""
        by_bytes = self._keep_bytes // max(size, 1)
        # At least two: a reader of the newest must be able to finish when the next is published.
        return max(2, min(self._keep_versions, by_bytes))

    def outlived(self, size: int) -> tuple[str, ...]:
        """The models to delete so that one more of ``size`` bytes stays within the limits."""
        surplus = len(self._kept) + 1 - self._most(size)
        return tuple(list(self._kept)[:surplus]) if surplus > 0 else ()

    async def make_room(self) -> int:
        """Delete all models but the newest, because Redis is full; return how many."""
        self._kept = self._kept or await self._ledger.kept()
        older = list(self._kept)[:-1]
        if not older or await self._ledger.retire(self._lease.token, older) != "done":
            return 0
        for blob in older:
            del self._kept[blob]
        return len(older)

    # devices

    async def hand_out(self, vectors: DeviceVectors, devices: set[int]) -> bool:
        """Hand out these devices' vectors, for the trainers that train for them.

        Returns False if Redis was emptied meanwhile.
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
        """Replace remembered vectors by those handed out; return why any of these are lost."""
        keys, lost = self._ledger.keys, []
        for device in range(len(vectors)):
            vector = Model(vector_of(vectors[device]).layout)
            try:
                if await blobs.recall(self._client, keys.device(device), vector):
                    vectors.write(device)[:] = vector.floats
            except (BlobDamaged, BlobMissing) as error:
                lost.append(str(error))
        return lost
