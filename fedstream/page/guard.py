"""What all pages do against other sites: headers, and no answer under another host's name.

Requests for another host's name are refused, so that a page elsewhere cannot read a run by giving
its own name our address (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from aiohttp import web

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
Asker: TypeAlias = Literal["may", "operator", "nobody"]
"""May who sent a request have work done? Or only an operator, or nobody, as there are none?"""

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # Not less: without a referrer, browsers don't say where a form comes from either.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
HERE = ("127.0.0.1", "localhost", "[::1]")


def names_of(host: str, *more: str) -> frozenset[str]:
    """The names under which a server on this host may be asked, without a port."""
    return frozenset({*HERE, host, f"[{host}]", *more})


def refusal(request: web.Request, names: Collection[str]) -> web.Response | None:
    """The answer to a request for another host's name; None if it is for us."""
    host = request.host.rpartition(":")[0] if _has_port(request.host) else request.host
    if host in names:
        return None
    return web.Response(status=421, text=f"not the host {request.host[:80]}\n", headers=HEADERS)


def is_ours(request: web.Request) -> bool:
    """Whether a page of ours sent this, or no browser at all: for what changes something."""
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        return False
    return site in ("same-origin", "none")


async def form_of(request: web.Request, most: int) -> dict[str, str]:
    """The fields of a form of at most so many bytes, without the empty ones.

    Raises HTTPRequestEntityTooLarge, HTTPUnsupportedMediaType.
    """
    if request.content_length is None or request.content_length > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
    if request.content_type != "application/x-www-form-urlencoded":
        raise web.HTTPUnsupportedMediaType
    # request.post() raises whatever the encoding that a client names makes it raise.
    return dict(parse_qsl((await request.read()).decode(errors="replace")))


def _has_port(host: str) -> bool:
    return ":" in host and not host.endswith("]")
