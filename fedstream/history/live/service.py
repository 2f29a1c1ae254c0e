"""The live page's routes, logins, operators' actions, and stream of changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from aiohttp import web
from prometheus_client import Counter

from fedstream.broker.client import Client
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.live_page import LivePageLedger
from fedstream.coordinator.access import Tokens
from fedstream.coordinator.settings import LivePage, MakePage, has_page
from fedstream.core.errors import FedstreamError, NoRun
from fedstream.history.live.broadcast import Broadcast, DrawnSnapshot
from fedstream.history.live.collector import Collected, Collector
from fedstream.history.live.operator_actions import OperatorActions
from fedstream.history.live.recorded_pages import PAGES, QUESTIONS, RecordedPages
from fedstream.history.live.sessions import LASTS_S, Sessions, ViewerRole
from fedstream.history.live.snapshot import SeenPushes, Snapshot
from fedstream.history.ui.http import (
    HEADERS,
    Answering,
    Permission,
    form_of,
    is_ours,
    no_icon,
    send_static,
)
from fedstream.runtime.http import NOWHERE
from fedstream.runtime.limits import TokenBuckets, network_of
from fedstream.runtime.service import Context
from fedstream.settings.config import Settings

if TYPE_CHECKING:
    from fedstream.history.measurements import Measurement

_FORM = 4096  # bytes
_GUESSES, _GUESSES_PER_S = 10, 1 / 6  # wrong tokens per address: at once, and per second
_ADDRESSES = 1000  # with wrong tokens that are remembered
_DIGITS = 18  # of a device's number, at most
_WITHIN_S = 5.0  # time-out for a snapshot that a page needs
_SOON_S = 1.0  # time-out for a snapshot that a page can do without
_RETRY_S = 2
_SHORT_S, _LONG_S = 0.01, 0.2  # processor time for the journal, per snapshot
_RENDERING = "fedstream.history.live.rendering"
_STREAM = {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}


def live_page(settings: Settings) -> MakePage | None:
    """A function that makes a coordinator's page; None if it has none. Raises ConfigError."""
    if not has_page(settings.page, settings.http):
        return None

    def make(client: Client, tokens: Tokens | None) -> LivePage:
        return LiveService(settings, client, tokens)

    return make


class _EarlierLogin(FedstreamError):
    """A form belongs to an earlier login."""


class LiveService:
    """The page of one coordinator."""

    def __init__(self, settings: Settings, client: Client, tokens: Tokens | None) -> None:
        """``tokens``: of viewers; None: everybody may view."""
        self._settings = settings
        self._run = settings.run.name
        keys = Keys(settings.run.name)
        self._sessions = Sessions(self._run, tokens, settings.page.operator_token)
        self._now = client.clock.now  # Redis's clock, the same for all replicas
        self._collector = Collector(LivePageLedger(client, keys, "page"), settings)
        self._guesses = TokenBuckets(_GUESSES_PER_S, at_once=_GUESSES, remembered=_ADDRESSES)
        self._broadcast = Broadcast(
            self._collect, self._draw, self._away, partial(self._note_fault, "page")
        )
        self._recorded_pages = RecordedPages(
            settings, self._permission, self._measured, self._pushes
        )
        self._actions = OperatorActions(settings, client, keys)
        # Loaded for the first viewer, because both import much.
        self._renderer: Any = None  # the module `rendering`
        self._follower: Any = None  # a JournalFollower
        self._context: Context | None = None
        self._faults: Counter | None = None

    async def run(self, context: Context) -> None:
        """Collect snapshots while there are viewers, until stop."""
        self._context = context
        self._faults = Counter(
            "fedstream_page_faults",
            "Faults of the live page's own.",
            ["part"],
            registry=context.registry,
        )
        for part in ("page", "journal"):
            self._faults.labels(part)
        try:
            await self._broadcast.run(context.stop)
        finally:
            self._recorded_pages.close()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The page, its stream, logins, operators' actions, and the recorded run's pages."""
        return [
            web.get("/", self._guarded(self._page)),
            web.get("/live/stream", self._guarded(self._stream)),
            web.get("/login", self._open(self._ask)),
            web.post("/login", self._open(self._log_in)),
            web.post("/logout", self._open(self._log_out)),
            web.get("/operate", self._guarded(self._operate, "operator")),
            web.post("/operate/retry", self._guarded(self._retry, "operator")),
            web.post("/operate/stop", self._guarded(self._stop, "operator")),
            web.get("/static/{name}", self._open(send_static)),
            web.get("/favicon.ico", self._open(no_icon)),
            web.get(f"/{NOWHERE}", self._open(self._nowhere), name=NOWHERE),
            *(web.get(path, self._guarded(self._recorded(path))) for path in (*PAGES, *QUESTIONS)),
            *(web.post(path, self._questioned(path)) for path in QUESTIONS),
        ]

    async def _nowhere(self, _request: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound

    # permissions

    def _open(self, handler: Answering) -> Answering:
        """Answer any client; POST only from this server's own pages."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.method == "POST" and not is_ours(request):
                response: web.StreamResponse = await self._failed(
                    403, "Not from here", "this was not sent by a page of this coordinator"
                )
            else:
                response = await self._answered(request, handler)
            if not response.prepared:
                response.headers.update(HEADERS)
            return response

        return answer

    def _guarded(self, handler: Answering, role: ViewerRole = "viewer") -> Answering:
        """Answer clients with this role; others get the form that asks for a token."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if self._may(request, role):
                return await handler(request)
            if role == "operator" and not self._sessions.has_operators:
                return await self._nobody_may("act")
            return await self._login(request.rel_url.raw_path_qs, role)

        return self._open(answer)

    def _permission(self, request: web.Request) -> Permission:
        """Whether a request's sender may start the work on a question, which takes long.

        Without a token (this machine only) every viewer may; with a token, only operators.
        """
        if self._sessions.is_open or self._role(request) == "operator":
            return "may"
        return "operator" if self._sessions.has_operators else "nobody"

    def _questioned(self, path: str) -> Answering:
        """Accept the form of a question from senders with the permission."""
        ask = self._recorded_pages.answering(path)

        async def answer(request: web.Request) -> web.StreamResponse:
            permission = self._permission(request)
            if permission == "may":
                return await ask(request)
            if permission == "operator":
                return await self._login(path, "operator")
            return await self._nobody_may("work on this")

        return self._guarded(answer)

    async def _nobody_may(self, what: str) -> web.Response:
        return await self._failed(
            403,
            f"Nobody may {what}",
            "no operator's token is configured: set page.operator_token "
            "(FEDSTREAM_PAGE__OPERATOR_TOKEN), or use the command line",
        )

    def _may(self, request: web.Request, role: ViewerRole) -> bool:
        now = self._role(request)
        if role == "operator":
            return now == "operator"
        header = request.headers.get("Authorization", "")
        return self._sessions.is_open or now is not None or self._sessions.is_bearer(header)

    def _role(self, request: web.Request) -> ViewerRole | None:
        return self._sessions.role(self._cookie(request), self._now())

    def _cookie(self, request: web.Request) -> str:
        return request.cookies.get(self._sessions.cookie, "")

    async def _answered(self, request: web.Request, handler: Answering) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPNotFound:
            return await self._failed(404, "Not found", f"no page {request.path[:80]}")
        except web.HTTPException as error:  # a redirect, or a form that is too long
            return web.Response(status=error.status, headers=error.headers)
        except (NoRun, TimeoutError) as error:
            make, why = await self._rendering(), str(error) or "Redis has not answered yet"
            if isinstance(error, NoRun):  # seen most often where one is about to begin
                why = f"the run {self._run!r} is being set up, unless there is none of that name"
            said = f"{why}: this page is loaded again by itself"
            return _html(make.waiting(self._run, said), 503, retry=True)
        except FedstreamError as error:
            status = 503 if error.retriable else 500
            return await self._failed(status, "That did not work", str(error))

    async def _failed(self, status: int, title: str, text: str) -> web.Response:
        make = await self._rendering()
        return _html(make.problem(self._run, title, text), status, retry=status == 503)

    # the page

    async def _rendering(self) -> Any:
        """The module that makes HTML, loaded for the first viewer."""
        if self._renderer is None:
            self._renderer = await asyncio.to_thread(import_module, _RENDERING)
        return self._renderer

    async def _collect(self) -> Collected:
        """Collect a snapshot from Redis, then from the journal if it can be read."""
        look = await self._collector.look()
        # Nothing waits for the first snapshot's figures, or for those after the end.
        is_free = look.is_anew or look.snapshot.tally.run.state == "finished"
        pushes, seconds = await asyncio.to_thread(
            self._read_journal, _LONG_S if is_free else _SHORT_S
        )
        snapshot = replace(look.snapshot, pushes=pushes)
        return replace(look, snapshot=snapshot, seconds=look.seconds + seconds)

    def _read_journal(self, for_s: float) -> tuple[SeenPushes, float]:
        """Read news of the journal for ``for_s``; returns the figures, and the seconds taken."""
        if self._follower is None:
            from fedstream.history.live.journal_follower import JournalFollower

            journal = self._settings.journal
            self._follower = JournalFollower(Path(journal.dir), weights=journal.weights)
        began = time.thread_time()
        try:
            found: SeenPushes = self._follower.look(for_s)
        except Exception as error:  # the page works without the journal
            self._note_fault("journal", error)
            found = self._follower.give_up(
                f"a fault of this page ({type(error).__name__}; the coordinator's log says more)"
            )
        return found, time.thread_time() - began

    async def _draw(self, look: Collected) -> DrawnSnapshot:
        make = await self._rendering()
        # In a thread: it may take a tenth of a second, and entries must not wait for it.
        found: DrawnSnapshot = await asyncio.to_thread(make.drawn, look)
        return found

    def _note_fault(self, part: str, error: Exception) -> None:
        if self._context is not None and self._faults is not None:
            self._context.log.error("the page failed", part=part, exc_info=error)
            self._faults.labels(part).inc()

    def _away(self, snapshot: Snapshot, away_s: float) -> Mapping[str, str]:
        found: Mapping[str, str] = self._renderer.away(snapshot, away_s)
        return found

    async def _page(self, request: web.Request) -> web.StreamResponse:
        make = await self._rendering()
        picture = await self._broadcast.newest(_WITHIN_S)
        cookie = self._role(request)
        return _html(
            make.page(
                picture,
                is_recorded=await self._recorded_pages.is_there(),
                journal=str(self._recorded_pages.journal),
                is_operator=cookie == "operator",
                has_operators=self._sessions.has_operators,
                may_leave=cookie is not None,
            )
        )

    def _recorded(self, path: str) -> Answering:
        """A page of the recorded run. Without a journal, pages of devices show the newest tasks."""
        recorded = self._recorded_pages.answering(path)

        async def answer(request: web.Request) -> web.StreamResponse:
            if not path.startswith("/devices") or await self._recorded_pages.is_there():
                # A question's page asks often for progress, which needs no new snapshot.
                if self._broadcast.picture is None or path not in QUESTIONS:
                    with suppress(
                        FedstreamError, TimeoutError
                    ):  # only measurements would be missing
                        await self._broadcast.newest(_SOON_S)
                return await recorded(request)
            make, picture = await self._rendering(), await self._broadcast.newest(_WITHIN_S)
            about = {"has_operators": self._sessions.has_operators}
            number = request.match_info.get("number")
            if number is None:
                return _html(make.devices(picture, request.query.get("sort", ""), **about))
            if not (number.isascii() and number.isdigit() and len(number) <= _DIGITS):
                raise web.HTTPNotFound
            return _html(make.device(picture, int(number), **about))

        return answer

    def _measured(self) -> list[Measurement]:
        """The measurements in the newest snapshot."""
        picture = self._broadcast.picture
        return [] if picture is None else picture.snapshot.measurements

    def _pushes(self) -> SeenPushes:
        """The journal's figures in the newest snapshot."""
        picture = self._broadcast.picture
        return SeenPushes() if picture is None else picture.snapshot.pushes

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        if request.method == "HEAD":  # the page asks whether it may connect again
            return web.Response(headers=_STREAM)
        if self._broadcast.viewers >= self._settings.page.viewers:
            most = f"{self._settings.page.viewers} viewers are there already (page.viewers)"
            return await self._failed(503, "Too many viewers", most)
        # A browser that reconnects names its last event in a header; at first, in the address.
        after = request.headers.get("Last-Event-ID") or request.query.get("after", "")
        response = web.StreamResponse(headers={**_STREAM, **HEADERS})
        await response.prepare(request)
        async with aclosing(self._broadcast.follow(after[:40])) as news:
            async for part in news:
                await response.write(part)
        return response

    # logins

    async def _ask(self, request: web.Request) -> web.StreamResponse:
        role: ViewerRole = "operator" if request.query.get("as") == "operator" else "viewer"
        return await self._login(_local(request.query.get("to", "/")), role)

    async def _login(
        self, to: str, role: ViewerRole, problem: str = "", status: int = 401
    ) -> web.Response:
        make = await self._rendering()
        text = make.login(self._run, to, is_operator=role == "operator", problem=problem)
        response = _html(text, status)
        response.headers["WWW-Authenticate"] = 'Bearer realm="fedstream"'
        return response

    async def _log_in(self, request: web.Request) -> web.StreamResponse:
        said = await form_of(request, _FORM)
        to = _local(said.get("to", "/"))
        role: ViewerRole = "operator" if said.get("as") == "operator" else "viewer"
        guesser = network_of(request.remote or "")
        if (wait_s := self._guesses.wait_s(guesser, time.monotonic())) > 0:
            return await self._too_often(to, role, wait_s)
        begun = self._sessions.begun(said.get("token", ""), self._now())
        if begun is None or (role == "operator" and begun[0] != "operator"):
            self._guesses.charge(guesser, time.monotonic())
            self._log("login refused", request, to=to[:80])
            return await self._login(to, role, "This is not the token.")
        if to.startswith("/operate/"):  # a form that was sent after its time: begin with the page
            to = "/operate"
        response = web.Response(status=303, headers={"Location": to})
        is_secure = request.secure or request.headers.get("X-Forwarded-Proto") == "https"
        response.set_cookie(
            self._sessions.cookie,
            begun[1],
            max_age=LASTS_S[begun[0]],
            httponly=True,
            samesite="Strict",
            secure=is_secure,
            path="/",
        )
        return response

    async def _too_often(self, to: str, role: ViewerRole, wait_s: float) -> web.Response:
        seconds = ceil(wait_s)
        said = (
            "Too many wrong tokens came from this address: another one is taken in "
            f"{seconds} s, right or wrong."
        )
        response = await self._login(to, role, said, 429)
        response.headers["Retry-After"] = str(seconds)
        return response

    async def _log_out(self, _request: web.Request) -> web.StreamResponse:
        response = web.Response(status=303, headers={"Location": "/"})
        response.del_cookie(self._sessions.cookie, path="/")
        return response

    # operators' actions

    async def _operate(self, request: web.Request) -> web.StreamResponse:
        return await self._operated(request)

    async def _retry(self, request: web.Request) -> web.StreamResponse:
        said = await form_of(request, _FORM)
        letter = said.get("letter", "")

        async def act() -> str:
            self._check_login(request, said)
            trigger = await self._actions.retry(letter)
            self._log("dead letter retried", request, letter=letter, task=trigger.task)
            return f"Letter {letter} is being retried as task {trigger.task}."

        return await self._operated(request, act)

    async def _stop(self, request: web.Request) -> web.StreamResponse:
        said = await form_of(request, _FORM)

        async def act() -> str:
            self._check_login(request, said)
            if said.get("sure") != "yes":
                raise FedstreamError("tick the box, too")
            if not await self._actions.stop():
                raise FedstreamError("the run is not going on")
            self._log("run stopped", request)
            return "The run ends with its newest version."

        return await self._operated(request, act)

    def _check_login(self, request: web.Request, said: Mapping[str, str]) -> None:
        """Raise _EarlierLogin if a form doesn't belong to this login."""
        if not self._sessions.is_form(self._cookie(request), said.get("form", "")):
            raise _EarlierLogin("this form was of an earlier login: send it once more")

    async def _operated(
        self, request: web.Request, act: Callable[[], Awaitable[str]] | None = None
    ) -> web.Response:
        """The operators' page, after an action."""
        make, told, problem, found = await self._rendering(), "", "", None
        ended, status = "", 200
        try:
            told = "" if act is None else await act()
        except FedstreamError as error:
            problem = self._actions.explained(error)
            status = 403 if isinstance(error, _EarlierLogin) else status
        try:
            found, run = await self._actions.seen()
            ended = "" if run.state == "running" else ": ".join(filter(None, (run.state, run.why)))
        except FedstreamError as error:
            problem = problem or self._actions.explained(error)
        form = self._sessions.form_of(self._cookie(request))
        text = make.operate(self._run, found, form, told=told, problem=problem, ended=ended)
        return _html(text, status)

    def _log(self, what: str, request: web.Request, **about: object) -> None:
        if self._context is not None:
            self._context.log.warning(what, remote=request.remote, **about)


def _html(text: str, status: int = 200, *, retry: bool = False) -> web.Response:
    headers = {"Retry-After": str(_RETRY_S)} if retry else None
    return web.Response(text=text, status=status, content_type="text/html", headers=headers)


def _local(to: str) -> str:
    """A path of this server; the first page's path in place of any other address."""
    parts = urlsplit(to)
    is_ours = to.startswith("/") and not to.startswith("//") and "\\" not in to
    return to if is_ours and not parts.netloc and to.isprintable() else "/"
