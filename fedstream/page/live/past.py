"""The pages of what is journalled already, if the journal's folder can be read from here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from fedstream.broker.errors import FedstreamError
from fedstream.page.guard import Answering
from fedstream.settings.config import Settings
from fedstream.settings.recording import CONFIG

if TYPE_CHECKING:
    from fedstream.page.server import PageServer

_PATHS = (
    "/overview", "/versions", "/versions/{number}", "/updates", "/devices", "/devices/{number}",
)  # fmt: skip


class Pasts:
    """The recorded run's pages, opened when somebody asks for one."""

    paths = _PATHS

    def __init__(self, settings: Settings) -> None:
        self._journal = Path(settings.journal.dir)
        self._opening = asyncio.Lock()
        self._server: PageServer | None = None

    async def are_there(self) -> bool:
        """Whether there is a journal."""
        return await asyncio.to_thread(self._is_there)

    def _is_there(self) -> bool:
        try:
            return any(one.suffix == ".journal" for one in self._journal.iterdir())
        except OSError:
            return False

    def answering(self, path: str) -> Answering:
        """The handler of one of the pages."""

        async def answer(request: web.Request) -> web.StreamResponse:
            server = await self._opened()
            route = next(one for one in server.routes() if one.path == path)
            return await server.answered(request, route.handler)

        return answer

    async def _opened(self) -> PageServer:
        """Raises FedstreamError if there is nothing to see."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.to_thread(self._open)
        return self._server

    def _open(self) -> PageServer:
        if not self._is_there():
            raise FedstreamError(
                f"the journal is not readable from here ({self._journal}): look at it where it is, "
                "with fedstream ui"
            )
        from fedstream.page.run import RecordedRun
        from fedstream.page.server import PageServer

        folder = self._journal.parent
        is_run = (folder / CONFIG).is_file()
        return PageServer(RecordedRun(folder if is_run else self._journal, is_live=True))

    def close(self) -> None:
        """Close its files."""
        if self._server is not None:
            self._server.is_ending = True
            self._server.run.close()
