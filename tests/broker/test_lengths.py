"""What somebody else wrote is measured before it is read: no gigabytes come into a service."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker import blobs
from fedstream.broker.client import Client
from fedstream.broker.streams import Entry
from fedstream.core.messages import Dead, Upload
from tests.support import Hand, layout_of

CHUNK = blobs.CHUNK
TWO = layout_of(CHUNK // 4 + 10)  # two chunks, the second of 40 bytes


async def written(hand: Hand) -> tuple[Upload, str]:
    """An open task's answer and the key of its blob, which is there as a trainer writes it."""
    await hand.create()
    [trigger] = await hand.open()
    upload = await hand.trained(trigger)
    return upload, hand.keys.update(upload.blob)


@pytest.mark.parametrize("floats", [1, CHUNK // 4, CHUNK // 4 + 1])
async def test_blob_of_the_announced_size_is_admitted(hand: Hand, floats: int) -> None:
    hand.layout = layout_of(floats)
    upload, _ = await written(hand)
    assert await hand.admit(upload) == [("admitted", "")]


@pytest.mark.parametrize(
    ("commands", "reason"),
    [
        ([("HSET", "0", b"x" * 4 * CHUNK)], "size"),
        ([("HSET", "1", b"x" * 41)], "size"),
        ([("HSET", "1", b"x" * 39)], "size"),
        ([("HSET", "0", b"x" * (CHUNK - 1), "1", b"x" * 41)], "size"),  # together they fit
        ([("HSET", "2", b"x")], "size"),
        ([("HSET", "digest", b"x")], "size"),
        ([("HSET", "size", str(TWO.nbytes + 1))], "size"),
        ([("HSET", "size", hex(TWO.nbytes))], "size"),  # a number of as many digits, to Lua
        ([("HSET", "size", b"9" * 5000)], "size"),
        ([("HDEL", "1")], "blob missing"),
        ([("HDEL", "1"), ("HSET", "2", b"x" * 40)], "blob missing"),
        ([("HSET", "1", b"")], "blob missing"),
        ([("HDEL", "size")], "blob missing"),
        ([("UNLINK",)], "blob missing"),
        ([("SET", b"x" * TWO.nbytes)], "blob missing"),
    ],
)
async def test_blob_of_another_size_is_refused(
    hand: Hand, client: Client, commands: list[tuple[Any, ...]], reason: str
) -> None:
    hand.layout = TWO
    upload, key = await written(hand)
    await client.pipeline([(name, key, *rest) for name, *rest in commands])
    assert await hand.admit(upload) == [("refused", reason)]
    assert await hand.queue() == []
    assert await client.call("EXISTS", key, hand.keys.queued(upload.blob)) == 0
    await hand.balanced()


async def test_oversized_blob_is_refused_unread(hand: Hand, client: Client) -> None:
    """Nor is the field that says the size copied into the script."""

    async def lua_bytes() -> int:
        info = await client.call("INFO", "memory")
        return int(info.partition(b"used_memory_lua:")[2].split()[0])

    upload, key = await written(hand)
    await client.call("HSET", key, "size", b"9" * (16 << 20))
    before = await lua_bytes()
    assert await hand.admit(upload) == [("refused", "size")]
    assert await lua_bytes() - before < 1 << 20


async def test_dead_letter_keeps_the_beginning_of_a_huge_entry(hand: Hand, client: Client) -> None:
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
    assert [len(letter.reason) for letter in letters] == [len("unreadable"), 1000]
