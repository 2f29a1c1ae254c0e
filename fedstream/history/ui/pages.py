"""The pages of a recorded run, as HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any
from urllib.parse import urlencode

import numpy as np

from fedstream.core.errors import FedstreamError
from fedstream.core.messages import OUTCOMES
from fedstream.history import charts
from fedstream.history.devices import DEVICE_COLUMNS, DeviceRow, DeviceTable, devices_of
from fedstream.history.model_stats import LayerGap, Push, VersionStats
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.table import different, each
from fedstream.history.ui import templating
from fedstream.history.ui.questions import rule_of, worsening
from fedstream.history.ui.templating import (
    LACKING,
    cell_of,
    moment,
    rendered,
    shown_bytes,
    shown_count,
    shown_number,
    shown_seconds,
)
from fedstream.journal import JournalError
from fedstream.terminal import measure
from fedstream.trainer.goals import best_of

PAGE = 100  # updates on a page
LABELS = {key: f"{name} ({unit})" if unit else name for key, name, unit in DEVICE_COLUMNS}


class NotThere(FedstreamError):
    """The run has no item of that name or number."""


@dataclass(frozen=True)
class Selection:
    """A filter of updates; None: any."""

    device: int | None = None
    outcome: str | None = None
    reason: str | None = None
    first: int | None = None  # version
    last: int | None = None

    def query(self, page: int) -> str:
        """The filter as an address's query, with a page's number."""
        asked = {
            "device": self.device,
            "outcome": self.outcome,
            "reason": self.reason,
            "from": self.first,
            "until": self.last,
            "page": page or None,
        }
        return urlencode({name: value for name, value in asked.items() if value is not None})


# pages


def prepare() -> None:
    """Compile the templates of the first page, which takes some 20 ms each."""
    for name in ("overview.html", "base.html", "parts.html"):
        templating.templates().get_template(name)


def overview(run: RecordedRun, window: charts.Window = charts.WHOLE) -> str:
    """Curves over versions or time, staleness, outcomes."""
    return page(
        run,
        "overview.html",
        "Overview",
        "Overview",
        window=window,
        facts=facts(run),
        charts=charts.of_run(run, window),
        outcomes=outcomes(run),
        it=worsening(run),
    )


def devices(run: RecordedRun, sort: str) -> str:
    """The table of devices. ``sort``: a column, with - before it to descend. Raises NotThere."""
    table = devices_of(run.columns.updates, shares=run.shares)
    return page(
        run,
        "devices.html",
        "Devices",
        "Devices",
        measured_shares=run.measured_shares(),
        table=table,
        devices=sorted_devices(table, sort),
        sort=sort,
    )


def device(run: RecordedRun, wanted: int, window: charts.Window = charts.WHOLE) -> str:
    """One device's part and drift. Raises NotThere."""
    table = devices_of(run.columns.updates, shares=run.shares)
    if not (found := table.rows(only=wanted)):
        raise NotThere(f"device {wanted} sent no update that the journal has")
    (row,) = found
    return page(
        run,
        "device.html",
        f"Device {wanted}",
        "Devices",
        measured_shares=run.measured_shares(),
        device=row,
        labels=LABELS,
        facts=facts_of_device(table, row),
        window=window,
        charts=charts.of_device(run, wanted, window),
    )


def updates(
    run: RecordedRun,
    wanted: Selection,
    part: int,
    fields: Mapping[str, str],
    problems: Mapping[str, str],
) -> str:
    """The page ``part`` (from 0) of the updates that the filter selects.

    ``fields``: the form's fields as filled in; ``problems``: errors in fields, with which no update
    is shown.
    """
    columns = run.columns
    rows = columns.updates
    known = {
        "outcomes": [name for n, name in enumerate(OUTCOMES) if (rows["outcome"] == n).any()],
        "reasons": sorted(name for name in columns.reasons if name),
    }
    found = np.flatnonzero(_matching(run, wanted) & (not problems))
    begin = part * PAGE
    places = found[begin : begin + PAGE]
    return page(
        run,
        "updates.html",
        "Updates",
        "Updates",
        wanted=wanted,
        known=known,
        total=len(found),
        fields={name: fields.get(name, "") for name in ("device", "from", "until")},
        problems=problems,
        begin=begin,
        rows=shown(run, places),
        before=f"/updates?{wanted.query(part - 1)}" if part else "",
        after=f"/updates?{wanted.query(part + 1)}" if begin + PAGE < len(found) else "",
    )


def version(
    run: RecordedRun,
    wanted: int,
    to: int | None,
    *,
    models: bool,
    is_waiting: Callable[[], bool],
    fields: Mapping[str, str],
    problems: Mapping[str, str],
) -> str:
    """A version: its metrics, its updates, and figures of its model.

    ``to``: another version to compare it with. ``models``: rebuild models if need be;
    ``is_waiting``: whether a client still waits for that. ``fields``: the form's wrong fields, as
    filled in; ``problems``: the errors in them. Raises NotThere, Unwanted.
    """
    columns = run.columns
    if problem := missing(run, wanted):
        raise NotThere(problem)
    place = int(np.searchsorted(columns.numbers, wanted))
    before, after = (
        int(columns.numbers[at]) if 0 <= at < len(columns.numbers) else None
        for at in (place - 1, place + 1)
    )
    return page(
        run,
        "version.html",
        f"Version {wanted}",
        "Versions",
        query="" if to is None else f"?to={to}",
        before=before,
        after=after,
        problems=problems,
        fields={"number": wanted, "to": "" if to is None else to} | dict(fields),
        view=view(run, wanted, to, models=models, is_waiting=is_waiting),
    )


def missing(run: RecordedRun, version: int) -> str:
    """An error for a version that the journal lacks; '' if the journal has it."""
    if run.columns.has(version):
        return ""
    return (
        f"version {version} is not in the journal, which has {run.oldest} to {run.newest}: the "
        f"nearest is {run.columns.nearest(version)}"
    )


def beside(run: RecordedRun, window: charts.Window = charts.WHOLE) -> str:
    """Both runs side by side, and their first difference. Raises NotThere without another run."""
    other = run.other
    if other is None:
        raise NotThere("no other run: give its folder too, as in fedstream ui RUN OTHER")
    views: list[VersionView | None] = [None, None]
    try:
        found = run.divergence
        told = "" if found is None else found.text
        at = None if found is None else found.version
        if at is not None:
            views = [
                view(one, at, None, models=False, is_waiting=lambda: True)
                if one.columns.has(at)
                else None
                for one in (run, other)
            ]
    except JournalError as error:  # nothing in common, or a part that cannot be read
        at, told = None, str(error)
    a, b = dict(facts(run)), dict(facts(other))
    rows = [(name, a.get(name, LACKING), b.get(name, LACKING)) for name in {**a, **b}]
    return page(
        run,
        "beside.html",
        "Beside another",
        "Beside",
        names=(run.path, other.path),
        told=told,
        at=at,
        views=views,
        rows=rows,
        charts=charts.of_both(run, other, window),
        window=window,
        rule=rule_of(run, other),
    )


def error(run: RecordedRun, title: str, text: str) -> str:
    """A page that shows an error."""
    return page(run, "error.html", title, "", text=text)


# what they show


@dataclass(frozen=True)
class VersionView:
    """Values of a version's page; figures of its model are None until computed."""

    number: int
    to: int | None  # the version that it is compared with
    facts: list[tuple[str, str]]
    begins: bool  # no update made it
    used: list[dict[str, Any]]  # the updates that made it
    others: list[dict[str, Any]]  # decided since the version before, but not in this one
    stats: VersionStats | None
    pushes: dict[int, Push] | None
    gaps: dict[str, LayerGap]
    problem: str  # why the model's figures are missing


def view(
    run: RecordedRun, wanted: int, to: int | None, *, models: bool, is_waiting: Callable[[], bool]
) -> VersionView:
    """A version that the journal has, with arguments as for :func:`version`. Raises Unwanted."""
    columns = run.columns
    stats, gaps, problem = run.version_stats.known(wanted), {}, ""
    try:
        if models:
            stats = run.version_stats.of(wanted, is_waiting)
        if stats is not None and to is not None:
            gaps = {one.name: one for one in run.version_stats.gap(wanted, to, is_waiting)}
    except FedstreamError as error:  # without weights, or the rule that made it may not be loaded
        problem = f"No models: {error}"
    begin, end = columns.since_previous(wanted)
    outside = columns.contained[begin:end] != wanted
    used = shown(run, np.flatnonzero(columns.contained == wanted))
    pushes = None if stats is None else {push.offset: push for push in stats.pushes}
    for row in used:
        if pushes and row["offset"] in pushes and not isfinite(row["norm"]):
            row["norm"] = pushes[row["offset"]].distance  # the updater did not measure it
    return VersionView(
        wanted,
        to,
        _facts_of(run, wanted),
        bool(columns.row(wanted)["begins"]),
        used,
        shown(run, np.arange(begin, end)[outside]),
        stats,
        pushes,
        gaps,
        problem,
    )


def facts(run: RecordedRun) -> list[tuple[str, str]]:
    """The run in numbers, as (name, value with its unit)."""
    columns = run.columns
    used = int(columns.used.sum())
    late = columns.updates["staleness"][columns.used]
    seconds = float(columns.made["time"][-1] - columns.made["time"][0])
    found = [("versions", f"{shown_count(run.oldest)} to {shown_count(run.newest)}")]
    for name in run.metrics[:3]:
        values = [(one.metrics[name], one.version) for one in run.measured if name in one.metrics]
        found.append((f"{name}, at the end", f"{measure(values[-1][0])} at {values[-1][1]}"))
        if best := best_of(values, run.goal_of(name)):
            found.append((f"{name}, best", f"{measure(best[0])} at {best[1]}"))
    found += [
        ("updates used", shown_count(used)),
        ("updates not used", shown_count(len(columns.updates) - used)),
        ("staleness", f"{late.mean():.2f} mean, {int(late.max()):,} most" if used else ""),
        ("devices that took part", shown_count(len(different(columns.updates["device"])))),
        ("received", shown_bytes(int(columns.updates["bytes"].sum()))),
        ("virtual time" if run.is_simulated else "time", shown_seconds(seconds)),
    ]
    if seconds > 0:
        found.append(("pace", f"{shown_number(used / seconds)} updates/s"))
    return found


def _facts_of(run: RecordedRun, wanted: int) -> list[tuple[str, str]]:
    row = run.columns.row(wanted)
    seconds = run.seconds(float(row["time"]))
    found = [("made", f"{shown_seconds(seconds)} after the beginning")]
    if not run.is_simulated:
        found.append(("at", moment(float(row["time"]))))
    if measured := run.measured_at(wanted):
        when, at = "", ""
        if measured.version != wanted:  # the model of this version may be quite another
            when, at = ", last measured", f" at version {measured.version}"
        for name, value in measured.metrics.items():
            found.append((f"test {name.removeprefix('test_')}{when}", f"{measure(value)}{at}"))
    found.append(("digest", run.digest(wanted)[:16]))
    return found


def outcomes(run: RecordedRun) -> list[dict[str, Any]]:
    """The number of updates by outcome and reason, most first."""
    rows, names = run.columns.updates, run.columns.reasons
    both = rows["outcome"].astype(np.int64) * len(names) + rows["reason"]
    found, counts = np.unique(both, return_counts=True)
    return [
        {
            "outcome": OUTCOMES[which // len(names)],
            "reason": names[which % len(names)],
            "updates": count,
            "share": count / len(rows),
        }
        for count, which in sorted(zip(counts.tolist(), found.tolist(), strict=True), reverse=True)
    ]


def shown(run: RecordedRun, places: Any) -> list[dict[str, Any]]:
    """Updates as rows of a table; ``places``: the updates' numbers."""
    columns = run.columns
    return [
        row
        | {
            "outcome": OUTCOMES[row["outcome"]],
            "reason": columns.reasons[row["reason"]],
            "contained": int(columns.contained[place]),
        }
        for place, row in zip(places.tolist(), each(columns.updates[places]), strict=True)
    ]


def facts_of_device(table: DeviceTable, row: DeviceRow) -> list[tuple[str, str]]:
    """A device's figures, as (name with unit, value)."""
    return [(LABELS[key], cell_of(row.figures[key], key)) for key, _, _ in table.columns[1:]]


def sorted_devices(table: DeviceTable, sort: str) -> list[DeviceRow]:
    """The devices by a column; those without a value come last. Raises NotThere."""
    key = sort.removeprefix("-")
    if key and key not in LABELS:
        raise NotThere(f"devices have no column {key!r}")
    return table.rows(sort if key in table.figures or key == "device" else "device")


def _matching(run: RecordedRun, wanted: Selection) -> Any:
    columns, rows = run.columns, run.columns.updates
    found = np.ones(len(rows), bool)
    if wanted.device is not None:
        found &= rows["device"] == wanted.device
    if wanted.outcome is not None:
        found &= rows["outcome"] == _number_in(OUTCOMES, wanted.outcome, "outcome")
    if wanted.reason is not None:
        found &= rows["reason"] == _number_in(columns.reasons, wanted.reason, "reason")
    if wanted.first is not None:
        found &= rows["version"] >= wanted.first
    if wanted.last is not None:
        found &= rows["version"] <= wanted.last
    return found


def _number_in(names: Sequence[str], name: str, what: str) -> int:
    if name not in names:
        raise NotThere(f"no update has the {what} {name!r}")
    return names.index(name)


# templates


def page(run: RecordedRun, template: str, title: str, here: str, **about: Any) -> str:
    """A page of a template. ``here``: the current item of the navigation."""
    head = run.models.head
    state, why = run.state
    return rendered(
        template,
        title=title,
        here=here,
        run={
            "name": head.run,
            "task": head.task,
            "strategy": head.strategy.get("name"),
            "masked": head.masked,
            "state": state,
            "why": why,
            "oldest": run.oldest,
            "newest": run.newest,
            "damage": run.columns.damage,
            "path": run.path,
            "other": run.other is not None,
            "live": run.is_live,
        },
        **about,
    )
