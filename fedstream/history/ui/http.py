"""HTTP parts of all pages: security headers, checks of forms, and static files."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Literal, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from aiohttp import web

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]
Permission: TypeAlias = Literal["may", "operator", "nobody"]
"""The right to start work on questions: granted, for operators only, or switched off."""

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


def is_ours(request: web.Request) -> bool:
    """Whether a request comes from this server's pages, or from no browser; checked for POST."""
    site = request.headers.get("Sec-Fetch-Site", "same-origin")
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        return False
    return site in ("same-origin", "none")


async def form_of(request: web.Request, most: int) -> dict[str, str]:
    """The fields of a form of at most ``most`` bytes, without empty ones.

    Raises HTTPRequestEntityTooLarge, HTTPUnsupportedMediaType.
    """
    if request.content_length is None or request.content_length > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
    if request.content_type != "application/x-www-form-urlencoded":
        raise web.HTTPUnsupportedMediaType
    # request.post() raises whatever the encoding that a client names makes it raise.
    return dict(parse_qsl((await request.read()).decode(errors="replace")))


_TYPES = {
    "charts.js": "text/javascript",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "question.js": "text/javascript",
    "live.js": "text/javascript",
    "live-panels.js": "text/javascript",
    "live.css": "text/css",
    "uPlot.iife.min.js": "text/javascript",
    "uPlot.min.css": "text/css",
}


async def send_static(request: web.Request) -> web.Response:
    """Answer with a file. Raises HTTPNotFound."""
    name = request.match_info["name"]
    if name not in _TYPES:
        raise web.HTTPNotFound
    return web.Response(body=static(name), content_type=_TYPES[name], charset="utf-8")


async def no_icon(_request: web.Request) -> web.Response:
    """Answer that there is no icon."""
    return web.Response(status=204)


def static(name: str) -> bytes:
    """The content of a static file."""
    return (files("fedstream.history.ui") / "static" / name).read_bytes()
