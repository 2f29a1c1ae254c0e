"""The panels of the live page, as HTML that is readable without JavaScript."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite

import markupsafe
import numpy as np

from fedstream.core.messages import Event
from fedstream.history import charts
from fedstream.history.charts import Chart
from fedstream.history.devices import DeviceTable, devices_of
from fedstream.history.display import duration, failing
from fedstream.history.live.alarms import alarms
from fedstream.history.live.flow import flow
from fedstream.history.live.recent import is_measurement
from fedstream.history.live.snapshot import Snapshot
from fedstream.history.live.stalled import stalled
from fedstream.history.table import RowArray, is_used_row
from fedstream.history.ui.templating import rendered
from fedstream.runtime.text import escaped
from fedstream.terminal import counted, measure, number, spaced
from fedstream.trainer.goals import best_of, goal_of, ordered

SHOWN = 50  # devices in the table
_METRICS = 4  # in the headline
_DRAWN = 2  # charts of metrics
_TEXT = 300  # characters of an error that is shown


def headline_html(snapshot: Snapshot, *, away_s: float = 0.0) -> str:
    """Progress, the cause of a standstill, and the run in numbers."""
    tally = snapshot.tally
    version, versions = tally.head.version, tally.run.versions
    return rendered(
        "live/headline.html",
        standstill=stalled(snapshot, away_s=away_s),
        version=version,
        versions=versions,
        share=min(1.0, version / versions),
        pace=_pace(snapshot),
        facts=headline_facts(snapshot),
    )


def _pace(snapshot: Snapshot) -> str:
    tally, pace = snapshot.tally, snapshot.rate("version")
    left = tally.run.versions - tally.head.version
    if tally.run.state == "finished":
        took = (tally.run.finished or tally.head.time) - tally.run.created
        return f"finished: {tally.run.why} · took {duration(max(0.0, took))}"
    if not pace or left <= 0:
        return ""
    return f"{pace:.3g} versions/s, {duration(left / pace)} left"


def headline_facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """The run in numbers, as (name, value with its unit)."""
    tally = snapshot.tally
    found: list[tuple[str, str]] = []
    for name in _metrics(snapshot)[:_METRICS]:
        points = [
            (one.metrics[name], one.version) for one in snapshot.measured if name in one.metrics
        ]
        found.append((f"test {name.removeprefix('test_')}", _at(*points[-1])))
        if (kept := tally.best) and kept.metric == name:  # perhaps of an older measurement
            points.insert(0, (kept.value, kept.version))
        if best := best_of(points, goal_of(name, tally.run.goal)):
            found.append((f"best {name.removeprefix('test_')}", _at(*best)))
    found += [
        ("staleness, recent mean", f"{tally.head.mean_staleness:.2f} versions"),
        ("trainers", f"{tally.trainers:,}"),
        ("devices", f"{tally.run.devices:,}"),
    ]
    if (step := tally.head.step) is not None:
        found.append((step.key, str(step)))
    if barred := len(tally.head.quarantines.by_device):
        found.append(("devices in quarantine", f"{barred:,}"))
    if loss := tally.head.privacy:
        if isfinite(loss.epsilon):
            found.append((f"epsilon at delta {loss.delta:g}", f"{loss.epsilon:.3f}"))
        found.append(("sums opened", f"{loss.opened:,}"))
        if loss.dropped:
            found.append(("sums dropped", f"{loss.dropped:,}"))
        if loss.spent:
            found.append(("without privacy budget", counted(len(loss.spent), "device")))
    if tally.failing:
        found.append(("failing and resting", failing(tally.failing_devices)))
    return found


def _metrics(snapshot: Snapshot) -> tuple[str, ...]:
    """The measured metrics, the main one first."""
    run = snapshot.tally.run
    return ordered(
        (name for one in snapshot.measured for name in one.metrics), run.goal, run.stop_metric
    )


def _at(value: float, version: int) -> str:
    return f"{measure(value)} at {version:,}"


def flow_html(snapshot: Snapshot) -> str:
    """Numbers of tasks by stage, and the bottleneck."""
    return rendered("live/flow.html", flow=flow(snapshot))


def curves_html(snapshot: Snapshot) -> str:
    """The first metrics over versions and over time, and the training loss."""
    nothing = "Nothing has been measured yet."
    return rendered("live/charts.html", charts=curves_of(snapshot), nothing=nothing)


def curves_of(snapshot: Snapshot) -> list[Chart]:
    """The charts of :func:`curves_html`."""
    measured = snapshot.measured
    names = _metrics(snapshot)
    times = np.maximum.accumulate([one.seconds for one in measured]).tolist() if measured else []
    seconds = dict(zip([one.version for one in measured], times, strict=True))
    found = []
    for one in charts.of_metrics(measured, names)[:_DRAWN]:
        again = replace(one, name=f"{one.name}-time", title=f"{one.title} over time")
        found += [one, *charts.over_time([again], "seconds", lambda at: [seconds[v] for v in at])]
    return [*found, *charts.of_updates(_used(snapshot), "loss")]


def staleness_html(snapshot: Snapshot) -> str:
    """Charts of the updates' staleness, and of their weights by staleness."""
    found = charts.of_updates(_used(snapshot), "staleness", "lateness")
    return rendered("live/charts.html", charts=found, nothing="No update has been used yet.")


def _used(snapshot: Snapshot) -> RowArray:
    """The newest used updates, ordered by version."""
    rows = snapshot.ended[is_used_row(snapshot.ended) & (snapshot.ended["staleness"] >= 0)]
    found: RowArray = rows[np.argsort(rows["version"], kind="stable")]
    return found


def alarms_html(snapshot: Snapshot) -> str:
    """The alerts by state."""
    found = alarms(snapshot)
    loud = [one for one in found if one.state != "quiet"]
    quiet = [one for one in found if one.state == "quiet"]
    return rendered("live/alarms.html", loud=loud, quiet=quiet)


def device_table(snapshot: Snapshot) -> DeviceTable:
    """The devices' figures over the newest ended tasks in the snapshot."""
    return devices_of(snapshot.ended, now=snapshot.now)


def devices_html(snapshot: Snapshot) -> str:
    """The devices' table, most outliers first."""
    table = device_table(snapshot)
    return rendered(
        "live/devices.html",
        table=table,
        rows=table.rows("", most=SHOWN),
        is_recorded=snapshot.is_recorded,
        suspects=sorted(snapshot.suspects.items(), key=lambda one: (-one[1], one[0]))[:SHOWN],
        ends=len(snapshot.ended),
    )


def events_html(snapshot: Snapshot) -> str:
    """The newest events, newest first."""
    return rendered("live/events.html", events=[event_line(one) for one in reversed(snapshot.told)])


def event_line(event: Event) -> tuple[float, str, str]:
    """An event's time, its kind, and its text."""
    if is_measurement(event):
        said = [f"{name} {measure(value)}" for name, value in (event.metrics or {}).items()]
        if event.what == "devices_evaluated":
            said.insert(0, event.text or "")
        return event.time, "measured", f"version {event.version}: {', '.join(said)}"
    words = [
        f"{name} {number(value)}"
        for name, value in (("device", event.device), ("version", event.version))
        if value is not None
    ]
    if event.outcome is None:
        text = (event.text or "").strip().rpartition("\n")[2][:_TEXT]
        words = [event.service, *words, spaced(event.reason or ""), text]
    else:
        if event.reason:
            words.append(f"because {spaced(event.reason)}")
        if event.staleness is not None:
            words.append(f"staleness {event.staleness}")
        if event.weight is not None:
            words.append(f"weight {number(event.weight, 3)}")
    return event.time, spaced(event.outcome or event.what), " · ".join(filter(None, words))


@dataclass(frozen=True)
class LivePanel:
    """A part of the live page, sent again whenever it has changed."""

    name: str  # an identifier
    title: str
    html: Callable[[Snapshot], str]  # escaped


PANELS = (
    LivePanel("flow", "Where the tasks are", flow_html),
    LivePanel("curves", "Accuracy and loss", curves_html),
    LivePanel("staleness", "Staleness", staleness_html),
    LivePanel("alarms", "Alerts", alarms_html),
    LivePanel("devices", "Devices", devices_html),
    LivePanel("events", "Newest events", events_html),
)
"""In the order in which they are shown."""


def parts_of(snapshot: Snapshot) -> dict[str, str]:
    """All parts of the page that change, as HTML by name."""
    run = snapshot.tally.run
    state = f"{run.state}: {run.why}" if run.why else run.state
    return {
        "state": str(markupsafe.escape(escaped(state))),
        "headline": headline_html(snapshot),
        **{panel.name: panel.html(snapshot) for panel in PANELS},
    }
