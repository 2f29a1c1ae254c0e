"""The files that come with the pages."""

from __future__ import annotations

from importlib.resources import files

from aiohttp import web

_TYPES = {
    "charts.js": "text/javascript",
    "page.js": "text/javascript",
    "page.css": "text/css",
    "asking.js": "text/javascript",
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
    """There is none."""
    return web.Response(status=204)


def static(name: str) -> bytes:
    """What a file contains."""
    return (files("fedstream.history.ui") / "static" / name).read_bytes()
