"""A request's body, of which no more is read than it may have, and not for ever."""

from __future__ import annotations

import asyncio

from aiohttp import web

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.protocol.messages import BODY


async def body_of(request: web.Request, *, within_s: float, most: int = BODY) -> bytes:
    """Read a body of at most ``most`` bytes, whatever its headers say. Raises Refusal."""
    if (request.content_length or 0) > most:
        raise _too_large(most)
    if request.content.is_eof():  # it came with the headers, as most do
        whole = request.content.read_nowait()
        if len(whole) > most:
            raise _too_large(most)
        return whole
    found = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.content.iter_any():
                found += chunk
                if len(found) > most:
                    raise _too_large(most)
    except TimeoutError as error:
        raise Refusal(408, "too slow", f"the body did not arrive within {within_s:g} s") from error
    return bytes(found)


def _too_large(most: int) -> Refusal:
    return Refusal(413, "too large", f"a body may have {most} bytes here")
