"""The live page of made-up moments: what a coordinator would serve, without a run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from aiohttp import web

from fedstream.broker.client import Client
from fedstream.history.live.collector import Collector
from fedstream.history.live.service import LiveService
from fedstream.history.live.snapshot import Snapshot
from fedstream.runtime.config import load
from fedstream.runtime.http import application
from fedstream.settings.config import Settings
from tests.fedstream.history.live.stage import every
from tests.support import context


class Moments:
    """The moment that viewers see, and where: it stands in for the collector of a run."""

    def __init__(self, first: Snapshot) -> None:
        self.now = first
        self.address = ""

    def show(self, moment: Snapshot) -> None:
        """Go on to another moment; viewers are told soon."""
        self.now = moment

    async def look(self) -> Snapshot:
        return self.now

    async def serve(self, journal: Path, ready: threading.Event, stop: threading.Event) -> None:
        """Serve until stop, as if the run was recorded in ``journal``."""
        (journal / "0.journal").touch()
        settings = load(Settings, path=None, environ={}, sets=[f"journal.dir={journal}"])
        client, live = Client(settings.redis, "page"), context()
        service = LiveService(settings, client, None)
        service._collector = cast(Collector, self)
        app = application(service.routes(), live.stop.is_set)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.address = f"http://{host}:{port}"
        working = asyncio.create_task(service.run(live))
        ready.set()
        await asyncio.to_thread(stop.wait)
        live.stop.set()
        await working
        await runner.cleanup()
        await client.close()


@contextmanager
def showing(first: Snapshot) -> Iterator[Moments]:
    """Serve moments from a thread, beginning with this one."""
    moments, ready, stop = Moments(first), threading.Event(), threading.Event()
    with every(0.05), TemporaryDirectory() as journal:
        serve = moments.serve(Path(journal), ready, stop)
        thread = threading.Thread(target=asyncio.run, args=[serve])
        thread.start()
        try:
            assert ready.wait(60)
            yield moments
        finally:
            stop.set()
            thread.join()
