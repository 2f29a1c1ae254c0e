"""A blob that arrives in parts is in the end like one that was written at once."""

from __future__ import annotations

import numpy as np
import pytest

from fedstream.broker import blobs
from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.partial_blobs import PartialBlob, Written
from fedstream.broker.scripts import load_all
from fedstream.core.errors import BlobMissing, BrokerError, OutOfMemory
from fedstream.core.layout import Payload
from tests.broker.guarded import KEYS, Guarded, needs_7
from tests.support import full

NAME = "t.a"


def blob_of(client: Client, keys: Keys, site: str = "gateway", expire_s: float = 60) -> PartialBlob:
    key, note = keys.update(f"{site}/{NAME}"), keys.upload_note(site, NAME)
    return PartialBlob(client, key, note, expire_s=expire_s)


@pytest.fixture
def blob(client: Client, keys: Keys) -> PartialBlob:
    return blob_of(client, keys)


def payload_of(size: int) -> Payload:
    return Payload(np.random.default_rng(0).integers(0, 256, size, np.uint8))


async def send(blob: PartialBlob, payload: Payload, note: bytes = b"note") -> None:
    data = payload.buffer.data
    for number in range(blobs.chunks_of(data.nbytes)):
        await blob.put(number, data[number * CHUNK : (number + 1) * CHUNK], note)


async def contents(client: Client, key: str) -> dict[bytes, bytes]:
    fields = await client.call("HGETALL", key)
    return dict(zip(fields[::2], fields[1::2], strict=True))


async def test_parts_make_the_same_blob(client: Client, keys: Keys, blob: PartialBlob) -> None:
    payload = payload_of(2 * CHUNK + 7)
    await blobs.write(client, keys.update("gateway/whole"), payload, expire_s=60)
    await blob.begin(payload.buffer.nbytes, b"note")
    assert await blob.written() == Written(b"note", 0)
    await send(blob, payload)
    assert await blob.written() == Written(b"note", 3)
    whole = await contents(client, keys.update("gateway/whole"))
    assert await contents(client, keys.update(f"gateway/{NAME}")) == whole


@pytest.mark.parametrize("size", [1, CHUNK])
async def test_one_chunk_may_be_written_at_once(
    client: Client, keys: Keys, blob: PartialBlob, size: int
) -> None:
    """In place of what was there, however long that was."""
    await blob.begin(3 * CHUNK, b"before")
    await send(blob, payload_of(3 * CHUNK), b"before")
    payload = payload_of(size)
    await blobs.write(client, keys.update("gateway/whole"), payload, expire_s=60)
    await client.pipeline(blob.whole(payload.buffer.data, b"note", note_expire_s=5))
    assert await blob.written() == Written(b"note", 1)
    whole = await contents(client, keys.update("gateway/whole"))
    assert await contents(client, keys.update(f"gateway/{NAME}")) == whole
    assert 0 < await client.call("PTTL", keys.upload_note("gateway", NAME)) <= 5000


async def test_it_begins_anew(blob: PartialBlob) -> None:
    assert await blob.written() == Written(None, None)
    await blob.begin(3 * CHUNK, b"first")
    await send(blob, payload_of(3 * CHUNK), b"first")
    await blob.begin(2 * CHUNK, b"second")
    assert await blob.written() == Written(b"second", 0)
    await blob.discard()
    assert await blob.written() == Written(None, None)


async def test_every_write_renews_both(client: Client, keys: Keys) -> None:
    names = (keys.update(f"gateway/{NAME}"), keys.upload_note("gateway", NAME))

    async def left_ms() -> list[int]:
        return [await client.call("PTTL", name) for name in names]

    await blob_of(client, keys, expire_s=20).begin(3 * CHUNK, b"note")
    assert all(0 < left <= 20_000 for left in await left_ms())
    long = blob_of(client, keys, expire_s=60)
    await long.put(0, payload_of(CHUNK).buffer.data, b"note")
    assert all(20_000 < left <= 60_000 for left in await left_ms())
    longer = blob_of(client, keys, expire_s=90)
    await longer.put(1, payload_of(CHUNK).buffer.data, b"note", b"changed")
    assert all(60_000 < left <= 90_000 for left in await left_ms())
    assert await long.written() == Written(b"changed", 2)
    await long.mark(b"marked")
    assert await long.written() == Written(b"marked", 2)


async def test_a_chunk_without_a_beginning_is_not_left(
    client: Client, keys: Keys, blob: PartialBlob
) -> None:
    """The blob expired, or was discarded, while the chunk was on its way."""
    await blob.begin(3 * CHUNK, b"note")
    await client.call("UNLINK", keys.update(f"gateway/{NAME}"))
    with pytest.raises(BlobMissing):
        await blob.put(1, payload_of(CHUNK).buffer.data, b"note")
    assert await blob.written() == Written(b"note", None)


async def test_a_chunk_does_not_get_into_another_upload(
    client: Client, keys: Keys, blob: PartialBlob
) -> None:
    """One that began in place of the chunk's own, at another replica: nothing of it changes."""
    await blob.begin(3 * CHUNK, b"first")
    await blob.begin(3 * CHUNK, b"second")
    await blob.put(0, payload_of(CHUNK).buffer.data, b"second")
    before = await contents(client, keys.update(f"gateway/{NAME}"))
    for number, changed in ((0, None), (1, None), (2, b"first, complete")):
        with pytest.raises(BlobMissing):
            await blob.put(number, memoryview(bytes(CHUNK)), b"first", changed)
    assert await contents(client, keys.update(f"gateway/{NAME}")) == before
    assert await blob.written() == Written(b"second", 1)


async def test_the_last_chunk_may_come_twice(blob: PartialBlob) -> None:
    """Its writer had no reply, or two replicas receive the same upload."""
    await blob.begin(9, b"note")
    for _ in range(2):
        await blob.put(0, payload_of(9).buffer.data, b"note", b"complete")
    assert await blob.written() == Written(b"complete", 1)


async def test_nothing_is_written_while_redis_is_full(client: Client, blob: PartialBlob) -> None:
    await blob.begin(2 * CHUNK, b"note")
    async with full(client):
        with pytest.raises(OutOfMemory):
            await blob.put(0, payload_of(CHUNK).buffer.data, b"note")
        with pytest.raises(OutOfMemory):
            await blob.begin(2 * CHUNK, b"another")
        with pytest.raises(OutOfMemory):
            await client.pipeline(
                blob.whole(payload_of(9).buffer.data, b"another", note_expire_s=60)
            )
    assert await blob.written() == Written(b"note", 0)


@needs_7
@pytest.mark.process
async def test_a_gateways_user_may_write_its_own_and_read_none(there: Guarded) -> None:
    payload = payload_of(CHUNK + 1)
    async with there.client("coordinator") as client:
        await load_all(client)  # gateways may not load scripts
    async with there.client("gateway") as client:
        own = blob_of(client, KEYS)
        await own.begin(payload.buffer.nbytes, b"note")
        await send(own, payload)
        assert await own.written() == Written(b"note", 2)
        await own.mark(b"marked")
        await client.pipeline(own.whole(payload_of(9).buffer.data, b"note", note_expire_s=60))
        await own.discard()
        with pytest.raises(BrokerError, match="refuses"):
            await client.call("HGET", KEYS.update(f"gateway/{NAME}"), "0")
        for another in ("clinics", "pool"):
            theirs = blob_of(client, KEYS, another)
            with pytest.raises(BrokerError, match="refuses"):
                await theirs.begin(9, b"note")
            with pytest.raises(BrokerError, match="refuses"):
                await theirs.put(0, payload_of(9).buffer.data, b"note")
            with pytest.raises(BrokerError, match="refuses"):
                await theirs.written()
    async with there.client("trainer-north") as client:
        with pytest.raises(BrokerError, match="refuses"):
            await blob_of(client, KEYS, "north").mark(b"note")  # only gateways have notes
