"""Which answers end their connections, and which leave it for the next request."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http.client import parse_headers
from io import BytesIO
from typing import Any

from fedstream.broker.blobs import CHUNK
from tests.coordinator.gateway.places import Place
from tests.coordinator.gateway.uploading import DEVICE, SEVERAL, Scene, connected, received
from tests.support import wait_until

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
