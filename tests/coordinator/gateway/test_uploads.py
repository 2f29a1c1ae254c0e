"""Updates of devices over real connections, whole or in parts, to a real Redis."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import Client
from fedstream.broker.partial_blobs import PartialBlob, Written
from fedstream.coordinator.gateway.upload_messages import Chunks, Flaw, TooLong, UploadPart
from fedstream.core.formats import format_of
from tests.coordinator.gateway.places import SITE
from tests.coordinator.gateway.uploading import (
    DEVICE,
    SEVERAL,
    Scene,
    queued,
)

# whole updates


@pytest.mark.parametrize("parameters", [64, CHUNK // 4 + 1])
async def test_an_update_in_one_request_is_admitted(
    make: Any, scene: Scene, parameters: int
) -> None:
    hand = await make(parameters)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
        upload, data = await queued(hand)
        assert data == phone.data
        assert (upload.device, upload.site, upload.trainer) == (DEVICE, SITE, f"{SITE}/gw-0")
        assert (upload.seed, upload.attempt) == (phone.offer.task.seed, phone.offer.attempt)
        assert (upload.samples, upload.steps, upload.loss) == (10, 5, 0.5)
        assert not at.gateway.replica.sessions  # its answer was given
    await hand.balanced()


@pytest.mark.parametrize("name", ["int8", "topk:0.01+zstd"])
async def test_every_wire_format_is_taken(make: Any, scene: Scene, name: str) -> None:
    hand, wire = await make(300_000, sends="delta"), format_of(name)
    async with scene.replica(update=wire) as at:
        phone = await scene.phone(at, wire)
        least, most = wire.sizes(hand.layout)
        assert least <= len(phone.data) <= most
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    upload, data = await queued(hand)
    assert (upload.format, upload.sends, data) == (name, "delta", phone.data)


async def test_a_device_that_knows_no_other_format_sends_float32(make: Any, scene: Scene) -> None:
    await make(64, sends="delta")
    async with scene.replica(update=format_of("int8")) as at:
        phone = await scene.phone(at)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)


# updates in parts


async def test_parts_of_any_length_become_equal_chunks(make: Any, scene: Scene) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        created = await phone.posts(at, complete=False)
        assert created.status == 201
        assert created.headers["Location"] == phone.path
        assert created.headers["Upload-Offset"] == "0"
        assert created.headers["Upload-Complete"] == "?0"
        limit = f"max-size={len(phone.data)}, min-append-size={CHUNK}, max-age=600"
        assert created.headers["Upload-Limit"] == limit
        async with scene.deciding():
            for size in (CHUNK, CHUNK + 70_000, 2 * CHUNK - 1):
                before = phone.offset
                answer = await phone.patches(at, before, before + size)
                assert answer.status == 204
                assert answer.headers["Upload-Complete"] == "?0"
                # What fills no chunk is not kept, and the answer says so.
                assert phone.offset == (before + size) // CHUNK * CHUNK
            assert phone.offset == 3 * CHUNK
            assert (await phone.patches(at, phone.offset)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_an_upload_survives_a_restart_and_goes_on_elsewhere(make: Any, scene: Scene) -> None:
    """The gateway dies after two chunks; the device goes on elsewhere, and then here again."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        await phone.breaks_off(at, "POST", phone.creating(), phone.data, 2 * CHUNK + 5)
        assert (await phone.looks(at)).status == 204
        assert phone.offset == 2 * CHUNK
    async with scene.replica(name="gw-1") as another:
        assert (await phone.looks(another)).status == 204
        assert phone.offset == 2 * CHUNK
        assert (await phone.patches(another, 2 * CHUNK, 3 * CHUNK)).status == 204
    async with scene.replica() as at, scene.deciding():
        assert (await phone.looks(at)).headers["Upload-Offset"] == str(3 * CHUNK)
        assert (await phone.patches(at, 3 * CHUNK)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_an_upload_may_end_without_more_bytes(make: Any, scene: Scene) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data, complete=False)).status == 201
        assert phone.offset == len(phone.data)
        assert (await phone.looks(at)).headers["Upload-Complete"] == "?0"
        assert await hand.queue() == []
        async with scene.deciding():
            end = await phone.patches(at, len(phone.data))
            assert end.receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


# beginning anew


async def test_to_begin_again_changes_nothing(make: Any, scene: Scene) -> None:
    """The device did not hear that it had begun."""
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 2 * CHUNK], complete=False)).status == 201
        again = await phone.posts(at, complete=False)
        assert (again.status, again.headers["Upload-Offset"]) == (201, str(2 * CHUNK))


async def test_an_upload_can_be_cancelled(make: Any, scene: Scene) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        assert (await phone.asks(at, "DELETE", phone.about())).status == 204
        assert await hand.client.call("KEYS", hand.keys.update("*")) == []
        assert (await phone.looks(at)).status == 404
        assert phone.offer.task.id in at.gateway.replica.sessions
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
        told = await phone.asks(at, "DELETE", phone.about())
        assert told.refusal == (409, "complete")


async def test_an_upload_that_expired_begins_anew(make: Any, scene: Scene) -> None:
    """Its chunks went away while a part was on its way: nothing half is announced."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 4 * CHUNK], complete=False)).status == 201
        [key] = await hand.client.call("KEYS", hand.keys.update("*"))
        await hand.client.call("UNLINK", key)
        assert (await phone.patches(at, 4 * CHUNK)).refusal == (404, "no upload")
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_what_is_not_finished_expires(make: Any, scene: Scene, client: Client) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        names = [*await client.call("KEYS", hand.keys.update("*"))]
        names += await client.call("KEYS", hand.keys.upload_note(SITE, "*"))
        assert len(names) == 2
        for name in names:
            assert 0 < await client.call("PTTL", name) <= 600_000


async def test_first_request_to_an_upload_asks_redis_for_nothing(
    make: Any, scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody can have begun it; whoever comes later may have forgotten that they did."""
    await make(64)
    looks: list[str] = []
    written = PartialBlob.written

    async def counted(blob: PartialBlob) -> Written:
        looks.append(blob._key)
        return await written(blob)

    monkeypatch.setattr(PartialBlob, "written", counted)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).status == 200
        assert looks == []
        assert (await phone.posts(at, phone.data)).status == 200
        assert len(looks) == 1
        other = await scene.phone(at, device=4)
    async with scene.replica() as at, scene.deciding():
        looks.clear()
        assert (await other.posts(at, other.data)).status == 200
        assert len(looks) == 1, "the task was in hand before"


# parts and chunks, without a gateway

SHORT = 8  # bytes, instead of nearly 1 MiB


@pytest.mark.parametrize(
    ("part", "at", "flaw"),
    [
        (UploadPart(16, 4, completes=True), 16, None),
        (UploadPart(16, None, completes=True), 16, None),
        (UploadPart(0, 20, completes=True), 0, None),
        (UploadPart(0, 20, completes=False), 0, None),
        (UploadPart(8, 8, completes=False), 8, None),
        (UploadPart(8, 0, completes=False), 8, None),
        (UploadPart(20, 0, completes=True), 20, None),
        (UploadPart(8, 12, completes=True), 16, "offset"),
        (UploadPart(16, 4, completes=True), 8, "offset"),
        (UploadPart(16, 5, completes=True), 16, "length"),
        (UploadPart(16, 5, completes=False), 16, "length"),
        (UploadPart(16, 3, completes=True), 16, "length"),
        (UploadPart(16, 0, completes=True), 16, "length"),
        (UploadPart(8, 7, completes=False), 8, "too short"),
        (UploadPart(16, 3, completes=False), 16, "too short"),
        (UploadPart(16, 4, completes=False), 16, None),  # the last bytes, of fewer than a chunk
    ],
)
def test_a_part_has_to_fit(part: UploadPart, at: int, flaw: Flaw | None) -> None:
    assert part.flaw(length=20, at=at, chunk=SHORT) == flaw


@pytest.mark.parametrize(
    ("part", "at", "repeats"),
    [
        (UploadPart(16, 4, completes=True), 20, True),  # the last part again
        (UploadPart(0, 20, completes=True), 20, True),  # all of it again
        (UploadPart(20, 0, completes=True), 20, True),  # nothing but the end
        (UploadPart(8, None, completes=True), 20, True),
        (UploadPart(16, 4, completes=False), 20, False),
        (UploadPart(16, 3, completes=True), 20, False),
        (UploadPart(16, 4, completes=True), 16, False),  # not yet there
        (UploadPart(21, None, completes=True), 20, False),
    ],
)
def test_the_end_may_come_again(part: UploadPart, at: int, repeats: bool) -> None:
    assert part.repeats_the_end(length=20, at=at) is repeats


@given(st.binary(max_size=60), st.lists(st.integers(0, 20)), st.integers(0, 3))
def test_chunks_are_the_bytes(data: bytes, cuts: list[int], after: int) -> None:
    """However they come in, and from whichever chunk on: all of one length but the last."""
    begin = min(after * SHORT, len(data))
    chunks, found, at = Chunks(len(data), begin, chunk=SHORT), dict[int, bytes](), begin
    for size in [*cuts, len(data)]:
        for number, chunk in chunks.take(data[at : at + size]):
            assert number not in found
            found[number] = bytes(chunk)
            assert chunks.offset == min((number + 1) * SHORT, len(data))
        at = min(at + size, len(data))
        assert chunks.received == at
    assert chunks.is_whole
    assert b"".join(found[number] for number in sorted(found)) == data[begin:]
    assert all(len(chunk) == SHORT for number, chunk in found.items() if number != max(found))
    with pytest.raises(TooLong):
        list(chunks.take(b"x"))
