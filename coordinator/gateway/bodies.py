"""A request's body, of which no more is read than any JSON of ours has, and not for ever."""

from __future__ import annotations

import asyncio

from aiohttp import web

from fedstream.coordinator.gateway.refusals import Refusal
from fedstream.protocol.messages import BODY


async def body_of(request: web.Request, *, within_s: float) -> bytes:
    """Read a JSON body, whatever its headers say of its length. Raises Refusal."""
    if (request.content_length or 0) > BODY:
        raise _too_large()
    found = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in request.content.iter_any():
                found += chunk
                if len(found) > BODY:
                    raise _too_large()
    except TimeoutError as error:
        raise Refusal(408, "too slow", f"the body did not arrive within {within_s:g} s") from error
    return bytes(found)


def _too_large() -> Refusal:
    return Refusal(413, "too large", f"a JSON body may have {BODY} bytes")
