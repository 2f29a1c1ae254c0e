"""Forms of questions that take a replay to answer: their routes, and pages with the answers.

Only POST starts or cancels work, with a token that the form has: a page of another server can send
a form to this one, but cannot read the token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hmac import compare_digest
from secrets import token_urlsafe
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import urlencode

from aiohttp import web

from fedstream.history.bisect import Search
from fedstream.history.charts import Chart, Curve, finite
from fedstream.history.devices import devices_of
from fedstream.history.model_stats import MeasuredShares
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui import questions
from fedstream.history.ui.http import Permission, form_of
from fedstream.history.ui.jobs import Occupied, PageJob, PageJobs
from fedstream.history.ui.pages import page
from fedstream.history.ui.questions import Bisection, Fields, Problems, Question, keys_in

if TYPE_CHECKING:
    from fedstream.history.replay import ReplayResult

PageAndStatus: TypeAlias = tuple[int, str]
WithRun: TypeAlias = Callable[..., Awaitable[PageAndStatus]]
"""Calls a function with the run after reading its news; with ``anew=False``, without reading."""

_FORM = 1 << 16  # bytes
_STALE = (
    "Not started: this form is not from here, or the server was started again since. Look at what "
    "it asks, and send it once more."
)


# pages


@dataclass(frozen=True)
class FormState:
    """A form, and the work that it started. Templates read the fields by name."""

    fields: Mapping[str, str]  # as they were filled in
    problems: Problems  # of fields, by name
    job: PageJob | None  # that answers this form
    other_job: PageJob | None  # under way instead, for another form
    token: str  # that the form must send
    permission: Permission
    address: str  # of the page that shows the answer
    notice: str  # why there is only the form; '' if the form says enough


def bisection_page(run: RecordedRun, form: FormState) -> str:
    """The page of a bisection."""
    job, found, crossing = form.job, "", None
    if job is not None and isinstance(job.answer, Search) and isinstance(job.question, Bisection):
        found = job.answer.in_words(job.question.metric, job.question.limit)
        crossing = job.answer.crossing
    return page(
        run,
        "bisect.html",
        "Bisect",
        "Bisect",
        **vars(form),
        metrics=run.metrics,
        said=found,
        crossing=crossing,
        charts=[] if job is None else bisection_charts(job),
    )


def what_if_page(run: RecordedRun, form: FormState) -> str:
    """The page of a replay by another rule."""
    from fedstream.history.replay import in_words
    from fedstream.strategies import FUNCTIONS, RULES

    replayed = _replayed(form.job)
    return page(
        run,
        "what_if.html",
        "What if",
        "What if",
        **vars(form),
        recorded=keys_in(run.models.head.strategy),
        rules=RULES.names(),
        functions=FUNCTIONS.names(),
        said=[] if replayed is None else in_words(replayed),
        error=None if replayed is None else replayed.error,
        rows=last_measurements(form.job),
        charts=what_if_charts(form.job),
    )


def distances_page(run: RecordedRun, form: FormState) -> str:
    """The page of all devices' distances and cosines."""
    answer, table = None if form.job is None else form.job.answer, None
    if isinstance(answer, MeasuredShares):  # all figures are of one version, though the run goes on
        columns = run.columns.until(answer.until) if run.columns.has(answer.until) else run.columns
        table = devices_of(columns.updates, shares=answer.by_device)
    return page(
        run,
        "distances.html",
        "Distances",
        "Devices",
        **vars(form),
        table=table,
        devices=[] if table is None else table.rows(),
    )


def bisection_charts(job: PageJob) -> list[Chart]:
    """The values that a bisection has measured so far, and the limit."""
    question, values = job.question, job.measured
    if not isinstance(question, Bisection) or not values:
        return []
    x = sorted(values)
    series = [
        Curve(question.metric, [finite(values[at]) for at in x]),
        Curve("limit", [question.limit.value] * len(x)),
    ]
    return [Chart("bisect", f"{question.metric}, as measured", "version", [*map(float, x)], series)]


def _replayed(job: PageJob | None) -> ReplayResult | None:
    answer = None if job is None else job.answer
    return None if answer is None or isinstance(answer, Search | MeasuredShares) else answer


def what_if_charts(job: PageJob | None) -> list[Chart]:
    """Each metric by both rules, and the distance between the two models."""
    answer = _replayed(job)
    points = [point for point in answer.points if point.changed is not None] if answer else []
    if not points:
        return []
    names = dict.fromkeys(name for point in points for name in point.original)
    x = [float(point.version) for point in points]
    drawn = [
        (
            f"Test {name}",
            [
                Curve("original", [finite(point.original.get(name)) for point in points]),
                Curve("changed", [finite((point.changed or {}).get(name)) for point in points]),
            ],
        )
        for name in names
    ]
    apart = [Curve("distance", [finite(point.distance) for point in points])]
    return [
        *(
            Chart(f"what-if-{number}", title, "version, as recorded", x, curves)
            for number, (title, curves) in enumerate(drawn)
        ),
        Chart(
            "what-if-apart",
            "How far the two models are from each other",
            "version, as recorded",
            x,
            apart,
        ),
    ]


def last_measurements(job: PageJob | None) -> list[dict[str, Any]]:
    """The last measurement by both rules: metric, original, changed, difference."""
    answer = _replayed(job)
    if answer is None or not answer.points:
        return []
    last = answer.points[-1]
    changed = last.changed or {}
    return [
        {"name": name, "original": value, "changed": changed[name], "more": changed[name] - value}
        for name, value in last.original.items()
        if name in changed
    ]


# routes


@dataclass(frozen=True)
class QuestionForm:
    """One kind of question."""

    path: str
    names: tuple[str, ...]  # of the form's fields
    first: Callable[[RecordedRun], dict[str, str]]  # the fields of a form to begin with
    read: Callable[[Fields, RecordedRun], tuple[Question | None, Problems]]
    page: Callable[[RecordedRun, FormState], str]

    def fields(self, sent: Mapping[str, object]) -> Fields:
        """The fields that were filled in."""
        texts = [(name, sent.get(name)) for name in self.names]
        return {
            name: text.strip() for name, text in texts if isinstance(text, str) and text.strip()
        }

    def address(self, fields: Fields) -> str:
        """The address of the page that shows a question and its answer."""
        return f"{self.path}?{urlencode(fields)}"


FORMS = (
    QuestionForm(
        "/bisect",
        questions.BISECTION,
        questions.first_bisection,
        questions.bisection,
        bisection_page,
    ),
    QuestionForm(
        "/what-if",
        questions.OTHER_RULE,
        lambda _run: {},
        questions.other_rule,
        what_if_page,
    ),
    QuestionForm(
        "/distances", questions.DISTANCES, lambda _run: {}, questions.distances, distances_page
    ),
)


class QuestionRoutes:
    """The routes of all forms.

    ``permission``: the right of a request's sender to start work. Pages offer work accordingly, and
    the server checks the right again before it starts work.
    """

    def __init__(
        self, jobs: PageJobs, with_run: WithRun, permission: Callable[[web.Request], Permission]
    ) -> None:
        self._jobs = jobs
        self._with_run = with_run
        self._permission = permission
        self._token = token_urlsafe(24)

    def routes(self) -> list[web.RouteDef]:
        """A GET and a POST route for each form."""
        return [
            route
            for form in FORMS
            for route in (
                web.get(form.path, self._get(form)),
                web.post(form.path, self._post(form)),
            )
        ]

    def _get(self, form: QuestionForm) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def get(request: web.Request) -> web.Response:
            fields, permission = form.fields(request.query), self._permission(request)
            # A page asks often for a job's progress: that alone is no reason to read the journal.
            anew = self._jobs.at(form.address(fields)) is None
            return _html(
                await self._with_run(
                    lambda run: (200, self._first_page(run, form, fields, permission)), anew=anew
                )
            )

        return get

    def _post(self, form: QuestionForm) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def post(request: web.Request) -> web.Response:
            sent = await form_of(request, _FORM)
            fields, token = form.fields(sent), sent.get("token", "")
            if not compare_digest(token.encode(), self._token.encode()):
                return _html(
                    await self._with_run(
                        lambda run: (403, self._page(run, form, fields, notice=_STALE))
                    )
                )
            if sent.get("do") == "cancel":
                job = self._jobs.at(form.address(fields))
                if job is not None:
                    job.cancel()
                raise web.HTTPSeeOther(form.address(fields))
            return _html(await self._with_run(lambda run: self._begin(run, form, fields)))

        return post

    def _begin(self, run: RecordedRun, form: QuestionForm, fields: Fields) -> PageAndStatus:
        """Start a form's work. Raises HTTPSeeOther with the address of its page."""
        if run.is_live and "until" not in fields:  # the run goes on: fix the last version now
            fields = {**fields, "until": str(run.newest)}
        question, problems = form.read(fields, run)
        if question is None:
            return 422, self._page(run, form, fields, problems)
        try:
            self._jobs.begin(question, form.address(fields))
        except Occupied:
            return 409, self._page(run, form, fields)
        raise web.HTTPSeeOther(form.address(fields))

    def _first_page(
        self, run: RecordedRun, form: QuestionForm, fields: Fields, permission: Permission
    ) -> str:
        if not fields:
            return self._page(run, form, form.first(run), permission=permission)
        known = self._jobs.at(form.address(fields)) is not None
        problems = {} if known else form.read(fields, run)[1]
        return self._page(run, form, fields, problems, permission=permission)

    def _page(
        self,
        run: RecordedRun,
        form: QuestionForm,
        fields: Fields,
        problems: Problems | None = None,
        *,
        notice: str = "",
        permission: Permission = "may",
    ) -> str:
        address, current = form.address(fields), self._jobs.current
        job = self._jobs.at(address)
        state = FormState(
            fields=dict.fromkeys(form.names, "") | dict(fields),
            problems=problems or {},
            job=job and job.as_it_is(),
            other_job=None if current is job else current,
            token=self._token,
            permission=permission,
            address=address,
            notice=notice,
        )
        return form.page(run, state)


def _html(made: PageAndStatus) -> web.Response:
    status, text = made
    return web.Response(text=text, status=status, content_type="text/html")
