"""Uploads over real connections and a real Redis, with a coordinator that decides on them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.layout import Model
from fedstream.broker.messages import Upload, Withdraw
from fedstream.coordinator.gateway import receipts
from fedstream.protocol.messages import Offer
from fedstream.wire import F32, Format, format_of
from tests.coordinator.gateway.places import SITE, Place, coordinating, ends, serving
from tests.coordinator.gateway.uploading import DEVICE, Answered, Sender, connected, offered
from tests.support import Hand, Proxy, counted, full, layout_of, wait_until

FORTY_FOUR_MB = 11_000_000  # parameters of 4 bytes


@pytest.fixture
def make(hand: Hand) -> Callable[..., Any]:
    """Makes a run of a model of so many parameters."""

    async def make(parameters: int = 64, **run: Any) -> Hand:
        hand.layout = layout_of(parameters)
        await hand.create(**run)
        await hand.ledger.prepare(["pool", SITE])
        return hand

    return make


def trained(hand: Hand, offer: Offer, wire: Format = F32, **report: Any) -> Sender:
    """A device that has trained its task."""
    model = Model(hand.layout)
    model.floats[:] = np.random.default_rng(0).standard_normal(model.floats.size, np.float32)
    data = wire.encoded(model).tobytes()
    about = {
        "digest": hashlib.sha256(data).hexdigest(), "samples": 10, "steps": 5, "lr": 0.1,
        "loss": 0.5, "seconds": 1.0, "tau": offer.model.version, "base": offer.model.digest,
        "layout": hand.layout.signature, "format": wire.name,
    }  # fmt: skip
    return Sender(offer, data, about | report, offer.task.device)


async def queued(hand: Hand) -> tuple[Upload, bytes]:
    """The one update in the updater's queue, and its bytes."""
    [(_, upload)] = await hand.queue()
    assert isinstance(upload, Upload)
    fields = await hand.client.call("HGETALL", hand.keys.queued(upload.blob))
    chunks = dict(zip(fields[::2], fields[1::2], strict=True))
    assert int(chunks.pop(b"size")) == upload.size
    assert len(chunks) == upload.chunks
    assert all(len(chunks[b"%d" % n]) == CHUNK for n in range(len(chunks) - 1))
    return upload, b"".join(chunks[b"%d" % n] for n in range(len(chunks)))


def received(at: Place) -> float:
    """Bytes of updates that a replica has got."""
    return counted(at.context, "fedstream_gateway_upload_bytes_total")


@dataclass
class Sending:
    """A connection with a request that has not ended."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def status(self) -> int:
        """Of the answer, which may come before the request's end."""
        told = await self.reader.readuntil(b"\r\n\r\n")
        return int(told.split()[1])

    def close(self) -> None:
        self.writer.close()


class Scene:
    """A run with a task in hand, and the device that has trained it."""

    def __init__(self, hand: Hand, redis: RedisSettings) -> None:
        self.hand = hand
        self.redis = redis

    async def phone(
        self, at: Place, wire: Format = F32, *, device: int = DEVICE, **report: Any
    ) -> Sender:
        """A device that has trained a task, but sent nothing."""
        offer = await offered(self.hand, at, device)
        return trained(self.hand, offer, wire, **report)

    async def sending(self, at: Place, phone: Sender, count: int) -> Sending:
        """A device that has sent so many bytes, on a connection that stays open."""
        reader, writer = await connected(at)
        writer.write(phone.head("POST", phone.creating(), len(phone.data)) + phone.data[:count])
        await wait_until(lambda: received(at) >= count)
        return Sending(reader, writer)

    def replica(self, **settings: Any) -> AbstractAsyncContextManager[Place]:
        return serving(self.hand, self.redis, **settings)

    def deciding(self) -> AbstractAsyncContextManager[Any]:
        return coordinating(self.hand, self.redis)


@pytest.fixture
def scene(hand: Hand, redis: RedisSettings) -> Scene:
    return Scene(hand, redis)


CHUNKS = 5
SEVERAL = CHUNKS * CHUNK // 4 - 1000  # parameters of an update of five chunks


# whole updates


@pytest.mark.parametrize("parameters", [1, 64, CHUNK // 4, CHUNK // 4 + 1, SEVERAL])
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
        assert not at.gateway._desk  # its answer was given
    await hand.balanced()


@pytest.mark.parametrize(
    "name",
    ["f32", "bf16", "int8", "int4", "topk:0.1", "f32+zstd", "bf16+zstd", "int8+zstd", "int4+zstd",
     "topk:0.01+zstd"],
)  # fmt: skip
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


async def test_twenty_cuts_send_twenty_chunks_again_at_most(make: Any, scene: Scene) -> None:
    """44 MB, cut at random places."""
    hand, random_ = await make(FORTY_FOUR_MB), random.Random(3)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        places = sorted(random_.sample(range(len(phone.data)), 20))
        method, about, cuts = "POST", phone.creating(), 0
        for place in places:
            rest = phone.data[phone.offset :]
            if place <= phone.offset:
                place = phone.offset + random_.randrange(CHUNK)
            await phone.breaks_off(at, method, about, rest, place - phone.offset)
            cuts += 1
            found = await phone.looks(at)
            assert found.status == 204
            assert found.headers["Upload-Complete"] == "?0"
            assert found.headers["Upload-Length"] == str(len(phone.data))
            assert phone.offset % CHUNK == 0
            method, about = "PATCH", phone.going_on(phone.offset)
        assert cuts == 20
        async with scene.deciding():
            assert (await phone.patches(at, phone.offset)).receipt == (200, "admitted", None)
        again = phone.sent - len(phone.data)
        assert again <= 20 * CHUNK, f"{again / CHUNK:.1f} chunks"
    upload, data = await queued(hand)
    assert hashlib.sha256(data).hexdigest() == upload.digest


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


async def test_a_restart_forgets_no_task(make: Any, scene: Scene) -> None:
    """The device had sent nothing yet, and is the first to ask the gateway that is back."""
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
    async with scene.replica() as at, scene.deciding():
        assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)


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


# the receipt


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways that don't wait long for a decision."""
    monkeypatch.setattr(receipts, "WAIT_S", 0.2)


@pytest.mark.usefixtures("impatient")
async def test_the_last_part_may_come_again(make: Any, scene: Scene) -> None:
    """It gets the same receipt: undecided, decided, after a restart, and at another replica."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 4 * CHUNK], complete=False)).status == 201
        undecided = await phone.patches(at, 4 * CHUNK)
        assert undecided.receipt == (202, "received", None)
        assert undecided.headers["Retry-After"] == "1"
        state = (await phone.looks(at)).headers
        assert (state["Upload-Complete"], state["Upload-Offset"]) == ("?1", str(len(phone.data)))
        async with scene.deciding():
            for _ in range(2):
                assert (await phone.patches(at, 4 * CHUNK)).receipt == (200, "admitted", None)
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
            assert (await phone.looks(at)).headers["Upload-Complete"] == "?1"
    async with scene.replica(name="gw-1") as another:
        assert (await phone.patches(another, 4 * CHUNK)).receipt == (200, "admitted", None)
    async with scene.replica() as at:
        assert (await phone.patches(at, len(phone.data))).receipt == (200, "admitted", None)
        assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    view = await hand.ledger.look()
    assert view.reasons("stray") == {}


@pytest.mark.usefixtures("impatient")
async def test_a_small_update_may_come_again(make: Any, scene: Scene) -> None:
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        for _ in range(2):
            assert (await phone.posts(at, phone.data)).receipt == (202, "received", None)
        # It may be long until somebody decides, and the device must be known until then.
        [note] = await hand.client.call("KEYS", hand.keys.upload_note(SITE, "*"))
        assert await hand.client.call("PTTL", note) > 500_000
        async with scene.deciding():
            for _ in range(2):
                assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    assert (await hand.ledger.look()).reasons("stray") == {}


async def test_a_wrong_digest_is_admitted_and_refused_by_the_updater(
    make: Any, scene: Scene
) -> None:
    """Nobody but the updater reads the bytes: who asks later hears of it."""
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at, digest="0" * 64)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
        upload, _ = await queued(hand)
        assert await hand.commit(None, upload) == "done"
        assert (await phone.posts(at, phone.data)).receipt == (422, "refused", "digest")
    await hand.balanced()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("parameters", [64, SEVERAL])
async def test_what_was_forgotten_is_not_asked_for_ever(
    make: Any, scene: Scene, parameters: int
) -> None:
    """Redis knows how the newest 20,000 tasks ended; this one ended before them."""
    hand = await make(parameters)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
        upload, _ = await queued(hand)
        assert await hand.commit(None, upload) == "done"
        await hand.client.call("DEL", hand.keys.ended)
        assert (await phone.patches(at, len(phone.data))).refusal == (404, "no upload")
        assert (await phone.posts(at, phone.data)).refusal == (404, "unknown task")


async def test_a_refusal_by_the_coordinator_is_the_receipt(make: Any, scene: Scene) -> None:
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at, base="0" * 64)
        async with scene.deciding():
            for _ in range(2):
                told = await phone.posts(at, phone.data)
                assert told.receipt == (422, "refused", "unknown base")


async def test_an_answer_to_a_task_that_was_given_up_hears_so(make: Any, scene: Scene) -> None:
    """The gateway has not heard of it yet: the lease's entry is gone."""
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        overdue = Withdraw(tasks=(phone.offer.task.id,), why="timed out")
        await hand.client.call("XADD", hand.keys.triggers, "*", "m", overdue.encode())
        async with scene.deciding():

            async def withdrawn() -> bool:
                return not (await hand.ledger.look()).open

            await wait_until(withdrawn)
            told = await phone.posts(at, phone.data)
            assert told.receipt == (422, "given up", "timed out")
        assert await hand.queue() == []


# what is refused before a byte is read


async def test_anothers_task_is_unknown(make: Any, scene: Scene) -> None:
    """Whatever the other device knows of it, and however far its upload has got."""
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        phone.device = DEVICE + 1
        for told in (
            await phone.posts(at, phone.data),
            await phone.patches(at, CHUNK),
            await phone.asks(at, "DELETE", phone.about()),
        ):
            assert told.refusal == (404, "unknown task")
        assert (await phone.looks(at)).status == 404
        phone.device = DEVICE
        async with scene.deciding():
            assert (await phone.patches(at, CHUNK)).receipt == (200, "admitted", None)
        phone.device = DEVICE + 1
        assert (await phone.patches(at, CHUNK)).refusal == (404, "unknown task")


async def test_another_attempt_is_unknown(make: Any, scene: Scene) -> None:
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        for path in ("0123456789ab", "..%2f..", "0123456789AB", "x"):
            url = f"{at.url}/v1/tasks/{phone.offer.task.id}/updates/{path}"
            async with at.session.post(url, data=phone.data, headers=phone.creating()) as told:
                assert (told.status, (await told.json())["reason"]) == (404, "unknown task")


@pytest.mark.parametrize(
    ("length", "refusal"),
    [
        ("260", (413, "too large")),
        ("999999999999999", (413, "too large")),
        ("252", (400, "length")),
        ("0", (400, "length")),
        ("-256", (400, "malformed")),
        ("256.0", (400, "malformed")),
        ("1e3", (400, "malformed")),
        ("9" * 16, (400, "malformed")),
    ],
)
async def test_lengths_that_no_update_has(
    make: Any, scene: Scene, length: str, refusal: tuple[int, str]
) -> None:
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        about = phone.creating(complete=False) | {"Upload-Length": length}
        assert (await phone.asks(at, "POST", about)).refusal == refusal
        assert await hand.client.call("KEYS", hand.keys.update("*")) == []
        assert phone.offer.task.id in at.gateway._desk  # the device may try again, or give up


def without(name: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda about: {key: said for key, said in about.items() if key != name}


def instead(name: str, said: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda about: about | {name: said}


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        (without("Upload-Complete"), (400, "malformed")),
        (instead("Upload-Complete", "true"), (400, "malformed")),
        (without("Update-Report"), (400, "malformed")),
        (instead("Update-Report", "{}"), (400, "malformed")),
        (instead("Update-Report", "[1]"), (400, "malformed")),
        (instead("Update-Report", "{" * 1990), (400, "malformed")),
        (instead("Update-Report", json.dumps({"x": "y" * 2000})), (400, "malformed")),
        (instead("Content-Encoding", "gzip"), (415, "malformed")),
    ],
)
async def test_headers_that_say_too_little(
    make: Any, scene: Scene, changed: Any, refusal: tuple[int, str]
) -> None:
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        told = await phone.asks(at, "POST", changed(phone.creating()), phone.data)
        assert told.refusal == refusal


async def test_an_upload_of_unknown_length_is_refused(make: Any, scene: Scene) -> None:
    """Unless the request holds all of it and says how much that is."""
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        unknown = without("Upload-Length")
        told = await phone.asks(at, "POST", unknown(phone.creating(complete=False)))
        assert told.refusal == (411, "length")
        async with scene.deciding():
            told = await phone.asks(at, "POST", unknown(phone.creating()), phone.data)
            assert told.receipt == (200, "admitted", None)


@pytest.mark.parametrize(
    ("report", "refusal"),
    [
        ({"samples": -1}, (400, "malformed")),
        ({"steps": 1.5}, (400, "malformed")),
        ({"lr": float("inf")}, (400, "malformed")),
        ({"loss": float("nan")}, (400, "malformed")),
        ({"digest": "abc"}, (400, "malformed")),
        ({"tau": "0"}, (400, "malformed")),
        ({"format": "int8"}, (422, "format")),
        ({"format": "pickle"}, (422, "format")),
        ({"layout": "0" * 64}, (422, "format")),
    ],
)
async def test_reports_that_cannot_be(
    make: Any, scene: Scene, report: dict[str, Any], refusal: tuple[int, str]
) -> None:
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at, **report)
        assert (await phone.posts(at, phone.data)).refusal == refusal


async def test_the_body_is_asked_for_only_after_the_checks(make: Any, scene: Scene) -> None:
    """A client that waits for 100 (Continue) sends nothing in vain."""
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        for length, status in (("300", 413), ("256", 100)):
            about = phone.creating() | {"Upload-Length": length, "Expect": "100-continue"}
            reader, writer = await connected(at)
            writer.write(phone.head("POST", about, 256))
            asked = Sending(reader, writer)
            assert await asked.status() == status
            if status == 100:
                writer.write(phone.data)
                assert await asked.status() == 202
            asked.close()


# parts that do not fit


async def test_a_part_from_elsewhere_is_refused_with_the_right_offset(
    make: Any, scene: Scene
) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 2 * CHUNK], complete=False)).status == 201
        for offset in (0, CHUNK, 2 * CHUNK - 1, 3 * CHUNK, len(phone.data) - 1):
            told = await phone.patches(at, offset)
            assert told.status == 409
            assert told.headers["Content-Type"] == "application/problem+json"
            assert told.headers["Upload-Offset"] == str(2 * CHUNK)
            assert told.said["type"].endswith("#mismatching-upload-offset")
            assert told.said["expected-offset"] == 2 * CHUNK
            assert told.said["provided-offset"] == offset
        async with scene.deciding():
            assert (await phone.patches(at, 2 * CHUNK)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_a_part_must_have_a_chunk_or_end_the_upload(make: Any, scene: Scene) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        told = await phone.posts(at, phone.data[: CHUNK - 1], complete=False)
        assert told.refusal == (400, "length")
        assert f"min-append-size={CHUNK}" in told.headers["Upload-Limit"]
        assert (await phone.posts(at, complete=False)).status == 201
        assert (await phone.patches(at, 0, CHUNK - 1)).refusal == (400, "length")
        assert (await phone.looks(at)).headers["Upload-Offset"] == "0"


async def chunked(
    at: Place, phone: Sender, method: str, about: dict[str, str], body: bytes
) -> Answered:
    """A request that doesn't say how long its body is."""

    async def pieces() -> AsyncIterator[bytes]:
        for begin in range(0, len(body), 100_000):
            yield body[begin : begin + 100_000]

    async with at.session.request(
        method, at.url + phone.path, headers=about, data=pieces()
    ) as told:
        return Answered(told.status, dict(told.headers), json.loads(await told.read() or b"{}"))


async def test_a_first_part_may_come_without_its_length(make: Any, scene: Scene) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        part = phone.data[: 2 * CHUNK + 9]
        told = await chunked(at, phone, "POST", phone.creating(complete=False), part)
        assert (told.status, told.headers["Upload-Offset"]) == (201, str(2 * CHUNK))


async def test_more_bytes_than_announced_end_the_upload(make: Any, scene: Scene) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        told = await phone.posts(at, phone.data + b"x")
        assert told.refusal == (400, "length")
        told = await chunked(at, phone, "POST", phone.creating(), phone.data + b"x")
        assert told.refusal == (400, "length")
        assert (await phone.looks(at)).status == 404
        assert await hand.client.call("KEYS", hand.keys.update("*")) == []
        async with scene.deciding():
            told = await chunked(at, phone, "POST", phone.creating(), phone.data)
            assert told.receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_fewer_bytes_than_announced_end_nothing(make: Any, scene: Scene) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        told = await chunked(at, phone, "POST", phone.creating(), phone.data[:-1])
        assert told.refusal == (400, "length")
        assert (await phone.looks(at)).headers["Upload-Offset"] == str(4 * CHUNK)
        async with scene.deciding():
            assert (await phone.patches(at, 4 * CHUNK)).receipt == (200, "admitted", None)


async def test_a_part_is_of_the_right_kind(make: Any, scene: Scene) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, complete=False)).status == 201
        going_on = phone.going_on(0)
        told = await phone.asks(at, "PATCH", going_on | {"Content-Type": "text/plain"})
        assert told.refusal == (415, "malformed")
        assert told.headers["Accept-Patch"] == "application/partial-upload"
        for name in ("Upload-Offset", "Upload-Complete"):
            told = await phone.asks(at, "PATCH", without(name)(going_on))
            assert told.refusal == (400, "malformed")
        told = await phone.asks(at, "PATCH", going_on | {"Upload-Length": "17"}, phone.data)
        assert told.refusal == (400, "length")


async def test_what_never_began_can_not_go_on(make: Any, scene: Scene) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.looks(at)).status == 404
        assert (await phone.patches(at, 0)).refusal == (404, "no upload")


# beginning anew


async def test_to_begin_again_changes_nothing(make: Any, scene: Scene) -> None:
    """The device did not hear that it had begun."""
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 2 * CHUNK], complete=False)).status == 201
        again = await phone.posts(at, complete=False)
        assert (again.status, again.headers["Upload-Offset"]) == (201, str(2 * CHUNK))


async def test_another_report_begins_anew(make: Any, scene: Scene) -> None:
    """The device lost what it had trained, and trained again."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 2 * CHUNK], complete=False)).status == 201
        phone.data = bytes(reversed(phone.data))
        phone.report["digest"] = hashlib.sha256(phone.data).hexdigest()
        assert (await phone.posts(at, complete=False)).headers["Upload-Offset"] == "0"
        async with scene.deciding():
            assert (await phone.patches(at, 0)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_all_of_it_again_overwrites_a_beginning(make: Any, scene: Scene) -> None:
    """A simple device knows only how to send everything."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        await phone.breaks_off(at, "POST", phone.creating(), phone.data, 3 * CHUNK)
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_an_upload_can_be_cancelled(make: Any, scene: Scene) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        assert (await phone.asks(at, "DELETE", phone.about())).status == 204
        assert await hand.client.call("KEYS", hand.keys.update("*")) == []
        assert (await phone.looks(at)).status == 404
        assert phone.offer.task.id in at.gateway._desk
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


# two at once, slow senders, too many


async def test_two_connections_do_not_mix_their_bytes(make: Any, scene: Scene) -> None:
    """One hangs in the middle of a chunk; the later one takes over."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        older = await scene.sending(at, phone, 2 * CHUNK + 9)
        assert (await phone.looks(at)).headers["Upload-Offset"] == str(2 * CHUNK)
        assert await older.status() == 409
        older.writer.write(b"\0" * CHUNK)  # it does not know yet
        async with scene.deciding():
            assert (await phone.patches(at, 2 * CHUNK)).receipt == (200, "admitted", None)
        older.close()
    assert (await queued(hand))[1] == phone.data


async def test_many_at_once_end_in_one_update(make: Any, scene: Scene) -> None:
    """A device gone wild sends the same from many connections."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        async with scene.deciding():
            told = await asyncio.gather(*(phone.posts(at, phone.data) for _ in range(6)))
            last = await phone.posts(at, phone.data)
        assert {one.status for one in told} <= {200, 409}
        assert last.receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    await hand.balanced()


async def test_two_replicas_may_receive_the_same_upload(make: Any, scene: Scene) -> None:
    """Nothing is locked between them: both write the same, and the update counts once."""
    hand = await make(SEVERAL)
    async with scene.replica() as at, scene.replica(name="gw-1") as another:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        assert (await phone.looks(another)).headers["Upload-Offset"] == str(CHUNK)
        async with scene.deciding():
            told = await asyncio.gather(
                *(phone.patches(one, CHUNK) for one in (at, another) for _ in range(2))
            )
            assert {one.status for one in told} <= {200, 404, 409}
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    assert (await hand.ledger.look()).reasons("stray") == {}
    await hand.balanced()


@pytest.mark.parametrize("drips", [False, True])
async def test_a_slow_sender_is_cut_off_and_may_go_on(make: Any, scene: Scene, drips: bool) -> None:
    """Whether it hangs or sends byte after byte: a chunk has its time."""
    await make(SEVERAL)
    async with scene.replica(chunk_s=0.3) as at:
        phone = await scene.phone(at)
        slow = await scene.sending(at, phone, CHUNK + 9)

        async def drip() -> None:
            while drips:
                slow.writer.write(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        assert await slow.status() == 408
        dripping.cancel()
        slow.close()
        assert (await phone.looks(at)).headers["Upload-Offset"] == str(CHUNK)
        async with scene.deciding():
            assert (await phone.patches(at, CHUNK)).receipt == (200, "admitted", None)


async def test_each_chunk_has_its_time(make: Any, scene: Scene) -> None:
    """A device that is slow but not too slow may take as long as it needs."""
    hand = await make(SEVERAL)
    async with scene.replica(chunk_s=2.0) as at:
        phone = await scene.phone(at)
        slow = await scene.sending(at, phone, CHUNK)
        for begin in range(CHUNK, len(phone.data), CHUNK):
            await asyncio.sleep(0.6)
            slow.writer.write(phone.data[begin : begin + CHUNK])
        async with scene.deciding():
            assert await slow.status() == 200
        slow.close()
    assert (await queued(hand))[1] == phone.data


async def test_more_uploads_than_there_is_room_for(make: Any, scene: Scene) -> None:
    """Whoever is too many is told when to come again; who only asks needs no room."""
    hand = await make(SEVERAL)
    async with scene.replica(uploads=1) as at:
        phone, other = await scene.phone(at), await scene.phone(at, device=DEVICE + 1)
        first = await scene.sending(at, phone, CHUNK)
        told = await other.posts(at, other.data)
        assert told.refusal == (503, "busy")
        assert int(told.headers["Retry-After"]) >= 1
        assert (await other.posts(at, complete=False)).status == 201
        assert (await other.patches(at, 0)).refusal == (503, "busy")
        assert (await other.looks(at)).headers["Upload-Offset"] == "0"
        first.close()
        await wait_until(lambda: not counted(at.context, "fedstream_gateway_uploads"))
        async with scene.deciding():
            assert (await other.patches(at, 0)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == other.data


async def test_who_sends_is_present(make: Any, scene: Scene) -> None:
    """However long it takes, a task is not given up while its update arrives; then it is."""
    hand = await make(SEVERAL)
    async with scene.replica(lease_s=1.0, away_s=60.0) as at:
        phone = await scene.phone(at)
        slow = await scene.sending(at, phone, 9)
        for _ in range(8):
            await asyncio.sleep(0.25)
            slow.writer.write(b"x")
        assert phone.offer.task.id in at.gateway._desk
        async with scene.deciding():
            await ends(hand, "given_up", "dropped out")
        slow.close()


async def test_a_stop_lets_uploads_finish(make: Any, scene: Scene) -> None:
    """Those that are being sent; others go on after it."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone, other = await scene.phone(at), await scene.phone(at, device=DEVICE + 1)
        assert (await other.posts(at, complete=False)).status == 201
        under_way = await scene.sending(at, phone, CHUNK + 9)
        at.context.stop.set()
        refused = await other.patches(at, 0)
        assert (refused.status, refused.headers["Connection"]) == (503, "close")
        assert (await other.looks(at)).headers["Upload-Offset"] == "0"
        await asyncio.sleep(0.05)
        assert not at.work.done()
        async with scene.deciding():
            under_way.writer.write(phone.data[CHUNK + 9 :])
            assert await under_way.status() == 200
            await asyncio.wait_for(at.work, 30)
        under_way.close()
    assert (await queued(hand))[1] == phone.data


async def test_connections_that_break_are_no_failures(make: Any, scene: Scene) -> None:
    """Nobody is there to read an answer, and an operator has nothing to look at."""
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        with capture_logs() as lines:
            for after in (0, 9, CHUNK, 2 * CHUNK + 9):
                await phone.breaks_off(at, "POST", phone.creating(), phone.data, after)
                assert (await phone.looks(at)).headers["Upload-Offset"] == str(
                    after // CHUNK * CHUNK
                )
        assert lines == []
    await hand.balanced()


async def test_a_body_in_broken_pieces_is_malformed(make: Any, scene: Scene) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        for body in (b"zz\r\nxx\r\n", b"5\r\nabc", b"-1\r\n", b"3\r\nabcdef\r\n"):
            reader, writer = await connected(at)
            head = phone.head("POST", phone.creating(), 0)
            writer.write(head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + body)
            writer.write_eof()
            answer = await reader.read()
            assert not answer or answer.startswith(b"HTTP/1.1 400"), (body, answer)
            writer.close()
        both = phone.head("POST", phone.creating() | {"Transfer-Encoding": "chunked"}, 9)
        reader, writer = await connected(at)
        writer.write(both + b"0\r\n\r\n")
        assert await Sending(reader, writer).status() == 400  # request smuggling
        writer.close()


# Redis


async def test_redis_full_costs_nothing_but_time(make: Any, scene: Scene, client: Client) -> None:
    hand = await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[: 2 * CHUNK], complete=False)).status == 201
        async with full(client):
            told = await phone.patches(at, 2 * CHUNK)
            assert told.status == 503
            assert int(told.headers["Retry-After"]) >= 1
            assert (await phone.looks(at)).headers["Upload-Offset"] == str(2 * CHUNK)
        async with scene.deciding():
            assert (await phone.patches(at, 2 * CHUNK)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_a_small_update_to_a_full_redis_comes_again(
    make: Any, scene: Scene, client: Client
) -> None:
    hand = await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        async with full(client):
            assert (await phone.posts(at, phone.data)).status == 503
        assert phone.offer.task.id in at.gateway._desk
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


async def test_redis_away_costs_nothing_but_time(
    make: Any, scene: Scene, redis: RedisSettings
) -> None:
    hand = await make(SEVERAL)
    async with Proxy(redis, hand.keys) as proxy, serving(hand, proxy.settings) as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, phone.data[:CHUNK], complete=False)).status == 201
        proxy.refuse = lambda data: b"HSET" in data
        assert (await phone.patches(at, CHUNK)).status == 503
        proxy.refuse = None
        await phone.looks(at)
        assert phone.offset >= CHUNK
        async with scene.deciding():
            assert (await phone.patches(at, phone.offset)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data


@pytest.mark.parametrize("parameters", [64, SEVERAL])
async def test_the_reply_to_the_answer_is_lost(
    make: Any, scene: Scene, redis: RedisSettings, parameters: int
) -> None:
    """Redis has it, the gateway doesn't know: the device sends the end again."""
    hand = await make(parameters)
    async with Proxy(redis, hand.keys) as proxy, serving(hand, proxy.settings) as at:
        phone = await scene.phone(at)
        proxy.cut_reply_to = lambda data: b"EVALSHA" in data
        assert (await phone.posts(at, phone.data)).status == 503
        assert proxy.cut_replies == 1
        async with scene.deciding():
            assert (await phone.posts(at, phone.data)).receipt == (200, "admitted", None)
    assert (await queued(hand))[1] == phone.data
    assert (await hand.ledger.look()).reasons("stray") == {}


async def test_an_upload_takes_little_memory(make: Any, scene: Scene) -> None:
    """Of 44 MB that come as fast as they can, a chunk is held, and what was just received."""
    await make(FORTY_FOUR_MB)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        _, writer = await connected(at)
        writer.transport.set_write_buffer_limits(0)
        whole = memoryview(phone.data)
        tracemalloc.start()
        try:
            writer.write(phone.head("POST", phone.creating(complete=False), len(whole)))
            for begin in range(0, len(whole), CHUNK // 4):
                writer.write(whole[begin : begin + CHUNK // 4])
                await writer.drain()
            await wait_until(lambda: received(at) == len(whole))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 6 << 20, f"{peak / (1 << 20):.1f} MiB"
        writer.close()
