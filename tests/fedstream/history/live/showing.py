"""The live page of made-up moments: what a coordinator would serve, without a run."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from fedstream.history.live import rendering
from fedstream.history.live.broadcast import LivePicture
from fedstream.history.live.collector import Collected
from fedstream.history.live.snapshot import Snapshot
from fedstream.history.ui.http import HEADERS, no_icon, send_static


class Moments:
    """The moment that viewers see, and where."""

    def __init__(self, first: Snapshot) -> None:
        self.now = first
        self.address = ""
        self._changed: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def show(self, moment: Snapshot) -> None:
        """Go on to another moment; viewers are told."""
        assert self._loop
        self.now = moment
        self._loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        if changed is not None:
            changed.set()

    async def _page(self, _request: web.Request) -> web.Response:
        text = rendering.page(
            self._picture(),
            is_recorded=False,
            journal="",
            is_operator=False,
            has_operators=False,
            may_leave=False,
        )
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    def _picture(self) -> LivePicture:
        return LivePicture(self.now, self._parts(), 1)

    def _parts(self) -> Mapping[str, str]:
        return rendering.drawn(Collected(self.now, [], is_anew=False, seconds=0.0)).parts

    async def _devices(self, request: web.Request) -> web.Response:
        text = rendering.devices(
            self._picture(), request.query.get("sort", ""), has_operators=False
        )
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    async def _device(self, request: web.Request) -> web.Response:
        number = int(request.match_info["number"])
        text = rendering.device(self._picture(), number, has_operators=False)
        return web.Response(text=text, content_type="text/html", headers=HEADERS)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(f"event: parts\ndata: {json.dumps(self._parts())}\n\n".encode())
            self._changed = self._changed or asyncio.Event()
            await self._changed.wait()

    async def serve(self, ready: threading.Event, stop: threading.Event) -> None:
        """Serve until stop."""
        self._loop = asyncio.get_running_loop()
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/live/stream", self._stream),
                web.get("/devices", self._devices),
                web.get("/devices/{number}", self._device),
                web.get("/static/{name}", send_static),
                web.get("/favicon.ico", no_icon),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        ready.set()
        await asyncio.to_thread(stop.wait)
        await runner.cleanup()


@contextmanager
def showing(first: Snapshot) -> Iterator[Moments]:
    """Serve moments from a thread, beginning with this one."""
    moments, ready, stop = Moments(first), threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(moments.serve(ready, stop)))
    thread.start()
    try:
        assert ready.wait(60)
        yield moments
    finally:
        stop.set()
        thread.join()
