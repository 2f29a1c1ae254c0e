"""A request is answered alike, and charged alike, by a quick route and by aiohttp."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http.client import parse_headers
from io import BytesIO
from typing import Any

import pytest

from fedstream.broker.blobs import CHUNK
from fedstream.protocol.headers import OFFSET
from tests.coordinator.gateway.places import Place
from tests.coordinator.gateway.raw import request
from tests.coordinator.gateway.uploading import (
    BY_AIOHTTP,
    DEVICE,
    SEVERAL,
    Scene,
    Sender,
    connected,
    received,
)
from tests.support import wait_until

ANOTHER = {"If-None-Match": '"another"'}  # a model; aiohttp serves who asks so
TWO = 1e-9  # requests a second: two at once, and no more in the time of a test
UPLOAD = f"/v1/tasks/{'0' * 16}/updates/{'0' * 12}"
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
    about.pop("Date")
    if "Retry-After" in about:
        about["Retry-After"] = "a random time"
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


# quotas


@pytest.mark.parametrize("what", ["POST", "PATCH", "GET"])
async def test_quota_of_a_device(make: Any, scene: Scene, by_aiohttp: list[str], what: str) -> None:
    await make()
    async with scene.replica(device_rate=TWO) as at:
        path, slow = _asked(at, what)
        found = []
        for device, about in ((7, {}), (8, slow)):
            lines = _lines(about)
            answers = [await told(at, request(what, path, *lines, device=device)) for _ in range(3)]
            assert [one.status == 429 for one in answers] == [False, False, True]
            found.append(answers)
    assert by_aiohttp == [what] * 4, "the third of the quick ones, and all of the others"
    _alike(found, 429, "too many requests")


@pytest.mark.parametrize("what", ["POST", "PATCH", "GET"])
async def test_quota_of_an_address(
    make: Any, scene: Scene, by_aiohttp: list[str], what: str
) -> None:
    await make()
    async with scene.replica(address_rate=TWO, proxies=1) as at:
        path, slow = _asked(at, what)
        found = []
        for address, about in (("10.0.0.1", {}), ("10.0.0.2", slow)):
            lines = [*_lines(about), f"X-Forwarded-For: 10.9.9.9, {address}"]
            answers = [
                await told(at, request(what, path, *lines, device=device)) for device in range(3)
            ]
            assert [one.status == 429 for one in answers] == [False, False, True]
            found.append(answers)
    assert by_aiohttp == [what] * 2, "aiohttp's handler is not even asked about the third"
    _alike(found, 429, "too many requests")


def _asked(at: Place, what: str) -> tuple[str, dict[str, str]]:
    """The path of a request, and the headers with which aiohttp serves it."""
    if what == "GET":
        return f"/v1/models/{at.gateway._current.head.given}", ANOTHER
    return UPLOAD, BY_AIOHTTP


def _lines(about: dict[str, str]) -> list[str]:
    return [f"{name}: {said}" for name, said in about.items()]


def _alike(found: list[list[Told]], status: int, reason: str) -> None:
    """Both routes have told the same, and at last a refusal that is counted once."""
    quick, slow = found
    assert quick == slow
    assert quick[-1].refusal == (status, reason)
    assert quick[-1].refused == {reason: 1}


# uploads


async def _both(at: Place, phone: Sender, method: str, about: dict[str, str], size: int) -> Told:
    """A request that says ``size`` bytes and sends none, by both routes alike."""
    quick = await told(at, phone.head(method, about, size))
    assert quick == await told(at, phone.head(method, about | BY_AIOHTTP, size))
    return quick


async def test_too_large_is_the_last(make: Any, scene: Scene, by_aiohttp: list[str]) -> None:
    await make()
    async with scene.replica() as at:
        phone = await scene.phone(at)
        answer = await _both(at, phone, "POST", phone.creating(length=260, complete=False), 0)
    assert (answer.refusal, answer.is_last) == ((413, "too large"), True)
    assert (answer.headers["Connection"], answer.refused) == ("close", {"too large": 1})
    assert by_aiohttp == ["POST"]


async def test_too_slow_is_the_last(make: Any, scene: Scene, by_aiohttp: list[str]) -> None:
    await make()
    async with scene.replica(chunk_s=0.1) as at:
        phone = await scene.phone(at)
        answer = await _both(at, phone, "POST", phone.creating(), 256)
    assert (answer.refusal, answer.is_last) == ((408, "too slow"), True)
    assert (answer.headers["Connection"], answer.refused) == ("close", {"too slow": 1})
    assert by_aiohttp == ["POST"]


async def test_wrong_offset_is_not_the_last(make: Any, scene: Scene, by_aiohttp: list[str]) -> None:
    await make()
    async with scene.replica() as at:
        phone = await scene.phone(at)
        assert (await phone.posts(at, complete=False)).status == 201
        answer = await _both(at, phone, "PATCH", phone.going_on(4), 0)
    assert (answer.status, answer.headers[OFFSET], answer.is_last) == (409, "0", False)
    assert "Connection" not in answer.headers
    assert answer.refused == {"offset": 1}
    assert by_aiohttp == ["PATCH"]


async def test_busy_is_not_the_last(make: Any, scene: Scene, by_aiohttp: list[str]) -> None:
    await make(SEVERAL)
    async with scene.replica(uploads=1) as at:
        phone, other = await scene.phone(at), await scene.phone(at, device=DEVICE + 1)
        sending = await scene.sending(at, other, 9)
        # The body has come, so that what follows is another request.
        about = phone.creating(complete=False)
        bodies = [phone.head("POST", about | more, CHUNK) for more in ({}, BY_AIOHTTP)]
        quick, slow = [await told(at, head + phone.data[:CHUNK]) for head in bodies]
        sending.close()
    assert quick == slow
    assert (quick.refusal, quick.is_last) == ((503, "busy"), False)
    assert "Connection" not in quick.headers
    assert quick.refused == {"busy": 1}
    assert by_aiohttp == ["POST"]


async def test_answer_of_a_gateway_that_stops_is_the_last(
    make: Any, scene: Scene, by_aiohttp: list[str]
) -> None:
    await make(SEVERAL)
    found: list[Told] = []
    for name, more in (("gw-0", {}), ("gw-1", BY_AIOHTTP)):
        async with scene.replica(name=name) as at:
            phone = await scene.phone(at, device=DEVICE + len(found))
            head = phone.head("POST", phone.creating(complete=False) | more, CHUNK)
            answer = await told(at, head + phone.data[:9], phone.data[9:CHUNK], stops=True)
            answer.headers.pop("Location")  # of this task
            found.append(answer)
    assert by_aiohttp == ["POST"]
    assert found[0] == found[1]
    assert (found[0].status, found[0].headers["Connection"]) == (201, "close")
    assert found[0].is_last


async def test_what_comes_after_a_stop_is_refused(make: Any, scene: Scene) -> None:
    """While what came before it is still being answered."""
    await make(SEVERAL)
    async with scene.replica() as at:
        phone, other = await scene.phone(at), await scene.phone(at, device=DEVICE + 1)
        sending = await scene.sending(at, other, 9)
        at.context.stop.set()
        answer = await _both(at, phone, "POST", phone.creating(complete=False), 0)
        assert answer.refusal == (503, "unavailable")
        assert (answer.headers["Connection"], answer.is_last) == ("close", True)
        assert answer.refused == {"unavailable": 1}
        sending.close()
