"""Send bytes to a gateway as they are, and read its answer until it falls silent."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from dataclasses import dataclass

_QUIET_S = 0.2  # then an open connection has nothing more to say
_HEAD = re.compile(rb"HTTP/1\.[01] (\d{3}) ")


@dataclass(frozen=True)
class Said:
    """What a gateway sent on one connection."""

    data: bytes
    is_closed: bool

    @property
    def statuses(self) -> list[int]:
        """Of its responses, in order."""
        return [int(one) for one in _HEAD.findall(self.data)]

    @property
    def reasons(self) -> list[str]:
        """In the bodies of its refusals."""
        return [one.decode() for one in re.findall(rb'"reason": ?"([^"]*)"', self.data)]


async def said_to(
    port: int, data: bytes, *, within_s: float = 30.0, quiet_s: float = _QUIET_S
) -> Said:
    """Send bytes on a connection of their own, with nothing behind them. Raises TimeoutError."""
    found = bytearray()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    is_closed = False
    try:
        async with asyncio.timeout(within_s):
            writer.write(data)
            while not is_closed:
                try:
                    part = await asyncio.wait_for(
                        reader.read(1 << 16), quiet_s if found else within_s
                    )
                except TimeoutError:
                    if not found:
                        raise
                    break
                found += part
                is_closed = not part
    except ConnectionError:  # it closed the connection while we were still sending
        is_closed = True
    finally:
        writer.close()
    return Said(bytes(found), is_closed)


def request(method: str, path: str, *headers: str, body: bytes = b"", device: int = 3) -> bytes:
    """A well-formed request of a device, with these headers besides."""
    lines = [f"{method} {path} HTTP/1.1", "Host: gateway", f"Device: {device}", *headers]
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


async def trickle(port: int, first: bytes, *, every_s: float) -> Said:
    """Send the beginning of a request, then a byte at a time until the connection is closed."""
    found = bytearray()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    async def read() -> None:
        with suppress(ConnectionError):  # bytes that it had not read when it closed it
            while part := await reader.read(1 << 16):
                found.extend(part)

    reading = asyncio.create_task(read())
    try:
        writer.write(first)
        while not reading.done():
            await asyncio.wait({reading}, timeout=every_s)
            if first:
                writer.write(b"x")
    finally:
        reading.cancel()
        writer.close()
    return Said(bytes(found), is_closed=True)
