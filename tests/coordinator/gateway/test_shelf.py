"""What is kept of the bytes that many read, and for how long."""

from __future__ import annotations

import pytest

from fedstream.coordinator.gateway.shelf import NoRoom, Shelf, Volume


async def put(shelf: Shelf, name: str, size: int) -> Volume:
    async def make() -> Volume:
        return Volume(memoryview(bytes(size)), name, "f32")

    return await shelf.get(name, size, make)


async def test_what_was_asked_for_longest_ago_makes_room() -> None:
    shelf = Shelf(10)
    for name in "abc":
        await put(shelf, name, 3)
    assert shelf.there("a")
    await put(shelf, "d", 4)
    assert [name for name in "abcd" if shelf.there(name)] == ["a", "c", "d"]
    assert shelf.nbytes == 10


async def test_what_is_read_stays_and_counts() -> None:
    shelf = Shelf(10)
    large = await put(shelf, "large", 12)
    with large.read():
        assert not shelf.tidy()
        with pytest.raises(NoRoom):
            await put(shelf, "small", 1)
        assert shelf.nbytes == 12
    assert shelf.tidy()
    assert shelf.nbytes == 0


async def test_what_is_read_is_wanted_back_oldest_first_as_far_as_it_helps() -> None:
    shelf = Shelf(10)
    old, new = await put(shelf, "old", 5), await put(shelf, "new", 5)
    with old.read(), new.read():
        with pytest.raises(NoRoom):
            await put(shelf, "newest", 3)
        assert (old.is_wanted_back, new.is_wanted_back) == (True, False)
    shelf.there("old")
    assert not old.is_wanted_back, "nobody reads it, so it may go when it has to"


async def test_what_somebody_will_ask_for_is_made_once() -> None:
    shelf, made = Shelf(10), []

    async def make() -> Volume:
        made.append("a")
        return Volume(memoryview(bytes(6)), "a", "f32")

    for _ in range(3):
        shelf.prepare("a", 6, make)
    found = await shelf.get("a", 6, make)
    shelf.prepare("a", 6, make)
    assert shelf.there("a") is found
    assert made == ["a"]
    with found.read():
        shelf.prepare("b", 6, make)  # there is no room
        assert not shelf._making
    shelf.prepare("large", 11, make)
    assert not shelf._making


async def test_what_could_not_be_made_takes_no_room() -> None:
    shelf = Shelf(10)

    async def fail() -> Volume:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await shelf.get("a", 10, fail)
    await put(shelf, "b", 10)
    assert shelf.nbytes == 10
