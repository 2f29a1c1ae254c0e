"""Requests that are refused because they can be no update, or no part of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from http.client import parse_headers
from io import BytesIO
from typing import Any

from fedstream.broker.blobs import CHUNK
from tests.coordinator.gateway.places import Place
from tests.coordinator.gateway.uploading import (
    DEVICE,
    SEVERAL,
    Scene,
    Sending,
    chunked,
    connected,
    queued,
    received,
)
from tests.support import wait_until

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


def without(name: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda about: {key: said for key, said in about.items() if key != name}


def instead(name: str, said: str) -> Callable[[dict[str, str]], dict[str, str]]:
    return lambda about: about | {name: said}


def reporting(**said: Any) -> Callable[[dict[str, str]], dict[str, str]]:
    def changed(about: dict[str, str]) -> dict[str, str]:
        report = json.loads(about["Update-Report"])
        return about | {"Update-Report": json.dumps(report | said)}

    return changed


async def test_what_can_be_no_update_is_refused(make: Any, scene: Scene) -> None:
    hand = await make(64)
    async with scene.replica(device_rate=1000) as at:
        phone = await scene.phone(at)
        for changed, refusal in (
            (instead("Upload-Length", "260"), (413, "too large")),
            (instead("Upload-Length", "252"), (400, "length")),
            (instead("Upload-Length", "-256"), (400, "malformed")),
            (without("Upload-Complete"), (400, "malformed")),
            (without("Update-Report"), (400, "malformed")),
            (instead("Update-Report", "{}"), (400, "malformed")),
            (instead("Update-Report", json.dumps({"x": "y" * 2000})), (400, "malformed")),
            (instead("Content-Encoding", "gzip"), (415, "malformed")),
            (reporting(digest="abc"), (400, "malformed")),
            (reporting(format="int8"), (422, "format")),
            (reporting(layout="0" * 64), (422, "format")),
        ):
            about = changed(phone.creating(complete=False))
            assert (await phone.asks(at, "POST", about)).refusal == refusal, about
        assert await hand.client.call("KEYS", hand.keys.update("*")) == []
        assert (
            phone.offer.task.id in at.gateway.replica.sessions
        )  # the device may try again, or give up


async def test_a_header_is_there_once(make: Any, scene: Scene) -> None:
    """A proxy and a gateway must not choose differently between two."""
    await make(64)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        for name, said in (("Upload-Length", "256"), ("Upload-Complete", "?0")):
            reader, writer = await connected(at)
            head = phone.head("POST", phone.creating(), 256)
            writer.write(head[:-2] + f"{name}: {said}\r\n\r\n".encode() + phone.data)
            assert await Sending(reader, writer).status() == 400
            writer.close()


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


# answers that end their connections

OTHER_S = 30.0  # for an answer


@dataclass(frozen=True)
class Told:
    """An answer, and what came of it."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_last: bool  # the connection ended
    refused: dict[str, float]  # what was counted, by reason

    @property
    def refusal(self) -> tuple[int, str]:
        return self.status, json.loads(self.body)["reason"]


async def told(at: Place, asked: bytes, rest: bytes = b"", *, stops: bool = False) -> Told:
    """One request on a connection of its own. ``stops``: the gateway does, before the ``rest``."""
    before, had = refused(at), received(at)
    reader, writer = await connected(at)
    writer.write(asked)
    if stops:
        await wait_until(lambda: received(at) > had, what="a request that was taken")
        at.context.stop.set()
        writer.write(rest)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), OTHER_S)
    first, _, lines = head.partition(b"\r\n")
    about = {name.title(): said for name, said in parse_headers(BytesIO(lines)).items()}
    body = await reader.readexactly(int(about.get("Content-Length", 0)))
    counts = {why: count - before[why] for why, count in refused(at).items()}
    try:
        writer.write(b"nonsense\r\n\r\n")  # which is answered, too
        is_last = not await asyncio.wait_for(reader.read(1), OTHER_S)
    except ConnectionError:
        is_last = True
    writer.close()
    risen = {why: count for why, count in counts.items() if count}
    return Told(int(first.split()[1]), about, body, is_last, risen)


def refused(at: Place) -> dict[str, float]:
    """The requests that a gateway has refused, by reason."""
    [metric] = [
        one for one in at.context.registry.collect() if one.name == "fedstream_gateway_refused"
    ]
    return {
        one.labels["reason"]: one.value for one in metric.samples if one.name.endswith("_total")
    }


async def test_too_large_is_the_last(make: Any, scene: Scene) -> None:
    await make()
    async with scene.replica() as at:
        phone = await scene.phone(at)
        answer = await told(at, phone.head("POST", phone.creating(length=260, complete=False), 0))
    assert (answer.refusal, answer.is_last) == ((413, "too large"), True)
    assert (answer.headers["Connection"], answer.refused) == ("close", {"too large": 1})


async def test_too_slow_is_the_last(make: Any, scene: Scene) -> None:
    await make()
    async with scene.replica(chunk_s=0.1) as at:
        phone = await scene.phone(at)
        answer = await told(at, phone.head("POST", phone.creating(), 256))
    assert (answer.refusal, answer.is_last) == ((408, "too slow"), True)
    assert (answer.headers["Connection"], answer.refused) == ("close", {"too slow": 1})


async def test_answer_of_a_gateway_that_stops_is_the_last(make: Any, scene: Scene) -> None:
    await make(SEVERAL)
    async with scene.replica() as at:
        phone = await scene.phone(at)
        head = phone.head("POST", phone.creating(complete=False), CHUNK)
        answer = await told(at, head + phone.data[:9], phone.data[9:CHUNK], stops=True)
    assert (answer.status, answer.headers["Connection"]) == (201, "close")
    assert answer.is_last


async def test_request_after_a_stop_is_refused(make: Any, scene: Scene) -> None:
    """While a request from before it is still being answered."""
    await make(SEVERAL)
    async with scene.replica() as at:
        phone, other = await scene.phone(at), await scene.phone(at, device=DEVICE + 1)
        sending = await scene.sending(at, other, 9)
        at.context.stop.set()
        answer = await told(at, phone.head("POST", phone.creating(complete=False), 0))
        assert answer.refusal == (503, "unavailable")
        assert (answer.headers["Connection"], answer.is_last) == ("close", True)
        assert answer.refused == {"unavailable": 1}
        sending.close()
