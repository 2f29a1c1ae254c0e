"""Bisection and 'what if' over HTTP: a form, the work that it starts, and where to find it.

Only POST starts or cancels work, with a token that the form has: a page elsewhere can send a form
here, but it can't read one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from secrets import token_urlsafe
from typing import TypeAlias
from urllib.parse import urlencode

from aiohttp import web

from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import answers, questions
from fedstream.history.ui.http import Asker, form_of
from fedstream.history.ui.jobs import KEPT, KEPT_BYTES, Occupied, PageJobs
from fedstream.history.ui.questions import Fields, Problems, Question

Made: TypeAlias = tuple[int, str]  # a page and its status
AskRun: TypeAlias = Callable[..., Awaitable[Made]]
"""Calls a function with the run as it stands now; with ``anew=False``, as it stood before."""

_FORM = 1 << 16  # bytes
_STALE = (
    "Not started: this form is not from here, or the server was started again since. Look at what "
    "it asks, and send it once more."
)


@dataclass(frozen=True)
class QuestionForm:
    """What one kind of question needs."""

    path: str
    names: tuple[str, ...]  # of the form's fields
    first: Callable[[RecordedRun], dict[str, str]]  # a form to begin with
    read: Callable[[Fields, RecordedRun], tuple[Question | None, Problems]]
    show: Callable[..., str]

    def fields(self, sent: Mapping[str, object]) -> Fields:
        """What was filled in."""
        texts = [(name, sent.get(name)) for name in self.names]
        return {
            name: text.strip() for name, text in texts if isinstance(text, str) and text.strip()
        }

    def address(self, fields: Fields) -> str:
        """Where a question, and what became of it, is shown."""
        return f"{self.path}?{urlencode(fields)}"


FORMS = (
    QuestionForm(
        "/bisect",
        questions.BISECTION,
        questions.first_bisection,
        questions.bisection,
        answers.bisection,
    ),
    QuestionForm(
        "/what-if",
        questions.OTHER_RULE,
        lambda _run: {},
        questions.other_rule,
        answers.other_rule,
    ),
    QuestionForm(
        "/distances", questions.DISTANCES, lambda _run: {}, questions.distances, answers.distances
    ),
)


class Asking:
    """The routes of all kinds.

    ``asker``: whether whoever sent a request may have us work; it decides what is shown, and the
    server what is done.
    """

    def __init__(self, jobs: PageJobs, ask: AskRun, asker: Callable[[web.Request], Asker]) -> None:
        self._jobs = jobs
        self._ask = ask
        self._asker = asker
        self._token = token_urlsafe(24)

    def routes(self) -> list[web.RouteDef]:
        """What the server is to have."""
        return [
            route
            for form in FORMS
            for route in (
                web.get(form.path, self._looking(form)),
                web.post(form.path, self._asking(form)),
            )
        ]

    def _looking(self, form: QuestionForm) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def look(request: web.Request) -> web.Response:
            fields, asker = form.fields(request.query), self._asker(request)
            # Whoever follows the work asks often: that alone is no reason to read the journal.
            anew = self._jobs.at(form.address(fields)) is None
            return _html(
                await self._ask(lambda run: (200, self._shown(run, form, fields, asker)), anew=anew)
            )

        return look

    def _asking(self, form: QuestionForm) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def post(request: web.Request) -> web.Response:
            sent = await form_of(request, _FORM)
            fields, token = form.fields(sent), sent.get("token", "")
            if not compare_digest(token.encode(), self._token.encode()):
                return _html(
                    await self._ask(lambda run: (403, self._page(run, form, fields, {}, _STALE)))
                )
            if sent.get("do") == "cancel":
                job = self._jobs.at(form.address(fields))
                if job is not None:
                    job.cancel()
                raise web.HTTPSeeOther(form.address(fields))
            return _html(await self._ask(lambda run: self._begun(run, form, fields)))

        return post

    def _begun(self, run: RecordedRun, form: QuestionForm, fields: Fields) -> Made:
        """Start the work that a form asks for; raises HTTPSeeOther where it is shown."""
        if run.is_live and "until" not in fields:  # it goes on: of what is the answer?
            fields = {**fields, "until": str(run.newest)}
        question, problems = form.read(fields, run)
        if question is None:
            return 422, self._page(run, form, fields, problems)
        try:
            self._jobs.begin(question, form.address(fields))
        except Occupied:
            return 409, self._page(run, form, fields, {})
        raise web.HTTPSeeOther(form.address(fields))

    def _shown(self, run: RecordedRun, form: QuestionForm, fields: Fields, asker: Asker) -> str:
        if not fields:
            return self._page(run, form, form.first(run), {}, asker=asker)
        known = self._jobs.at(form.address(fields)) is not None
        return self._page(
            run, form, fields, {} if known else form.read(fields, run)[1], asker=asker
        )

    def _page(
        self,
        run: RecordedRun,
        form: QuestionForm,
        fields: Fields,
        problems: Problems,
        notice: str = "",
        asker: Asker = "may",
    ) -> str:
        """``notice``: why there is nothing to show but the form."""
        job, current = self._jobs.at(form.address(fields)), self._jobs.current
        return form.show(
            run,
            dict.fromkeys(form.names, "") | dict(fields),
            problems,
            job and job.as_it_is(),
            other=None if current is job else current,
            token=self._token,
            asker=asker,
            address=form.address(fields),
            notice=notice or self._forgotten(form.address(fields)),
        )

    def _forgotten(self, address: str) -> str:
        """What became of an answer that was at an address once; '' if there was none."""
        if not self._jobs.has_forgotten(address):
            return ""
        return (
            f"This was answered, and the answer is no longer kept: the newest {KEPT} are, up "
            f"to {KEPT_BYTES >> 20} MiB. Send the form to have it worked on again."
        )


def _html(made: Made) -> web.Response:
    status, text = made
    return web.Response(text=text, status=status, content_type="text/html")
