"""A device that sends updates, whole or in parts, on connections that break."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
from yarl import URL

from fedstream.broker.blobs import CHUNK
from fedstream.broker.client import RedisSettings
from fedstream.core.formats import F32, Format
from fedstream.core.layout import Model
from fedstream.core.messages import Heartbeat, Presence, Upload, decode
from fedstream.protocol import headers
from fedstream.protocol.messages import UPDATE_ROUTE, Offer
from tests.coordinator.gateway.places import SITE, Place, coordinating, serving
from tests.support import Hand, counted, wait_until

DEVICE = 3
FORTY_FOUR_MB = 11_000_000  # parameters of 4 bytes
CHUNKS = 5
SEVERAL = CHUNKS * CHUNK // 4 - 1000  # parameters of an update of five chunks


async def connected(at: Place) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a replica."""
    return await asyncio.open_connection("127.0.0.1", URL(at.url).port)


@dataclass
class Sender:
    """A device with a trained update, which sends it."""

    offer: Offer
    data: bytes
    report: dict[str, Any]
    device: int
    sent: int = 0  # bytes of bodies
    offset: int = 0  # as the gateway said last

    @property
    def path(self) -> str:
        return UPDATE_ROUTE.format(task=self.offer.task.id, attempt=self.offer.attempt)

    def about(self, **more: str) -> dict[str, str]:
        """Headers: of the token's device, and these."""
        own = {"Device": str(self.device)}
        return own | {_dashed(name): said for name, said in more.items()}

    def creating(self, *, complete: bool = True, length: int | None = None) -> dict[str, str]:
        return self.about(
            upload_length=str(len(self.data) if length is None else length),
            upload_complete="?1" if complete else "?0",
            update_report=json.dumps(self.report),
        )

    def going_on(self, offset: int, *, complete: bool = True) -> dict[str, str]:
        return self.about(
            upload_offset=str(offset),
            upload_complete="?1" if complete else "?0",
            content_type=headers.PARTIAL,
        )

    async def asks(
        self, at: Place, method: str, about: dict[str, str], body: bytes = b""
    ) -> Answered:
        """One request, and its answer."""
        self.sent += len(body)
        async with at.session.request(
            method, at.url + self.path, headers=about, data=io.BytesIO(body) if body else None
        ) as answer:
            text = await answer.read()
            self.offset = int(answer.headers.get("Upload-Offset", self.offset))
            return Answered(answer.status, dict(answer.headers), json.loads(text) if text else {})

    async def posts(self, at: Place, body: bytes = b"", **about: Any) -> Answered:
        return await self.asks(at, "POST", self.creating(**about), body)

    async def patches(self, at: Place, begin: int, end: int | None = None) -> Answered:
        """Send these bytes; up to the end, they complete the upload."""
        about = self.going_on(begin, complete=end is None)
        return await self.asks(at, "PATCH", about, self.data[begin:end])

    async def looks(self, at: Place) -> Answered:
        return await self.asks(at, "HEAD", self.about())

    def head(self, method: str, about: dict[str, str], size: int) -> bytes:
        """A request up to its body, of so many bytes."""
        lines = [f"{method} {self.path} HTTP/1.1", "Host: gateway", f"Content-Length: {size}"]
        lines += [f"{name}: {said}" for name, said in about.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    async def breaks_off(
        self, at: Place, method: str, about: dict[str, str], body: bytes, after: int
    ) -> None:
        """A request whose connection breaks after so many bytes of its body."""
        _, writer = await connected(at)
        writer.transport.set_write_buffer_limits(0)
        writer.write(self.head(method, about, len(body)) + body[:after])
        await writer.drain()
        self.sent += after
        writer.close()
        await writer.wait_closed()


@dataclass(frozen=True)
class Answered:
    """A gateway's answer."""

    status: int
    headers: dict[str, str]
    said: dict[str, Any]

    @property
    def receipt(self) -> tuple[int, str, str | None]:
        """Status, state and reason."""
        assert self.headers["Upload-Complete"] == "?1"
        return self.status, self.said["state"], self.said["reason"]

    @property
    def refusal(self) -> tuple[int, str]:
        return self.status, self.said["reason"]


def _dashed(name: str) -> str:
    return "-".join(part.capitalize() for part in name.split("_"))


async def offered(hand: Hand, at: Place, device: int = DEVICE) -> Offer:
    """A device checks in and gets a task; the coordinator is played by hand."""
    await at.check_in(device)

    async def is_owned() -> bool:
        for entry in await hand.heard(SITE):
            if isinstance(decode(entry.data, Presence, Heartbeat), Presence):
                await hand.hear(SITE, entry)
        return device in await hand.ledger.owners()

    await wait_until(is_owned)
    await hand.open(device=device)
    answer = await at.check_in(device, wait_s=50)
    return answer.offer


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


def trained(hand: Hand, offer: Offer, wire: Format = F32, **report: Any) -> Sender:
    """A device that has trained its task."""
    model = Model(hand.layout)
    model.floats[:] = np.random.default_rng(0).standard_normal(model.floats.size, np.float32)
    data = wire.encoded(model).tobytes()
    about = {
        "digest": hashlib.sha256(data).hexdigest(),
        "samples": 10,
        "steps": 5,
        "lr": 0.1,
        "loss": 0.5,
        "seconds": 1.0,
        "tau": offer.model.version,
        "base": offer.model.digest,
        "layout": hand.layout.signature,
        "format": wire.name,
    }
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
