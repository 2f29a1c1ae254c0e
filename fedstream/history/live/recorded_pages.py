"""The recorded run's pages beside the live page, if the coordinator can read the journal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from fedstream.core.errors import FedstreamError
from fedstream.history.live.snapshot import SeenPushes
from fedstream.history.ui.http import Answering, Permission
from fedstream.settings.config import Settings
from fedstream.settings.recording import CONFIG

if TYPE_CHECKING:
    from fedstream.history.measurements import Measurement
    from fedstream.history.ui.server import PageServer

PAGES = (
    "/overview",
    "/versions",
    "/versions/{number}",
    "/updates",
    "/devices",
    "/devices/{number}",
)
QUESTIONS = ("/bisect", "/what-if", "/distances")
"""Pages with a form, which may be sent to the same path."""
_NICENESS = 19  # a question's process runs after all others


class RecordedPages:
    """The pages of a run's journal, opened with the first request."""

    def __init__(
        self,
        settings: Settings,
        permission: Callable[[web.Request], Permission],
        measured: Callable[[], Sequence[Measurement]],
        pushes: Callable[[], SeenPushes],
    ) -> None:
        """``permission``: of a request's sender to have questions worked on.

        ``measured``: the measurements so far. ``pushes``: what was read of the journal's updates.
        """
        self._settings = settings
        self._permission = permission
        self._measured = measured
        self._pushes = pushes
        self.journal = Path(settings.journal.dir)
        self._opening = asyncio.Lock()
        self._server: PageServer | None = None
        self._is_closed = False

    async def is_there(self) -> bool:
        """Whether there is a journal."""
        return await asyncio.to_thread(self._is_there)

    def _is_there(self) -> bool:
        try:
            return any(one.suffix == ".journal" for one in self.journal.iterdir())
        except OSError:
            return False

    def answering(self, path: str) -> Answering:
        """The handler of a path, for GET and POST."""

        async def answer(request: web.Request) -> web.StreamResponse:
            async with self._opening:
                if self._server is None:
                    self._server = await asyncio.to_thread(self._open)
            server = self._server
            method = "POST" if request.method == "POST" else "GET"
            route = next(one for one in server.routes() if (one.path, one.method) == (path, method))
            return await server.answered(request, route.handler)

        return answer

    def _open(self) -> PageServer:
        """Open the journal. Raises FedstreamError if there is none."""
        if self._is_closed:
            raise FedstreamError("this coordinator is stopping")
        if not self._is_there():
            raise FedstreamError(
                f"the journal is not readable from here ({self.journal}): look at it where it is, "
                "with fedstream ui"
            )
        from fedstream.history.model_stats import RecentPushes
        from fedstream.history.recorded_run import RecordedRun
        from fedstream.history.ui.jobs import PageJobs, Workplace
        from fedstream.history.ui.server import PageServer
        from fedstream.history.ui.work import TaskAccess, WorkBounds

        def recent_pushes(device: int) -> RecentPushes:
            seen = self._pushes()
            rows = seen.rows[seen.rows["device"] == device]
            return RecentPushes(rows, seen.version, seen.problem)

        folder, settings = self.journal.parent, self._settings
        path = folder if (folder / CONFIG).is_file() else self.journal
        # Trusted: the programs that the journal names are in this coordinator's configuration, too.
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
        run = RecordedRun(path, is_live=True, measured=self._measured, recent_pushes=recent_pushes)
        return PageServer(run, jobs, self._permission)

    def close(self) -> None:
        """Close the journal's files, and end the work on questions."""
        self._is_closed = True
        if self._server is not None:
            self._server.is_ending = True
            self._server.jobs.end()
            self._server.run.close()
