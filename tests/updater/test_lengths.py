"""What somebody else wrote is measured before it is read: no gigabytes come into a service."""

from __future__ import annotations

from typing import Any

import pytest

from broker import blobs
from broker.client import Client
from broker.errors import BlobDamaged, BlobMissing
from broker.keys import Keys
from broker.messages import Dead
from broker.streams import Entry
from tests.support import Hand, layout_of, model_of

LAYOUT = layout_of(blobs.CHUNK // 4 + 10)  # two chunks


@pytest.mark.parametrize(
    ("field", "value", "error", "said"),
    [
        (1, b"x" * 41, BlobDamaged, "chunk 1 has 41 bytes, expected 40"),
        (0, b"x" * (2 * blobs.CHUNK), BlobDamaged, "chunk 0 has 2097024 bytes"),
        ("size", b"9" * 5000, BlobDamaged, "size has 5000 bytes, expected 7"),
        (1, None, BlobMissing, "is not there"),
        ("size", None, BlobMissing, "is not there"),
    ],
)
async def test_a_blob_is_looked_over_by_its_lengths(
    client: Client, keys: Keys, field: Any, value: bytes | None, error: type[Exception], said: str
) -> None:
    key = keys.update("b")
    await blobs.write(client, key, model_of(LAYOUT, 1.0), expire_s=60)
    await blobs.look_over(client, key, LAYOUT.nbytes)
    await client.call(*(("HDEL", key, field) if value is None else ("HSET", key, field, value)))
    with pytest.raises(error, match=said):
        await blobs.look_over(client, key, LAYOUT.nbytes)
    await client.call("UNLINK", key)


async def test_what_is_no_blob_is_damaged(client: Client, keys: Keys) -> None:
    key = keys.update("b")
    await client.call("SET", key, "text")
    with pytest.raises(BlobDamaged, match="is no blob"):
        await blobs.look_over(client, key, 40)
    await client.call("UNLINK", key)


async def test_a_letter_keeps_the_beginning_of_a_huge_entry(hand: Hand, client: Client) -> None:
    await hand.create()
    for found in (
        None,
        Dead(stream="tasks", entry="1-0", reason="r" * 10**6, time=1.0, data=b"y" * 10**6),
    ):
        id_ = (await client.call("XADD", hand.keys.queue, "*", "m", b"x" * 10**6)).decode()
        entry = Entry(id_, b"x" * 10**6)
        assert await hand.ledger.bury(hand.keys.queue, "", entry, "unreadable", found=found)
    rows = await client.call("XRANGE", hand.keys.dead, "-", "+")
    letters = [Dead.decode(fields[1]) for _, fields in rows]
    assert [len(letter.data) for letter in letters] == [64 << 10] * 2
    assert [len(letter.reason) for letter in letters] == [len("unreadable"), 64 << 10]
