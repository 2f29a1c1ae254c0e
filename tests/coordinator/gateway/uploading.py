"""A device that sends updates, whole or in parts, on connections that break."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import dataclass
from typing import Any

from yarl import URL

from fedstream.broker.messages import Heartbeat, Presence, decode
from fedstream.coordinator.gateway.upload_requests import PATH
from fedstream.protocol import headers
from fedstream.protocol.messages import Offer
from tests.coordinator.gateway.places import SITE, Place
from tests.support import Hand, wait_until

DEVICE = 3


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
        return PATH.format(task=self.offer.task.id, attempt=self.offer.attempt)

    def about(self, **more: str) -> dict[str, str]:
        """Headers: of the token's device, and these."""
        return {"Device": str(self.device), **{_dashed(name): said for name, said in more.items()}}

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
    assert await hand.dispatch() == ["sent"]
    answer = await at.check_in(device, wait_s=50)
    return answer.offer
