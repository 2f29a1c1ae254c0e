"""Reading published models of any wire format from Redis."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fedstream.broker import blobs
from fedstream.core.errors import BlobDamaged, BlobMissing, Unavailable
from fedstream.core.formats import format_of
from fedstream.core.given import decode, room_for
from fedstream.core.layout import Model
from fedstream.core.records import Head, head_of

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.core.layout import Layout
    from fedstream.core.messages import Encoded


async def read_newest(client: Client, keys: Keys, head: Head, into: Model) -> None:
    """Read the newest version's model as devices receive it. Raises as :func:`read_model`."""
    await read_model(
        client,
        keys.model(head.blob),
        into,
        digest=head.digest,
        chunks=head.chunks,
        encoded=head.encoded,
    )


async def with_unshared(client: Client, keys: Keys, layout: Layout) -> Layout:
    """A run's layout with the values of its unshared tensors, read from Redis.

    Raises Unavailable if Redis lost them, until the updater publishes them again.
    """
    if (unshared := layout.unshared) is None:
        return layout
    values = Model(unshared.layout)
    try:
        await read_newest(client, keys, head_of(unshared), values)
    except (BlobMissing, BlobDamaged) as error:
        raise Unavailable(
            f"the run's frozen or local parameters are gone from Redis: {error}"
        ) from error
    return layout.with_values(values.itself)


def as_given(head: Head) -> dict[str, str]:
    """Metadata of a file with the newest model: format and digest of an encoded model, or {}."""
    if head.encoded is None:
        return {}
    return {"format": head.encoded.format, "given": head.encoded.digest}


async def read_model(
    client: Client,
    key: str,
    into: Model,
    *,
    digest: str,
    chunks: int | None,
    encoded: Encoded | None,
) -> None:
    """Read a published model and decode it. Decoding takes the encoded model's memory in addition.

    ``digest``: of a model in float32. Raises BlobMissing, BlobDamaged, or Unavailable if this
    release can't decode the format; the model's values are then undefined.
    """
    if encoded is None:
        await blobs.read(client, key, into, digest=digest, chunks=chunks)
        return
    payload = room_for(encoded, into.layout)
    own = None if format_of(encoded.format).zstd else encoded.digest
    await blobs.read(client, key, payload, digest=own, chunks=chunks, encoded=encoded)
    if into.layout.nbytes > blobs.CHUNK:
        await asyncio.to_thread(decode, payload, encoded, into)
    else:
        decode(payload, encoded, into)
