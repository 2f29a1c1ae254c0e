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
    """A unique name for the blob of a version's model, never reused for other bytes."""
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
    """Make a version and its payload in the format ``how``. ``about``: the version's other fields.

    ``room``: allocates the payload if the format needs memory of its own.
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
    """The models in Redis by blob name, and a vector for each device (SCAFFOLD's c_i)."""

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
        self._written: set[str] = set()  # completely written blobs of pending versions

    # models

    async def look(self) -> None:
        """Read the list of models that Redis has."""
        self._kept = await self._ledger.kept()

    async def prepare(self, version: Version | None, payload: Payload | None) -> Sequence[Command]:
        """Write a version's model, or return the commands that write it with the commit."""
        if version is None or payload is None or version.blob in self._written:
            return ()  # after a lost reply, the model may be published, and must not expire
        key = self._ledger.keys.model(version.blob)
        ahead = await blobs.prepare(
            self._client, key, payload, expire_s=_UNNAMED_S, encoded=version.encoded
        )
        self._written.add(version.blob)
        return ahead

    async def write(self, version: Version, payload: Payload) -> None:
        """Write a version's model, replacing any blob of this name."""
        key = self._ledger.keys.model(version.blob)
        await self._client.call("UNLINK", key)
        await blobs.write(self._client, key, payload, expire_s=_UNNAMED_S, encoded=version.encoded)

    async def keep(self, head: Head, size: int) -> bool:
        """Remove any expiry of the newest model; return whether the model is complete.

        ``size``: bytes of a float32 model; ignored for an encoded one.
        """
        key = self._ledger.keys.model(head.blob)
        size = head.encoded.size if head.encoded else size
        return await blobs.keep(self._client, key, size, chunks=head.chunks, encoded=head.encoded)

    async def read(self, head: Head, model: Model) -> None:
        """Read the newest model as devices receive it. Raises BlobMissing or BlobDamaged."""
        await read_newest(self._client, self._ledger.keys, head, model)

    def forget_written(self) -> None:
        """Forget the prepared models, which will never be committed."""
        self._written.clear()

    def unwritten(self, version: Version) -> None:
        """Note that a version's prepared model expired or never reached Redis."""
        self._written.discard(version.blob)

    def published(self, versions: Sequence[Version], retired: Sequence[str]) -> None:
        """Note that versions were committed and the models ``retired`` deleted.

        Redis keeps the last version's model, and models written for an earlier try, which may have
        succeeded with a lost reply.
        """
        for version in versions:
            if version.blob in self._written:
                self._kept[version.blob] = version.version
                self._written.remove(version.blob)
        for blob in retired:
            self._kept.pop(blob, None)

    def _most(self, size: int) -> int:
        """The number of models of ``size`` bytes to keep."""
        by_bytes = self._keep_bytes // max(size, 1)
        # At least two: a download of the newest model must be able to finish after the next commit.
        return max(2, min(self._keep_versions, by_bytes))

    def outlived(self, size: int) -> tuple[str, ...]:
        """The models to delete before another one of ``size`` bytes is published."""
        surplus = len(self._kept) + 1 - self._most(size)
        return tuple(list(self._kept)[:surplus]) if surplus > 0 else ()

    async def make_room(self) -> int:
        """Delete all models but the newest, for a full Redis; return their number."""
        self._kept = self._kept or await self._ledger.kept()
        older = list(self._kept)[:-1]
        if not older or await self._ledger.retire(self._lease.token, older) != "done":
            return 0
        for blob in older:
            del self._kept[blob]
        return len(older)

    # devices

    async def hand_out(self, vectors: DeviceVectors, devices: set[int]) -> bool:
        """Publish the vectors of ``devices`` to the trainers of these devices.

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
        """Replace the vectors by the published ones; return the reasons for lost vectors."""
        keys, lost = self._ledger.keys, []
        for device in range(vectors.devices):
            vector = Model(vector_of(vectors[device]).layout)
            try:
                if await blobs.recall(self._client, keys.device(device), vector):
                    vectors.write(device)[:] = vector.floats
            except (BlobDamaged, BlobMissing) as error:
                lost.append(str(error))
        return lost
