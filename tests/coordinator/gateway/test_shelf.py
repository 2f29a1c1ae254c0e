"""What is kept of the bytes that many read, and for how long."""

from __future__ import annotations

import pytest

from fedstream.coordinator.gateway.byte_cache import ByteCache, CachedBytes, NoRoom


async def put(cache: ByteCache, name: str, size: int) -> CachedBytes:
    async def make() -> CachedBytes:
        return CachedBytes(memoryview(bytes(size)), name, "f32")

    return await cache.get(name, size, make)


async def test_what_was_asked_for_longest_ago_makes_room() -> None:
    cache = ByteCache(10)
    for name in "abc":
        await put(cache, name, 3)
    assert cache.there("a")
    await put(cache, "d", 4)
    assert [name for name in "abcd" if cache.there(name)] == ["a", "c", "d"]
    assert cache.nbytes == 10


async def test_what_is_read_stays_and_counts() -> None:
    cache = ByteCache(10)
    large = await put(cache, "large", 12)
    with large.read():
        assert not cache.tidy()
        with pytest.raises(NoRoom):
            await put(cache, "small", 1)
        assert cache.nbytes == 12
    assert cache.tidy()
    assert cache.nbytes == 0


async def test_what_is_read_is_wanted_back_oldest_first_as_far_as_it_helps() -> None:
    cache = ByteCache(10)
    old, new = await put(cache, "old", 5), await put(cache, "new", 5)
    with old.read(), new.read():
        with pytest.raises(NoRoom):
            await put(cache, "newest", 3)
        assert (old.is_wanted_back, new.is_wanted_back) == (True, False)
    cache.there("old")
    assert not old.is_wanted_back, "nobody reads it, so it may go when it has to"


async def test_what_somebody_will_ask_for_is_made_once() -> None:
    cache, made = ByteCache(10), []

    async def make() -> CachedBytes:
        made.append("a")
        return CachedBytes(memoryview(bytes(6)), "a", "f32")

    for _ in range(3):
        cache.prepare("a", 6, make)
    found = await cache.get("a", 6, make)
    cache.prepare("a", 6, make)
    assert cache.there("a") is found
    assert made == ["a"]
    with found.read():
        cache.prepare("b", 6, make)  # there is no room
        assert not cache._making
    cache.prepare("large", 11, make)
    assert not cache._making


async def test_what_could_not_be_made_takes_no_room() -> None:
    cache = ByteCache(10)

    async def fail() -> CachedBytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await cache.get("a", 10, fail)
    await put(cache, "b", 10)
    assert cache.nbytes == 10
