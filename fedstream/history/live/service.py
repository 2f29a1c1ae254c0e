"""The live page's routes, logins, operators' actions, and stream of changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from aiohttp import web
from prometheus_client import Counter

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.live_page import LivePageLedger
from fedstream.coordinator.access import Tokens
from fedstream.coordinator.settings import MakePage, has_page
from fedstream.core.errors import FedstreamError, NoRun
from fedstream.history.live.broadcast import Broadcast, LivePicture
from fedstream.history.live.collector import Collector
from fedstream.history.live.operator_actions import OperatorActions
from fedstream.history.live.panels import PANELS, headline_html, parts_of
from fedstream.history.live.sessions import LASTS_S, Sessions, ViewerRole
from fedstream.history.live.snapshot import Snapshot
from fedstream.history.measurements import Measurement
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.http import (
    HEADERS,
    Answering,
    Permission,
    form_of,
    is_ours,
    no_icon,
    send_static,
)
from fedstream.history.ui.jobs import PageJobs, Workplace
from fedstream.history.ui.question_pages import FORMS
from fedstream.history.ui.server import PageServer
from fedstream.history.ui.templating import rendered
from fedstream.history.ui.work import TaskAccess, WorkBounds
from fedstream.journal import SUFFIX
from fedstream.runtime.http import NOWHERE
from fedstream.runtime.limits import TokenBuckets, network_of
from fedstream.runtime.service import Context
from fedstream.settings.config import Settings
from fedstream.settings.recording import CONFIG

_FORM = 4096  # bytes
_GUESSES, _GUESSES_PER_S = 10, 1 / 6  # wrong tokens per address: at once, and per second
_ADDRESSES = 1000  # with wrong tokens that are remembered
_WITHIN_S = 5.0  # time-out for a snapshot that a page needs
_SOON_S = 1.0  # time-out for a snapshot that a page can do without
_RETRY_S = "2"
_NICENESS = 19  # a question's process runs after all others
_STREAM = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}


def live_page(settings: Settings) -> MakePage | None:
    """A function that makes a coordinator's page; None if it has none. Raises ConfigError."""
    return partial(LiveService, settings) if has_page(settings.page, settings.http) else None


class _Refused(FedstreamError):
    """The request is not allowed; ``status`` and ``title`` are the answer's."""

    def __init__(self, status: int, title: str, text: str) -> None:
        super().__init__(text)
        self.status, self.title = status, title


class LiveService:
    """The page of one coordinator."""

    def __init__(self, settings: Settings, client: Client, tokens: Tokens | None) -> None:
        """``tokens``: of viewers; None: everybody may view."""
        self._settings = settings
        keys = Keys(settings.run.name)
        self._run = keys.name
        self._sessions = Sessions(settings.run.name, tokens, settings.page.operator_token)
        self._now = client.clock.now  # Redis's clock, the same for all replicas
        self._collector = Collector(LivePageLedger(client, keys, "page"), settings)
        self._guesses = TokenBuckets(_GUESSES_PER_S, at_once=_GUESSES, remembered=_ADDRESSES)
        self._broadcast = Broadcast(self._draw, _away, self._note_fault)
        self._recorded_pages = self._of_journal()
        self._actions = OperatorActions(settings, client, keys)
        self._logger: Any = structlog.get_logger()  # of requests before the service runs

    async def run(self, context: Context) -> None:
        """Collect snapshots while there are viewers, until stop."""
        self._logger = context.log
        self._faults = Counter(
            "fedstream_page_faults",
            "Faults of the live page's own.",
            registry=context.registry,
        )
        try:
            await self._broadcast.run(context.stop)
        finally:
            self._recorded_pages.close()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The page, its stream, logins, operators' actions, and the recorded run's pages."""
        return [
            web.get("/", self._guarded(self._page)),
            web.get("/live/stream", self._guarded(self._stream)),
            web.get("/login", self._guarded(self._ask, None)),
            web.post("/login", self._guarded(self._log_in, None)),
            web.post("/logout", self._guarded(self._log_out, None)),
            web.get("/operate", self._guarded(self._operated, "operator")),
            web.post("/operate/retry", self._guarded(self._retry, "operator")),
            web.post("/operate/stop", self._guarded(self._stop, "operator")),
            web.get("/static/{name}", self._guarded(send_static, None)),
            web.get("/favicon.ico", self._guarded(no_icon, None)),
            web.get(f"/{NOWHERE}", self._guarded(self._nowhere, None), name=NOWHERE),
            *(
                web.route(one.method, one.path, self._guarded(self._recorded(one)))
                for one in self._recorded_pages.routes()
            ),
        ]

    async def _nowhere(self, _request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    # permissions

    def _guarded(self, handler: Answering, role: ViewerRole | None = "viewer") -> Answering:
        """Answer clients with this role (None: any); others get the form that asks for a token.

        POST is answered only if it comes from this server's own pages.
        """

        async def answer(request: web.Request) -> web.StreamResponse:
            try:
                if request.method == "POST" and not is_ours(request):
                    text = "this was not sent by a page of this coordinator"
                    raise _Refused(403, "Not from here", text)
                if role is None or self._may(request, role):
                    response = await handler(request)
                else:
                    response = self._login(request.rel_url.raw_path_qs, role)
            except Exception as error:
                response = self._failed(request, error)
            if not response.prepared:
                response.headers.update(HEADERS)
            return response

        return answer

    def _failed(self, request: web.Request, error: Exception) -> web.Response:
        """The answer to an error; unexpected errors are raised again."""
        title, text, status = "That did not work", str(error), 500
        match error:
            case web.HTTPNotFound():
                title, text, status = "Not found", f"no page {request.path[:80]}", 404
            case web.HTTPException():  # a redirect, or a form that is too long
                return web.Response(status=error.status, headers=error.headers)
            case NoRun() | TimeoutError():
                why = text or "Redis has not answered yet"
                if isinstance(error, NoRun):  # seen most often where one is about to begin
                    why = (
                        f"the run {self._run!r} is being set up, unless there is none of that name"
                    )
                said = f"{why}: this page is loaded again by itself"
                return self._html("waiting.html", "Waiting", status=503, text=said)
            case _Refused():
                title, status = error.title, error.status
            case FedstreamError():
                status = 503 if error.retriable else 500
            case _:
                raise error
        return self._html("problem.html", title, status=status, text=text)

    def _html(
        self,
        template: str,
        title: str,
        snapshot: Snapshot | None = None,
        *,
        status: int = 200,
        **about: object,
    ) -> web.Response:
        """A page of a template. ``snapshot``: None where no facts of the run are shown."""
        run = {"name": self._run, "task": "", "strategy": "", "state": "", "why": "", "damage": ()}
        if snapshot is not None:
            seen = snapshot.tally.run
            run |= {"task": seen.task, "strategy": seen.strategy}
            run |= {"state": seen.state, "why": seen.why or ""}
        text = rendered(template, title=title, run=run, **about)
        headers = {"Retry-After": _RETRY_S} if status == 503 else None
        return web.Response(text=text, status=status, content_type="text/html", headers=headers)

    def _permission(self, request: web.Request) -> Permission:
        """Whether a request's sender may start the work on a question, which takes long.

        Without a token (this machine only) every viewer may; with a token, only operators.
        """
        if self._sessions.is_open or self._role(request) == "operator":
            return "may"
        return "operator" if self._sessions.has_operators else "nobody"

    def _may(self, request: web.Request, role: ViewerRole) -> bool:
        """Whether a request's sender has a role. Raises _Refused if the role has no token."""
        now = self._role(request)
        if role == "operator":
            if now != "operator" and not self._sessions.has_operators:
                raise _nobody_may("act")
            return now == "operator"
        header = request.headers.get("Authorization", "")
        return self._sessions.is_open or now is not None or self._sessions.is_bearer(header)

    def _role(self, request: web.Request) -> ViewerRole | None:
        return self._sessions.role(self._cookie(request), self._now())

    def _cookie(self, request: web.Request) -> str:
        return request.cookies.get(self._sessions.cookie, "")

    # the page

    async def _draw(self) -> LivePicture:
        """Collect a snapshot, and draw it."""
        began = time.thread_time()
        snapshot = await self._collector.look()
        seconds = time.thread_time() - began  # with those of what ran while this waited
        # In a thread: it may take a tenth of a second, and entries must not wait for it.
        return await asyncio.to_thread(self._drawn, snapshot, seconds)

    def _drawn(self, snapshot: Snapshot, seconds: float) -> LivePicture:
        began = time.thread_time()
        snapshot = replace(snapshot, is_recorded=self._has_journal())
        parts = parts_of(snapshot)
        return LivePicture(snapshot, parts, seconds + time.thread_time() - began)

    def _note_fault(self, error: Exception) -> None:
        self._logger.error("the page failed", exc_info=error)
        self._faults.inc()

    async def _page(self, request: web.Request) -> web.StreamResponse:
        picture, role = await self._broadcast.newest(_WITHIN_S), self._role(request)
        return self._html(
            "live.html",
            "Live",
            picture.snapshot,
            parts=picture.parts,
            panels=PANELS,
            is_recorded=picture.snapshot.is_recorded,
            journal=self._settings.journal.dir,
            has_operators=self._sessions.has_operators,
            may_leave=role is not None,
        )

    def _of_journal(self) -> PageServer:
        """The pages of the run's journal, which is opened with the first request."""
        settings, journal = self._settings, Path(self._settings.journal.dir)
        path = journal.parent if (journal.parent / CONFIG).is_file() else journal
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
        return PageServer(
            lambda: RecordedRun(path, is_live=True, measured=self._measured), jobs, self._permission
        )

    def _has_journal(self) -> bool:
        """Whether this process can read a journal."""
        try:
            return any(one.suffix == SUFFIX for one in Path(self._settings.journal.dir).iterdir())
        except OSError:
            return False

    def _recorded(self, route: web.RouteDef) -> Answering:
        """A handler that answers with a page of the recorded run."""
        is_question = route.path in {one.path for one in FORMS}

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.method == "POST" and (permission := self._permission(request)) != "may":
                if permission == "nobody":
                    raise _nobody_may("work on this")
                return self._login(route.path, "operator")
            if not await asyncio.to_thread(self._has_journal):
                raise FedstreamError(
                    f"the journal is not readable from here ({self._settings.journal.dir}): look "
                    "at it where it is, with fedstream ui"
                )
            # A question's page asks often for progress, which needs no new snapshot.
            if self._broadcast.picture is None or not is_question:
                with suppress(FedstreamError, TimeoutError):  # only measurements are missing
                    await self._broadcast.newest(_SOON_S)
            return await self._recorded_pages.answered(request, route.handler)

        return answer

    def _measured(self) -> list[Measurement]:
        """The measurements in the newest snapshot."""
        picture = self._broadcast.picture
        return [] if picture is None else [*picture.snapshot.measured]

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":  # the page asks whether it may connect again
            return web.Response(headers=_STREAM)
        if self._broadcast.viewers >= self._settings.page.viewers:
            most = f"{self._settings.page.viewers} viewers are there already (page.viewers)"
            raise _Refused(503, "Too many viewers", most)
        response = web.StreamResponse(headers={**_STREAM, **HEADERS})
        await response.prepare(request)
        async with aclosing(self._broadcast.follow()) as news:
            async for part in news:
                await response.write(part)
        return response

    # logins

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        return self._login(_local(request.query.get("to", "/")), _wanted(request.query))

    def _login(
        self, to: str, role: ViewerRole, problem: str = "", status: int = 401
    ) -> web.Response:
        """The form that asks for a token. ``to``: the path that was asked for."""
        response = self._html(
            "login.html",
            "Log in",
            status=status,
            to=to,
            is_operator=role == "operator",
            problem=problem,
        )
        response.headers["WWW-Authenticate"] = 'Bearer realm="fedstream"'
        return response

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        said = await form_of(request, _FORM)
        to, role = _local(said.get("to", "/")), _wanted(said)
        guesser = network_of(request.remote or "")
        if (wait_s := self._guesses.wait_s(guesser, time.monotonic())) > 0:
            problem = (
                "Too many wrong tokens came from this address: another one is taken in "
                f"{ceil(wait_s)} s, right or wrong."
            )
            response = self._login(to, role, problem, 429)
            response.headers["Retry-After"] = str(ceil(wait_s))
            return response
        begun = self._sessions.begun(said.get("token", ""), self._now())
        if begun is None or (role == "operator" and begun[0] != "operator"):
            self._guesses.charge(guesser, time.monotonic())
            self._log("login refused", request, to=to[:80])
            return self._login(to, role, "This is not the token.")
        if to.startswith("/operate/"):  # a form that was sent after its time: begin with the page
            to = "/operate"
        redirect = web.Response(status=303, headers={"Location": to})
        is_secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
        redirect.set_cookie(
            self._sessions.cookie,
            begun[1],
            max_age=LASTS_S[begun[0]],
            httponly=True,
            samesite="Strict",
            secure=is_secure,
            path="/",
        )
        return redirect

    async def _log_out(self, _request: web.Request) -> web.StreamResponse:
        response = web.Response(status=303, headers={"Location": "/"})
        response.del_cookie(self._sessions.cookie, path="/")
        return response

    # operators' actions

    async def _retry(self, request: web.Request) -> web.StreamResponse:
        said = await form_of(request, _FORM)
        letter = said.get("letter", "")

        async def act() -> str:
            trigger = await self._actions.retry(letter)
            self._log("dead letter retried", request, letter=letter, task=trigger.task)
            return f"Letter {letter} is being retried as task {trigger.task}."

        return await self._operated(request, said, act)

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        said = await form_of(request, _FORM)

        async def act() -> str:
            if said.get("sure") != "yes":
                raise FedstreamError("tick the box, too")
            if not await self._actions.stop():
                raise FedstreamError("the run is not going on")
            self._log("run stopped", request)
            return "The run ends with its newest version."

        return await self._operated(request, said, act)

    async def _operated(
        self,
        request: web.Request,
        said: Mapping[str, str] | None = None,
        act: Callable[[], Awaitable[str]] | None = None,
    ) -> web.Response:
        """The operators' page. ``said``: a form's fields; ``act``: the action to perform first."""
        cookie, status, found = self._cookie(request), 200, None
        told = problem = ended = ""
        try:
            if said is not None and not self._sessions.is_form(cookie, said.get("form", "")):
                problem, status = "this form was of an earlier login: send it once more", 403
            elif act is not None:
                told = await act()
        except FedstreamError as error:
            problem = self._actions.explained(error)
        try:
            found, run = await self._actions.seen()
            ended = "" if run.state == "running" else ": ".join(filter(None, (run.state, run.why)))
        except FedstreamError as error:
            problem = problem or self._actions.explained(error)
        return self._html(
            "operate.html",
            "Operate",
            status=status,
            found=found,
            form=self._sessions.form_of(cookie),
            told=told,
            problem=problem,
            ended=ended,
        )

    def _log(self, what: str, request: web.Request, **about: object) -> None:
        self._logger.warning(what, remote=request.remote, **about)


def _away(snapshot: Snapshot, away_s: float) -> dict[str, str]:
    """The headline that says for how long Redis has not answered."""
    return {"headline": headline_html(snapshot, away_s=away_s)}


def _nobody_may(what: str) -> _Refused:
    return _Refused(
        403,
        f"Nobody may {what}",
        "no operator's token is configured: set page.operator_token "
        "(FEDSTREAM_PAGE__OPERATOR_TOKEN), or use the command line",
    )


def _wanted(said: Mapping[str, str]) -> ViewerRole:
    """The role that a login form asks for."""
    return "operator" if said.get("as") == "operator" else "viewer"


def _local(to: str) -> str:
    """``to`` if it is a path of this server; otherwise the first page's path."""
    parts = urlsplit(to)
    is_ours = to.startswith("/") and not to.startswith("//") and "\\" not in to
    return to if is_ours and not parts.netloc and to.isprintable() else "/"
