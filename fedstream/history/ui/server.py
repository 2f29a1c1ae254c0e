"""`fedstream ui`: the pages over HTTP, for browsers on this machine.

The server writes only the index, and trusts no value in a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TypeVar

import structlog
from aiohttp import web

from fedstream.core.errors import FedstreamError
from fedstream.history.charts import Window
from fedstream.history.models import Unwanted
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import pages
from fedstream.history.ui.http import HEADERS, Answering, Permission, no_icon, send_static
from fedstream.history.ui.jobs import PageJobs, Workplace
from fedstream.history.ui.pages import NotThere, Selection
from fedstream.history.ui.question_pages import QuestionRoutes
from fedstream.history.ui.work import TaskAccess
from fedstream.runtime.http import HttpSettings, listening
from fedstream.runtime.limits import ConnectionLimit
from fedstream.runtime.process import Stop

T = TypeVar("T")
_DIGITS = 18  # more than any version has
_MEANT = {  # by a number in an address
    "version": "a version",
    "number": "a version",
    "to": "a version to compare with",
    "at": "a version",
    "from": "a first version",
    "until": "a last version",
    "device": "a device's number",
    "page": "a page's number",
}
_NOT_WANTED = 499  # the client left before the answer; nobody sees it


class PageServer:
    """The pages of one run. Its models are used by one request at a time, in a thread."""

    def __init__(
        self,
        opening: Callable[[], RecordedRun],
        jobs: PageJobs,
        permission: Callable[[web.Request], Permission] = lambda _: "may",
    ) -> None:
        """``opening``: opens the run, for the first request. ``jobs``: work on questions.
        ``permission``: a sender's right to start work.
        """
        self._opening = opening
        self._run: RecordedRun | None = None
        self.is_ending = False  # nobody waits for an answer any more
        self.jobs = jobs
        self._questions = QuestionRoutes(self.jobs, self._with_run, permission)
        self._using = asyncio.Lock()
        self._waiting = 0  # requests that wait for it
        # The version whose models were shown last, and the step to it; None: none was yet.
        self._moment: tuple[int, int | None] | None = None
        self._moved = asyncio.Event()  # a version was shown since

    @property
    def run(self) -> RecordedRun:
        """The run. Raises FedstreamError if it can't be opened."""
        if self._run is None:
            self._run = self._opening()
            self._run.measured_shares = lambda: self.jobs.shares
        return self._run

    def close(self) -> None:
        """Close the run's files, and end the work on questions."""
        self.is_ending = True
        self.jobs.end()
        if self._run is not None:
            self._run.close()

    def application(self) -> web.Application:
        """The routes."""

        @web.middleware
        async def guard(request: web.Request, handler: Answering) -> web.StreamResponse:
            response = await self.answered(request, handler)
            response.headers.update(HEADERS)
            return response

        app = web.Application(middlewares=[guard])
        app.add_routes([web.get("/", self._overview), *self.routes()])
        app.add_routes([web.get("/static/{name}", send_static), web.get("/favicon.ico", no_icon)])
        app.cleanup_ctx.append(self._prepare_pages)
        return app

    def routes(self) -> list[web.RouteDef]:
        """The routes of the run's pages and questions; only POST starts work."""
        return [
            web.get("/overview", self._overview),
            web.get("/versions", self._go),
            web.get("/versions/{number}", self._version),
            web.get("/updates", self._updates),
            web.get("/beside", self._beside),
            web.get("/devices", self._devices),
            web.get("/devices/{number}", self._device),
            *self._questions.routes(),
        ]

    async def answered(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        """Call a route's handler; answer an error with a page."""
        try:
            return await handler(request)
        except Unwanted:
            return web.Response(status=_NOT_WANTED)
        except NotThere as error:
            return await self._failed(404, "Not found", str(error))
        except FedstreamError as error:
            return await self._failed(500, "That did not work", str(error))
        except web.HTTPNotFound:
            return await self._failed(404, "Not found", f"no page {request.path[:80]}")
        except web.HTTPException as error:  # a redirect, or a method that is not allowed
            return web.Response(status=error.status, headers=error.headers)

    async def _prepare_pages(self, _app: web.Application) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._prepare_versions(), name="look around")
        yield
        self.is_ending = True
        self._moved.set()
        await looking

    async def _prepare_versions(self) -> None:
        """Compute likely next versions while there are no requests."""

        def is_idle() -> bool:
            return not self._waiting and not self.is_ending

        self._note_version(self.run.newest, None)  # where the link to the versions leads
        while not self.is_ending:
            await self._moved.wait()
            self._moved.clear()
            moment = self._moment
            while not self.is_ending and moment is not None and moment is self._moment:
                async with self._using:
                    try:
                        await asyncio.to_thread(self.run.prepare_neighbours, *moment, is_idle)
                    except Unwanted:
                        continue  # a reader asks: go on after that
                    except FedstreamError:
                        pass  # who asks for it is told
                break

    async def _with_run(self, make: Callable[[RecordedRun], T], *, anew: bool = True) -> T:
        """Call ``make`` with the run; ``anew``: read the journal's new records first."""

        def ask() -> T:
            if anew:
                self._run = self.run.refresh()
            return make(self.run)

        self._waiting += 1
        try:
            await self._using.acquire()
        finally:
            self._waiting -= 1
        try:
            # To the end, even if the client leaves: the next request must not find it in use.
            return await asyncio.shield(asyncio.to_thread(ask))
        finally:
            self._using.release()

    async def _page(self, make: Callable[[RecordedRun], str]) -> web.Response:
        return _html(await self._with_run(make))

    async def _failed(self, status: int, title: str, text: str) -> web.Response:
        # Not anew: that may be what went wrong, if the journal is no longer there.
        try:
            made = await self._with_run(lambda run: pages.error(run, title, text), anew=False)
        except FedstreamError:  # not even the run's name is known
            return web.Response(text=f"{title}: {text}\n", status=status)
        return _html(made, status)

    async def _overview(self, request: web.Request) -> web.Response:
        window = _window(request.query)
        return await self._page(lambda run: pages.overview(run, window))

    async def _beside(self, request: web.Request) -> web.Response:
        window = Window(over_time=_window(request.query).over_time)
        return await self._page(lambda run: pages.beside(run, window))

    async def _devices(self, request: web.Request) -> web.Response:
        sort = request.query.get("sort", "device")
        return await self._page(lambda run: pages.devices(run, sort))

    async def _device(self, request: web.Request) -> web.Response:
        wanted = number_in("device", request.match_info["number"])
        window = _window(request.query)
        return await self._page(lambda run: pages.device(run, wanted, window))

    async def _updates(self, request: web.Request) -> web.Response:
        asked, problems = request.query, dict[str, str]()

        def whole(name: str) -> int | None:
            try:
                return _optional(name, asked)
            except NotThere as error:
                problems[name] = str(error)
                return None

        wanted = Selection(
            whole("device"),
            asked.get("outcome") or None,
            asked.get("reason") or None,
            whole("from"),
            whole("until"),
        )
        page = _optional("page", asked) or 0
        text = await self._with_run(lambda run: pages.updates(run, wanted, page, asked, problems))
        return _html(text, 422 if problems else 200)

    async def _version(self, request: web.Request) -> web.Response:
        wanted = number_in("version", request.match_info["number"])
        models = "models" in request.query

        def is_waiting() -> bool:
            return request.transport is not None and not self.is_ending

        def make(run: RecordedRun) -> tuple[int, str]:
            (to,), fields, problems = _filled(run, request.query, "to")
            return 422 if problems else 200, pages.version(
                run,
                wanted,
                to,
                models=models,
                is_waiting=is_waiting,
                fields=fields,
                problems=problems,
            )

        status, text = await self._with_run(make)
        answer = _html(text, status)
        if models or self.run.knows(wanted):
            self._note_version(wanted, wanted - (self._moment[0] if self._moment else wanted))
        return answer

    def _note_version(self, version: int, step: int | None) -> None:
        self._moment = version, step
        self._moved.set()

    async def _go(self, request: web.Request) -> web.Response:
        """The version form's answer without JavaScript: the field that was changed counts."""
        asked = request.query
        was = _optional("at", asked)

        def make(run: RecordedRun) -> str:
            (number, to, slid), fields, problems = _filled(run, asked, "number", "to", "version")
            wanted = number if number is not None and number != was else slid
            at = run.newest if wanted is None else run.columns.nearest(wanted)
            if not problems:
                raise web.HTTPSeeOther(f"/versions/{at}" + ("" if to is None else f"?to={to}"))
            return pages.version(
                run,
                at,
                to,
                models=False,
                is_waiting=lambda: True,
                fields=fields,
                problems=problems,
            )

        return _html(await self._with_run(make), 422)


async def serve(
    run: RecordedRun, host: str, port: int, ready: Callable[[int], object], access: TaskAccess
) -> None:
    """Serve a run's pages until a signal. ``ready``: told the port. Raises FedstreamError."""
    settings = HttpSettings(host=host, port=port)
    site = PageServer(lambda: run, PageJobs(Workplace(run.path, access)))
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    app = site.application()
    log = structlog.get_logger()
    try:
        with Stop() as stop:
            stop.listen(lambda _name: loop.call_soon_threadsafe(ended.set))
            async with listening(
                app, settings, port, ConnectionLimit(settings.connections), log
            ) as at:
                ready(at)
                await ended.wait()
                site.is_ending = True
            stop.listen(None)
    finally:
        site.close()


def _html(text: str, status: int = 200) -> web.Response:
    return web.Response(text=text, status=status, content_type="text/html")


def _filled(
    run: RecordedRun, asked: Mapping[str, str], *names: str
) -> tuple[list[int | None], dict[str, str], dict[str, str]]:
    """A form's versions, its wrong fields as filled in, and the errors in them."""
    found, fields, problems = list[int | None](), dict[str, str](), dict[str, str]()
    for name in names:
        value, problem = None, ""
        try:
            value = _optional(name, asked)
        except NotThere as error:
            problem = str(error)
        if name == "to" and value is not None:  # of others, the nearest is shown
            problem = pages.missing(run, value)
        if problem:
            value, fields[name], problems[name] = None, asked[name][:40], problem
        found.append(value)
    return found, fields, problems


def _window(asked: Mapping[str, str]) -> Window:
    over_time = asked.get("over") == "time"
    return Window(_optional("from", asked), _optional("until", asked), over_time)


def _optional(name: str, asked: Mapping[str, str]) -> int | None:
    value = asked.get(name, "")
    return number_in(name, value) if value else None


def number_in(name: str, value: str) -> int:
    """The number in an address, for the field ``name``. Raises NotThere."""
    text = value.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= _DIGITS):
        raise NotThere(f"{text[:40]!r} is not {_MEANT[name]}: give a whole number, such as 12")
    return int(text)
