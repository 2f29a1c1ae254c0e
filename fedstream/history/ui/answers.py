"""The pages of what takes a replay to answer: a form, how far the work is, and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedstream.history.bisect import Search
from fedstream.history.charts import Chart, Curve, finite
from fedstream.history.devices import devices_of
from fedstream.history.model_stats import MeasuredShares
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.ui.jobs import PageJob
from fedstream.history.ui.pages import page
from fedstream.history.ui.questions import Bisection, Problems, keys_in

if TYPE_CHECKING:
    from fedstream.history.replay import ReplayResult


def bisection(
    run: RecordedRun,
    fields: Mapping[str, str],
    problems: Problems,
    job: PageJob | None,
    *,
    other: PageJob | None,
    **about: str,
) -> str:
    """The page of a bisection. ``other``: what is being worked on instead.

    ``about``: the form's token, its address, and who may send it.
    """
    said, crossing = "", None
    if job is not None and isinstance(job.answer, Search) and isinstance(job.question, Bisection):
        said = job.answer.in_words(job.question.metric, job.question.limit)
        crossing = job.answer.crossing
    return page(
        run,
        "bisect.html",
        "Bisect",
        "Bisect",
        fields=fields,
        problems=problems,
        job=job,
        other_job=other,
        **about,
        metrics=run.metrics,
        said=said,
        crossing=crossing,
        charts=[] if job is None else measured(job),
    )


def other_rule(
    run: RecordedRun,
    fields: Mapping[str, str],
    problems: Problems,
    job: PageJob | None,
    *,
    other: PageJob | None,
    **about: str,
) -> str:
    """The page of another rule. ``other``: what is being worked on instead.

    ``about``: the form's token, its address, and who may send it.
    """
    from fedstream.strategies import FUNCTIONS, RULES

    said: list[str] = []
    error, rows = None, []
    replayed = None if job is None else _replayed(job)
    if job is not None and replayed is not None:
        from fedstream.history.replay import in_words

        said, error = in_words(replayed), replayed.error
        rows = beside_each_other(job)
    recorded = keys_in(run.past.head.strategy)
    return page(
        run,
        "what_if.html",
        "What if",
        "What if",
        fields=fields,
        problems=problems,
        job=job,
        other_job=other,
        **about,
        recorded=recorded,
        rules=RULES.names(),
        functions=FUNCTIONS.names(),
        said=said,
        error=error,
        rows=rows,
        charts=[] if job is None else laid_over(job),
    )


def distances(
    run: RecordedRun,
    fields: Mapping[str, str],
    problems: Problems,
    job: PageJob | None,
    *,
    other: PageJob | None,
    **about: str,
) -> str:
    """The page of all devices' distances and cosines. ``other``: what is worked on instead.

    ``about``: the form's token, its address, and who may send it.
    """
    answer, table = None if job is None else job.answer, None
    if isinstance(answer, MeasuredShares):  # all figures are of one version, though the run goes on
        columns = run.columns.until(answer.until) if run.columns.has(answer.until) else run.columns
        table = devices_of(columns.updates, shares=answer.by_device)
    return page(
        run,
        "distances.html",
        "Distances",
        "Devices",
        fields=fields,
        problems=problems,
        job=job,
        other_job=other,
        **about,
        table=table,
        devices=[] if table is None else table.rows(),
    )


def measured(job: PageJob) -> list[Chart]:
    """What a bisection has measured so far, and the limit."""
    question, values = job.question, job.measured
    if not isinstance(question, Bisection) or not values:
        return []
    x = sorted(values)
    series = [
        Curve(question.metric, [finite(values[at]) for at in x]),
        Curve("limit", [question.limit.value] * len(x)),
    ]
    return [Chart("bisect", f"{question.metric}, as measured", "version", [*map(float, x)], series)]


def _replayed(job: PageJob) -> ReplayResult | None:
    answer = job.answer
    return None if answer is None or isinstance(answer, Search | MeasuredShares) else answer


def laid_over(job: PageJob) -> list[Chart]:
    """Each metric by both rules, and how far the models are from each other."""
    answer = _replayed(job)
    if answer is None:
        return []
    points = [point for point in answer.points if point.changed is not None]
    names = dict.fromkeys(name for point in points for name in point.original)
    x = [float(point.version) for point in points]
    found = [
        Chart(
            f"what-if-{number}",
            f"Test {name}",
            "version, as recorded",
            x,
            [
                Curve("original", [finite(point.original.get(name)) for point in points]),
                Curve("changed", [finite((point.changed or {}).get(name)) for point in points]),
            ],
        )
        for number, name in enumerate(names)
    ]
    if points:
        apart = [finite(point.distance) for point in points]
        title = "How far the two models are from each other"
        found.append(
            Chart("what-if-apart", title, "version, as recorded", x, [Curve("distance", apart)])
        )
    return found


def beside_each_other(job: PageJob) -> list[dict[str, Any]]:
    """The last measurement by both rules: (metric, original, changed, difference)."""
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
