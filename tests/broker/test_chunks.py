"""A release that writes larger or smaller chunks and this one understand each other."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.blobs import CHUNK, LONGEST, SHORTEST
from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.published import read_newest
from fedstream.core.errors import BlobDamaged, BlobMissing
from fedstream.core.layout import Model
from fedstream.core.messages import Upload
from tests.support import Hand, layout_of, model_of, written_in

FOUR = 4 * CHUNK  # bytes: four of our chunks
TWICE = 2 * LONGEST


async def trained(hand: Hand, size: int, chunk: int, **changes: Any) -> Upload:
    """An open task's answer of so many bytes, whose blob is in chunks of so many bytes."""
    hand.layout = layout_of(size // 4)
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger, write=False)
    model = model_of(hand.layout, 1.0)
    chunks = await written_in(hand.client, hand.keys.update(upload.blob), model, chunk)
    return upload.model_copy(update={"chunks": chunks} | changes)


async def admitted(hand: Hand, upload: Upload) -> tuple[str, str]:
    [entry] = await hand.said(upload)
    return await hand.ledger.admit(entry, Upload.decode(entry.data), size_limit=TWICE)


@pytest.mark.parametrize("chunk", [SHORTEST, 1 << 17, CHUNK - 1, CHUNK, CHUNK + 1, LONGEST])
async def test_update_with_other_chunk_sizes_is_admitted_and_read(hand: Hand, chunk: int) -> None:
    upload = await trained(hand, FOUR, chunk)
    assert await admitted(hand, upload) == ("admitted", "")
    [(_, queued)] = await hand.queue()
    assert isinstance(queued, Upload)
    model = Model(hand.layout)
    key = hand.keys.queued(queued.blob)
    await blobs.read(hand.client, key, model, digest=queued.digest, chunks=queued.chunks)
    assert model.digest() == upload.digest


@pytest.mark.parametrize("size", [4, SHORTEST - 4])
async def test_an_update_shorter_than_any_chunk_is_admitted(hand: Hand, size: int) -> None:
    assert await admitted(hand, await trained(hand, size, CHUNK)) == ("admitted", "")


@pytest.mark.parametrize("chunk", [CHUNK - 1, CHUNK + 1, 1 << 17])
async def test_missing_chunk_count_means_our_chunk_size(hand: Hand, chunk: int) -> None:
    upload = await trained(hand, FOUR, chunk, chunks=None)
    assert await admitted(hand, upload) == ("refused", "size")


@pytest.mark.parametrize(
    ("size", "chunk", "said", "reason"),
    [
        (FOUR, CHUNK, 0, "size"),
        (FOUR, CHUNK, 3, "size"),
        (FOUR, CHUNK, 6, "blob missing"),
        (FOUR, CHUNK, 2**64 - 1, "size"),
        (FOUR, SHORTEST - 4, 64, "size"),  # one fewer than there are
        (FOUR, SHORTEST - 4, 65, "size"),  # more than Redis should measure
        (FOUR, 1 << 10, FOUR >> 10, "size"),
        (TWICE, TWICE, 1, "size"),  # longer than any reader expects
        (TWICE, LONGEST + 4, 2, "size"),
        (4, CHUNK, 0, "size"),
        (4, CHUNK, 2, "size"),
    ],
)
async def test_hostile_chunk_count_is_refused(
    hand: Hand, size: int, chunk: int, said: int, reason: str
) -> None:
    upload = await trained(hand, size, chunk, chunks=said)
    assert await admitted(hand, upload) == ("refused", reason)
    assert await hand.queue() == []
    await hand.balanced()


@pytest.mark.parametrize("left", [0, 1, 3])
async def test_a_blob_cut_short_is_refused_though_its_number_is_right(
    hand: Hand, client: Client, left: int
) -> None:
    upload = await trained(hand, FOUR, CHUNK, chunks=left)
    await client.call("HDEL", hand.keys.update(upload.blob), *range(left, 4))
    assert await admitted(hand, upload) == ("refused", "size")


async def test_redis_measures_at_most_as_many_chunks_as_the_size_allows(
    hand: Hand, client: Client
) -> None:
    """However many a site claims and has written."""
    upload = await trained(hand, FOUR, 1 << 10)
    await client.call("CONFIG", "RESETSTAT")
    assert await admitted(hand, upload) == ("refused", "size")
    stats = (await client.call("INFO", "commandstats")).decode()
    [asked] = [line for line in stats.splitlines() if line.startswith("cmdstat_hstrlen:")]
    assert int(asked.partition("calls=")[2].partition(",")[0]) == 1  # of the field `size`


# models and vectors, which only the updater writes


@pytest.mark.parametrize("chunk", [1 << 16, 1 << 21, LONGEST])
async def test_model_with_other_chunk_sizes_is_kept_and_read(
    client: Client, keys: Keys, chunk: int
) -> None:
    model, key = model_of(layout_of(FOUR // 4), 3.0), keys.model("1.1")
    chunks = await written_in(client, key, model, chunk)
    assert await blobs.keep(client, key, FOUR, chunks=chunks)
    assert await client.call("PTTL", key) == -1
    again = Model(model.layout)
    await blobs.read(client, key, again, digest=model.digest(), chunks=chunks)
    assert again.digest() == model.digest()
    for wrong in (chunks + 1, chunks - 1, 0, None):
        assert not await blobs.keep(client, key, FOUR, chunks=wrong)
        with pytest.raises((BlobMissing, BlobDamaged)):
            await blobs.read(client, key, again, digest=model.digest(), chunks=wrong)
    await client.call("UNLINK", key)


async def test_head_and_model_give_the_chunk_count(hand: Hand, client: Client) -> None:
    hand.layout = layout_of(FOUR // 4)
    await hand.create()
    version = (await hand.publish(1, write=False)).model_copy(update={"chunks": 2})
    key, model = hand.keys.model(version.blob), model_of(hand.layout)
    assert await blobs.stated(client, key) == (None, None)
    assert await written_in(client, key, model, 2 * CHUNK) == 2
    assert await hand.commit(1, write=False, versions=[version]) == "done"
    head = await hand.ledger.head()
    assert head
    assert (head.chunks, await blobs.stated(client, key)) == (2, (2, None))
    assert (await hand.published())[-1].chunks == 2
    await read_newest(client, hand.keys, head, again := Model(hand.layout))
    assert again.digest() == version.digest


async def test_vector_with_other_chunk_sizes_is_recalled(hand: Hand, client: Client) -> None:
    """The updater that handed it out was of another release."""
    await hand.create()
    vector = model_of(layout_of(FOUR // 4), 2.0)
    key = hand.keys.device(3)
    chunks = await written_in(client, key, vector, LONGEST)
    await client.call("HSET", key, "digest", vector.digest(), "chunks", chunks)
    again = Model(vector.layout)
    assert await blobs.recall(client, key, again)
    assert again.digest() == vector.digest()


async def test_handed_out_vector_gives_its_chunk_count(hand: Hand, client: Client) -> None:
    await hand.create()
    vector = model_of(layout_of(FOUR // 4 + 1), 2.0)
    digest, size = vector.digest(), vector.layout.nbytes
    await blobs.write(client, hand.keys.staged(3, digest), vector, expire_s=60)
    assert await hand.ledger.hand_out(hand.updater.token, 3, digest, size) == "done"
    assert await blobs.stated(client, hand.keys.device(3)) == (5, None)
