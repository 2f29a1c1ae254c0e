"""The pages of what is journalled already, if the journal's folder can be read from here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from fedstream.core.errors import FedstreamError
from fedstream.history.live.scene import SeenPushes
from fedstream.history.ui.http import Answering, Asker
from fedstream.settings.config import Settings
from fedstream.settings.recording import CONFIG

if TYPE_CHECKING:
    from fedstream.history.measurements import Measurement
    from fedstream.history.model_stats import LatePushes
    from fedstream.history.ui.server import PageServer

_PATHS = (
    "/overview",
    "/versions",
    "/versions/{number}",
    "/updates",
    "/devices",
    "/devices/{number}",
)
_QUESTIONS = ("/bisect", "/what-if", "/distances")
_NICENESS = 19  # whatever else there is to do comes first


class Pasts:
    """The recorded run's pages, opened when somebody asks for one."""

    paths = (*_PATHS, *_QUESTIONS)
    questions = _QUESTIONS  # to which a form can be sent

    def __init__(
        self,
        settings: Settings,
        asker: Callable[[web.Request], Asker],
        told: Callable[[], Sequence[Measurement]],
        pushed: Callable[[], SeenPushes],
    ) -> None:
        """``asker``: who may have questions worked on; ``told``: what was measured so far.

        ``pushed``: what was read along in the journal.
        """
        self._settings = settings
        self._asker = asker
        self._told = told
        self._pushed = pushed
        self.journal = Path(settings.journal.dir)
        self._opening = asyncio.Lock()
        self._server: PageServer | None = None
        self._is_closed = False

    async def are_there(self) -> bool:
        """Whether there is a journal."""
        return await asyncio.to_thread(self._is_there)

    def _is_there(self) -> bool:
        try:
            return any(one.suffix == ".journal" for one in self.journal.iterdir())
        except OSError:
            return False

    def answering(self, path: str) -> Answering:
        """The handler of one of the pages, or of a form that is sent there."""

        async def answer(request: web.Request) -> web.StreamResponse:
            server = await self._opened()
            method = "POST" if request.method == "POST" else "GET"
            route = next(one for one in server.routes() if (one.path, one.method) == (path, method))
            return await server.answered(request, route.handler)

        return answer

    async def _opened(self) -> PageServer:
        """Raises FedstreamError if there is nothing to see."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.to_thread(self._open)
        return self._server

    def _open(self) -> PageServer:
        if self._is_closed:
            raise FedstreamError("this coordinator is stopping")
        if not self._is_there():
            raise FedstreamError(
                f"the journal is not readable from here ({self.journal}): look at it where it is, "
                "with fedstream ui"
            )
        from fedstream.history.recorded_run import RecordedRun
        from fedstream.history.ui.jobs import PageJobs, Workplace
        from fedstream.history.ui.server import PageServer
        from fedstream.history.ui.work import TaskAccess, WorkBounds

        folder, settings = self.journal.parent, self._settings
        path = folder if (folder / CONFIG).is_file() else self.journal
        # The run is the coordinator's own: what its journal names was configured here as well.
        own = Settings(task=settings.task, evaluator=settings.evaluator)
        jobs = PageJobs(
            Workplace(
                path,
                TaskAccess(trusted=True, own=own),
                WorkBounds(settings.page.question_s, settings.page.question_bytes, _NICENESS),
                log="the coordinator's log",
                preloads=False,
            )
        )
        run = RecordedRun(
            path,
            is_live=True,
            told=self._told,
            lately=self._lately,
        )
        return PageServer(run, jobs, self._asker)

    def _lately(self, device: int) -> LatePushes:
        """A device's part of what was read along."""
        from fedstream.history.model_stats import LatePushes

        seen = self._pushed()
        return LatePushes(seen.rows[seen.rows["device"] == device], seen.version, seen.problem)

    def close(self) -> None:
        """Close its files, and end what is being worked on."""
        self._is_closed = True
        if self._server is not None:
            self._server.is_ending = True
            self._server.jobs.end()
            self._server.run.close()
