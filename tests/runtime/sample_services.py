"""Services that stop well or badly: ``python sample_services.py KIND``."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from typing import TYPE_CHECKING

from aiohttp import web

from fedstream.runtime.http import HttpSettings
from fedstream.runtime.logging import LogSettings
from fedstream.runtime.service import Context, repeat, serve

if TYPE_CHECKING:
    from collections.abc import Sequence


class Sample:
    """Idles until stop; the base of the others."""

    role = "sample"

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        async def hello(_request: web.Request) -> web.Response:
            return web.Response(text="hello")

        return [web.get("/hello", hello)]

    async def run(self, context: Context) -> None:
        await context.stop.wait()


class Drains(Sample):
    """Drains until its last work, which the test gives it over HTTP, is done."""

    def __init__(self) -> None:
        self.finished = asyncio.Event()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        async def finish(_request: web.Request) -> web.Response:
            self.finished.set()
            return web.Response()

        return [web.post("/finish", finish)]

    async def run(self, context: Context) -> None:
        await context.stop.wait()
        context.log.info("draining")
        await self.finished.wait()
        context.log.info("drained")


class Hangs(Sample):
    """Its loop's step never returns, stop or no stop."""

    async def run(self, context: Context) -> None:
        async def step() -> None:
            await asyncio.Event().wait()

        await repeat(context, "claim", step, within_s=0.1)


class HangsInThread(Sample):
    """Waits for a thread that never ends."""

    async def run(self, _context: Context) -> None:
        await asyncio.to_thread(threading.Event().wait)


class BlocksLoop(Sample):
    """Never gives the event loop back once it is to stop."""

    async def run(self, context: Context) -> None:
        await context.stop.wait()
        context.log.info("blocking")
        while True:
            time.sleep(0.01)  # noqa: ASYNC251 (that is the point)


class FailsWhenCancelled(Sample):
    async def run(self, _context: Context) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise OSError("disk full")


KINDS = (Sample, Drains, Hangs, HangsInThread, BlocksLoop, FailsWhenCancelled)

if __name__ == "__main__":
    kind, drain_s = sys.argv[1:]
    service = {each.__name__: each for each in KINDS}[kind]()
    log = LogSettings(format="json")
    drain = float(drain_s)
    sys.exit(serve(service, http=HttpSettings(), log=log, run="r1", name="s-0", drain_s=drain))
