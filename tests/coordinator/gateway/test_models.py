"""Model downloads: whole, in part, by many at once, and while newer versions come."""

from __future__ import annotations

import asyncio
import hashlib
import weakref
from typing import cast

import pytest
from aiohttp import ClientPayloadError
from hypothesis import given
from hypothesis import strategies as st

from fedstream.broker import blobs
from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import RedisSettings
from fedstream.coordinator.gateway.byte_cache import ByteCache, CachedBytes, NoRoom
from fedstream.coordinator.gateway.models import (
    InRedis,
    ModelSource,
    RedisReaders,
    byte_range,
)
from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.core.formats import format_of
from fedstream.core.layout import Payload
from fedstream.core.messages import Encoded, Version
from fedstream.core.records import head_of
from tests.coordinator.gateway.places import coordinating, given_task, owned_by, serving
from tests.support import Hand, layout_of, model_of, wait_until, with_frozen


async def test_model_is_served_as_it_was_published(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(blobs.CHUNK // 4 + 100)  # two chunks
    version = await hand.create()
    async with serving(hand, redis) as place:
        url = f"/v1/models/{version.digest}"
        whole = await place.ask("GET", url, 3)
        assert (whole.status, len(whole.body)) == (200, hand.layout.nbytes)
        assert hashlib.sha256(whole.body).hexdigest() == version.digest
        assert whole.headers["Etag"] == f'"{version.digest}"'
        assert whole.headers["Fedstream-Format"] == "f32"
        assert "immutable" in whole.headers["Cache-Control"]
        head = await place.ask("HEAD", url, 3)
        assert (head.status, head.body) == (200, b"")
        assert int(head.headers["Content-Length"]) == hand.layout.nbytes
        assert (await place.ask("GET", url)).status == 401


async def test_frozen_parameters_are_offered_and_served_apart(
    redis: RedisSettings, hand: Hand
) -> None:
    """The same in every offer, by their digest, so that a device needs them once."""
    hand.layout = with_frozen(hand.layout, *range(1000))
    unshared = hand.layout.unshared
    assert unshared is not None
    version = await hand.create()
    head, values = head_of(unshared), unshared.model()
    key = hand.keys.model(head.blob)
    await blobs.write(hand.client, key, values, expire_s=60, encoded=head.encoded)
    async with coordinating(hand, redis), serving(hand, redis) as place:
        offer = await given_task(hand, place)
        assert (offer.model.digest, offer.model.size) == (version.digest, 16)
        assert offer.unshared is not None
        assert (offer.unshared.digest, offer.unshared.size) == (unshared.digest, 4000)
        assert offer.update.most == 16
        whole = await place.ask("GET", offer.unshared.url, 3)
        assert (whole.status, whole.body) == (200, values.buffer.tobytes())
        assert whole.headers["Fedstream-Format"] == "f32"
        part = await place.ask("GET", offer.unshared.url, 3, headers={"Range": "bytes=3996-"})
        assert (part.status, part.body) == (206, values.buffer.tobytes()[-4:])


async def test_cut_download_goes_on(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(1000)
    await hand.create()
    version = await hand.publish(1, 3.0)
    assert await hand.commit(1, write=False, versions=[version]) == "done"
    model = bytes(model_of(hand.layout, 3.0).buffer.data)
    async with serving(hand, redis) as place:
        url, tag = f"/v1/models/{version.digest}", f'"{version.digest}"'

        async def part(asked: str, **more: str) -> tuple[int, bytes, str | None]:
            about = {"Range": asked, **{name.replace("_", "-"): v for name, v in more.items()}}
            answer = await place.ask("GET", url, 3, headers=about)
            return answer.status, answer.body, answer.headers.get("Content-Range")

        assert await part("bytes=1000-") == (206, model[1000:], "bytes 1000-3999/4000")
        assert await part("bytes=0-0") == (206, model[:1], "bytes 0-0/4000")
        assert await part("bytes=-8") == (206, model[-8:], "bytes 3992-3999/4000")
        assert await part("bytes=1-", If_Range=tag) == (206, model[1:], "bytes 1-3999/4000")
        assert await part("bytes=1-", If_Range='"other"') == (200, model, None)
        assert await part("bytes=0-1,5-6") == (200, model, None)
        status, _, there = await part("bytes=4000-")
        assert (status, there) == (416, "bytes */4000")
        for known in (tag, f'"x", W/{tag}', "*"):
            answer = await place.ask("GET", url, 3, headers={"If-None-Match": known})
            assert (answer.status, answer.body) == (304, b"")
        answer = await place.ask("GET", url, 3, headers={"If-None-Match": '"x"'})
        assert answer.body == model


async def test_compressed_model_is_served_as_its_blob(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(1000)
    await hand.create()
    how, model = format_of("int8+zstd"), model_of(hand.layout, 3.0)
    payload = Payload(how.encoded(model))
    inside = hashlib.sha256(format_of("int8").encoded(model).data).hexdigest()
    encoded = Encoded(how.name, payload.buffer.nbytes, inside)
    version = Version(
        version=1,
        time=1.0,
        epoch=1,
        parent=0,
        digest=model.digest(),
        blob="1.x",
        size=encoded.size,
        format=how.name,
        given=inside,
    )
    key = hand.keys.model("1.x")
    await blobs.write(hand.client, key, payload, expire_s=60, encoded=encoded)
    assert await hand.commit(1, write=False, versions=[version]) == "done"
    async with serving(hand, redis) as place:
        answer = await place.ask("GET", f"/v1/models/{inside}", 3)
        assert (answer.status, answer.body) == (200, bytes(payload.buffer.data))
        assert answer.headers["Fedstream-Format"] == "int8+zstd"
        assert answer.headers["Etag"] == f'"{inside}"'


async def test_model_that_was_offered_is_served_though_redis_has_newer_ones(
    redis: RedisSettings, hand: Hand
) -> None:
    version = await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        waiting = asyncio.create_task(place.check_in(3, wait_s=50))
        await owned_by(hand, 3, "gw-0")
        await hand.open(device=3)
        offer = (await waiting).offer
        copies = place.gateway._models._copies
        await wait_until(lambda: copies.there(version.digest) is not None, what="read already")
        await hand.client.call("UNLINK", hand.keys.model(version.blob))
        answer = await place.ask("GET", offer.model.url, 3)
        assert hashlib.sha256(answer.body).hexdigest() == version.digest


async def test_model_that_its_device_has_is_not_read(redis: RedisSettings, hand: Hand) -> None:
    version = await hand.create()
    async with coordinating(hand, redis), serving(hand, redis) as place:
        waiting = asyncio.create_task(place.check_in(3, wait_s=50, has=version.digest))
        await owned_by(hand, 3, "gw-0")
        await hand.open(device=3)
        assert (await waiting).status == 200
        copies = place.gateway._models._copies
        assert (copies._making, copies._entries) == ({}, {})


async def test_model_that_is_gone_is_superseded(redis: RedisSettings, hand: Hand) -> None:
    version = await hand.create()
    async with serving(hand, redis) as place:
        for digest in ("0" * 64, "latest", "%2e%2e%2fkeys"):
            answer = await place.ask("GET", f"/v1/models/{digest}", 3)
            assert (answer.status, answer.json["reason"]) == (404, "superseded")
        await hand.commit(1)
        await hand.client.call("UNLINK", hand.keys.model(version.blob))
        answer = await place.ask("GET", f"/v1/models/{version.digest}", 3)
        assert (answer.status, answer.json["reason"]) == (404, "superseded")


async def test_excess_download_is_told_to_come_again(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(10 << 20)  # so many bytes that no kernel takes them all
    version = await hand.create()
    url = f"/v1/models/{version.digest}"
    async with serving(hand, redis, downloads=1) as place:
        async with place.session.get(place.url + url, headers={"Device": "3"}) as reading:
            assert reading.status == 200
            answer = await place.ask("GET", url, 4)
            assert (answer.status, answer.json["reason"]) == (503, "busy")
            assert int(answer.headers["Retry-After"]) >= 2
            assert (await place.ask("HEAD", url, 4)).status == 200
            assert len(await reading.read()) == hand.layout.nbytes
        await wait_until(lambda: not place.gateway._models.downloads)
        assert (await place.ask("GET", url, 4)).status == 200


async def test_one_device_cannot_hold_all_downloads(redis: RedisSettings, hand: Hand) -> None:
    hand.layout = layout_of(10 << 20)
    version = await hand.create()
    url, reader = f"/v1/models/{version.digest}", {"Device": "3"}
    async with serving(hand, redis, downloads=3) as place:
        async with (
            place.session.get(place.url + url, headers=reader) as first,
            place.session.get(place.url + url, headers=reader) as second,
        ):
            assert (first.status, second.status) == (200, 200)
            answer = await place.ask("GET", url, 3)
            assert (answer.status, answer.json["reason"]) == (503, "busy")
            assert (await place.ask("GET", url, 4)).status == 200
            first.close()
            second.close()
        await wait_until(lambda: not place.gateway._models.downloads)
        assert (await place.ask("GET", url, 3)).status == 200
        assert not place.gateway._models._downloading


# slow readers

SLOW = 5 << 20  # parameters: so many bytes that no kernel takes them all


async def test_readers_of_redis_are_bounded(redis: RedisSettings, hand: Hand) -> None:
    """Beyond the bound, copies stay with their readers, and there is no room for newer ones."""
    hand.layout = layout_of(SLOW)
    versions = [await hand.create()]
    async with serving(hand, redis, model_bytes=hand.layout.nbytes + 1, redis_downloads=1) as place:
        models = place.gateway._models
        reads = {
            device: await place.session.get(
                f"{place.url}/v1/models/{versions[0].digest}", headers={"Device": str(device)}
            )
            for device in (3, 4)
        }
        versions.append(await hand.publish(1, 1.0))
        assert await hand.commit(1, write=False, versions=versions[-1:]) == "done"
        newer = f"{place.url}/v1/models/{versions[1].digest}"
        reads[5] = await place.session.get(newer, headers={"Device": "5"})
        assert (reads[5].status, models._redis_readers.now) == (200, 1)
        answer = await place.ask("GET", f"/v1/models/{versions[1].digest}", 6)
        assert (answer.status, answer.json["reason"]) == (503, "busy")
        for device, number in ((3, 0), (4, 0), (5, 1)):
            found = hashlib.sha256(await reads[device].read()).hexdigest()
            assert found == versions[number].digest
            assert models._redis_readers.now <= 1
        await wait_until(lambda: not models.downloads)
        assert models._redis_readers.now == 0
        answer = await place.ask("GET", f"/v1/models/{versions[1].digest}", 6)
        assert hashlib.sha256(answer.body).hexdigest() == versions[1].digest


async def test_slow_reader_of_a_version_that_has_gone_is_cut_off(
    redis: RedisSettings, hand: Hand
) -> None:
    hand.layout = layout_of(SLOW)
    first = await hand.create()
    async with serving(hand, redis, model_bytes=hand.layout.nbytes + 1) as place:
        url = f"/v1/models/{first.digest}"
        slow = await place.session.get(place.url + url, headers={"Device": "3"})
        second = await hand.publish(1, 1.0)
        assert await hand.commit(1, write=False, versions=[second]) == "done"
        assert (await place.ask("GET", f"/v1/models/{second.digest}", 4)).status == 200
        await hand.client.call("UNLINK", hand.keys.model(first.blob))
        with pytest.raises(ClientPayloadError):
            await slow.read()
        await wait_until(lambda: not place.gateway._models.downloads)
        answer = await place.ask("GET", f"/v1/models/{second.digest}", 3)
        assert hashlib.sha256(answer.body).hexdigest() == second.digest
        answer = await place.ask("GET", url, 3)
        assert (answer.status, answer.json["reason"]) == (404, "superseded")


async def test_reader_below_the_least_rate_is_cut_off(redis: RedisSettings, hand: Hand) -> None:
    """Or a few devices could take all places for downloads for as long as they like."""
    hand.layout = layout_of(SLOW)
    version = await hand.create()
    async with serving(hand, redis, chunk_s=0.3) as place:
        url = f"{place.url}/v1/models/{version.digest}"
        async with place.session.get(url, headers={"Device": "3"}) as slow:
            await wait_until(lambda: not place.gateway._models.downloads)
            with pytest.raises(ClientPayloadError):
                await slow.read()


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 10))
def test_ranges_are_pythons_slices(begin: int, end: int, size: int) -> None:
    data = bytes(range(size))

    def cut(asked: str) -> bytes | None:
        try:
            part = byte_range(asked, size)
        except Refusal:
            return None
        return data if part is None else data[slice(*part)]

    assert cut(f"bytes={begin}-") == (data[begin:] or None)
    whole = data if end < begin else data[begin : end + 1] or None
    assert cut(f"bytes={begin}-{end}") == whole
    assert cut(f"bytes=-{end}") == (data[-end:] if end else None)


@pytest.mark.parametrize(
    "asked",
    ["", "bytes", "bytes=", "bytes=-", "bytes=a-b", "lines=1-2", "bytes=1-2,4-", "bytes=1--2"],
)
def test_unreadable_range_is_ignored(asked: str) -> None:
    assert byte_range(asked, 10) is None


# the source of one download's bytes


class Chunk(bytearray):
    """One that can be seen to go."""


def volume(data: bytes) -> CachedBytes:
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
            del piece  # as a sender does
    assert held == [0, 0, 0]
    assert readers.has_room


async def test_copy_that_is_wanted_back_is_kept_until_there_is_room_in_redis() -> None:
    async def chunk(number: int) -> bytes:
        return bytes([number + 10]) * CHUNK

    readers, copy = RedisReaders(1), volume(bytes(2 * CHUNK))
    with ModelSource(copy, InRedis(chunk, readers)) as source:
        copy.is_wanted_back = True
        with readers.place():
            assert bytes(await source.piece(0, 1)) == b"\0"
            assert copy.readers == 1
        assert bytes(await source.piece(CHUNK, CHUNK + 1)) == b"\x0b"
        assert (copy.readers, readers.now) == (0, 1)
    assert readers.now == 0


# copies in memory


async def put(shelf: ByteCache, name: str, size: int) -> CachedBytes:
    async def make() -> CachedBytes:
        return CachedBytes(memoryview(bytes(size)), name, "f32")

    return await shelf.get(name, size, make)


async def test_what_was_asked_for_longest_ago_makes_room() -> None:
    shelf = ByteCache(10)
    for name in "abc":
        await put(shelf, name, 3)
    assert shelf.there("a")
    await put(shelf, "d", 4)
    assert [name for name in "abcd" if shelf.there(name)] == ["a", "c", "d"]
    assert shelf.nbytes == 10


async def test_what_is_read_stays_and_counts() -> None:
    shelf = ByteCache(10)
    large = await put(shelf, "large", 12)
    with large.read():
        assert not shelf.tidy()
        with pytest.raises(NoRoom):
            await put(shelf, "small", 1)
        assert shelf.nbytes == 12
    assert shelf.tidy()
    assert shelf.nbytes == 0


async def test_what_is_read_is_wanted_back_oldest_first_as_far_as_it_helps() -> None:
    shelf = ByteCache(10)
    old, new = await put(shelf, "old", 5), await put(shelf, "new", 5)
    with old.read(), new.read():
        with pytest.raises(NoRoom):
            await put(shelf, "newest", 3)
        assert (old.is_wanted_back, new.is_wanted_back) == (True, False)
    shelf.there("old")
    assert not old.is_wanted_back, "nobody reads it, so it may go when it has to"


async def test_what_somebody_will_ask_for_is_made_once() -> None:
    shelf, made = ByteCache(10), []

    async def make() -> CachedBytes:
        made.append("a")
        return CachedBytes(memoryview(bytes(6)), "a", "f32")

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
    shelf = ByteCache(10)

    async def fail() -> CachedBytes:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await shelf.get("a", 10, fail)
    await put(shelf, "b", 10)
    assert shelf.nbytes == 10
