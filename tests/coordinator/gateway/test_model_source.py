"""Where one download's bytes come from, chunk by chunk."""

from __future__ import annotations

import weakref
from typing import cast

from fedstream.broker.blobs import CHUNK
from fedstream.coordinator.gateway.byte_cache import CachedBytes
from fedstream.coordinator.gateway.model_source import (
    InRedis,
    ModelSource,
    RedisReaders,
)


class Chunk(bytearray):
    """One that can be seen to go."""


def cached(data: bytes) -> CachedBytes:
    return CachedBytes(memoryview(data), "digest", "f32")


async def test_chunk_of_redis_goes_before_the_next_is_read() -> None:
    read: list[weakref.ref[Chunk]] = []
    held: list[int] = []  # chunks, as the next is read

    async def chunk(number: int) -> bytes:
        held.append(sum(one() is not None for one in read))
        found = Chunk(bytes([number]) * CHUNK)
        read.append(weakref.ref(found))
        return cast("bytes", found)

    readers = RedisReaders(1)
    with ModelSource(None, InRedis(chunk, readers)) as source:
        assert not readers.has_room
        begin = 0
        while begin < 3 * CHUNK:
            piece = await source.piece(begin, 3 * CHUNK)
            assert piece == bytes([begin // CHUNK]) * len(piece)
            begin += len(piece)
            del piece  # as whoever sends it
    assert held == [0, 0, 0]
    assert readers.has_room


async def test_copy_that_is_wanted_back_is_kept_until_there_is_room_in_redis() -> None:
    async def chunk(number: int) -> bytes:
        return bytes([number + 10]) * CHUNK

    readers, copy = RedisReaders(1), cached(bytes(2 * CHUNK))
    with ModelSource(copy, InRedis(chunk, readers)) as source:
        copy.is_wanted_back = True
        with readers.place():
            assert bytes(await source.piece(0, 1)) == b"\0"
            assert copy.readers == 1
        assert bytes(await source.piece(CHUNK, CHUNK + 1)) == b"\x0b"
        assert (copy.readers, readers.now) == (0, 1)
    assert readers.now == 0
