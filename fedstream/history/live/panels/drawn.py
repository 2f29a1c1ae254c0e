"""Panels as HTML: readable without JavaScript and without style."""

from __future__ import annotations

from dataclasses import dataclass

from fedstream.broker.messages import OUTCOMES
from fedstream.history.charts import Chart
from fedstream.history.devices import DEVICE_COLUMNS
from fedstream.history.display import duration, failing
from fedstream.history.live.panels import curves, devices
from fedstream.history.live.panels.alarms import alarms
from fedstream.history.live.panels.flow import flow
from fedstream.history.live.panels.heat import staleness_over_time
from fedstream.history.live.panels.lanes import lanes
from fedstream.history.live.panels.stalled import stalled
from fedstream.history.live.scene import PHASES, Scene
from fedstream.history.ui.templating import rendered, shown_bytes
from fedstream.terminal import measure, spaced
from fedstream.trainer.goals import best_of, goal_of

_METRICS = 4  # in the headline
_PHASES = {name: name for name in PHASES} | {"triggered": "triggers", "uploading": "uploads"}
"""Phases by the names that their places have in the flow."""
_RECORDED = {key for key, _, _ in DEVICE_COLUMNS}  # by which a recorded run's devices sort


@dataclass(frozen=True)
class EndCount:
    """How many tasks ended one way."""

    outcome: str
    reason: str
    count: int
    share: float  # of all that ended


def headline_html(scene: Scene, *, away_s: float = 0.0) -> str:
    """Progress, why nothing moves, and the run in numbers."""
    tally = scene.tally
    version, versions = tally.head.version, tally.run.versions
    return rendered(
        "live/headline.html", standstill=stalled(scene, away_s=away_s), version=version,
        versions=versions, share=min(1.0, version / versions), pace=_pace(scene),
        facts=headline_facts(scene),
    )  # fmt: skip


def _pace(scene: Scene) -> str:
    tally, rates = scene.tally, scene.rates
    left = tally.run.versions - tally.head.version
    if tally.run.state == "finished":
        took = (tally.run.finished or tally.head.time) - tally.run.created
        return f"finished: {tally.run.why} · took {duration(max(0.0, took))}"
    if not rates.versions or left <= 0:
        return ""
    return f"{rates.versions:.3g} versions/s, {duration(left / rates.versions)} left"


def headline_facts(scene: Scene) -> list[tuple[str, str]]:
    """The run in numbers, as (name, value with its unit)."""
    tally, rates = scene.tally, scene.rates
    found: list[tuple[str, str]] = []
    names = list(dict.fromkeys(name for one in scene.measured for name in one.metrics))
    for name in names[:_METRICS]:
        points = [(one.metrics[name], one.version) for one in scene.measured if name in one.metrics]
        found.append((f"test {name.removeprefix('test_')}", _at(*points[-1])))
        if best := best_of(points, goal_of(name, tally.run.goal)):
            found.append((f"best {name.removeprefix('test_')}", _at(*best)))
    mean = tally.head.mean_staleness
    found.append(("staleness, recent mean", f"{mean:.2f} versions"))
    if rates.over_s:
        found.append(("updates used", f"{rates.used:.3g}/s"))
    limit = scene.memory.limit
    memory = shown_bytes(scene.memory.used) + (f" of {shown_bytes(limit)}" if limit else "")
    found += [
        ("open tasks", f"{tally.tasks:,}"),
        ("in the queue", f"{tally.backlog:,} of {scene.settings.scheduler.max_queue:,}"),
        ("trainers", f"{tally.trainers:,}"),
        ("devices", f"{tally.run.devices:,}"),
        ("Redis's memory", memory),
    ]
    if barred := len(tally.head.quarantines.by_device):
        found.append(("devices in quarantine", f"{barred:,}"))
    if tally.failing:
        found.append(("failing and resting", failing(tally.failing_devices)))
    return found


def _at(value: float, version: int) -> str:
    return f"{measure(value)} at {version:,}"


def flow_html(scene: Scene) -> str:
    """Where the tasks are, and the bottleneck."""
    return rendered("live/flow.html", flow=flow(scene))


def lanes_html(scene: Scene) -> str:
    """Who has which task."""
    return rendered("live/lanes.html", lanes=lanes(scene), phases=PHASES, names=_PHASES)


def metrics_html(scene: Scene) -> str:
    """Accuracy and loss over versions and over time."""
    return _charts_html(curves.of_metrics(scene), nothing="Nothing has been measured yet.")


def pace_html(scene: Scene) -> str:
    """Updates a second, queue and memory over time."""
    return _charts_html(
        curves.of_pace(scene),
        nothing="Curves begin some seconds after somebody has begun to look.",
    )


def weights_html(scene: Scene) -> str:
    """The weight function over the staleness histogram."""
    chart, rule = curves.of_weights(scene)
    return _charts_html([chart], notes=rule.notes)


def _charts_html(charts: list[Chart], *, nothing: str = "", notes: tuple[str, ...] = ()) -> str:
    return rendered("live/charts.html", charts=charts, nothing=nothing, notes=notes)


def staleness_html(scene: Scene) -> str:
    """The heat map of staleness over time."""
    rows = curves.used(scene)
    rows = rows[rows["staleness"] >= 0]
    heat = staleness_over_time(
        rows["time"], rows["staleness"], began=scene.tally.run.created, now=scene.now
    )
    return rendered("live/heat.html", heat=heat)


def outcomes_html(scene: Scene) -> str:
    """How all tasks of the run ended, the open ones too, and what ended none."""
    tally = scene.tally
    strays = sorted(tally.reasons("stray").items(), key=lambda one: -one[1])
    return rendered(
        "live/outcomes.html", issued=tally.issued, rows=end_counts(scene), strays=strays,
        dead=tally.dead,
    )  # fmt: skip


def end_counts(scene: Scene) -> list[EndCount]:
    """The tasks of the run by outcome and reason; together they are all that were ever begun."""
    tally = scene.tally
    found: list[tuple[str, str, int]] = []
    for outcome in OUTCOMES:
        reasons = tally.reasons(outcome)
        plain = tally.outcomes[outcome] - sum(reasons.values())
        rows = [(reason, n) for reason, n in reasons.items() if n]
        rows.sort(key=lambda one: -one[1])
        found += [(spaced(outcome), reason, n) for reason, n in rows]
        if plain > 0:
            found.append((spaced(outcome), "", plain))
    found.append(("open", "", tally.tasks))
    total = max(1, sum(n for _, _, n in found))
    return [EndCount(outcome, reason, n, n / total) for outcome, reason, n in found]


def alarms_html(scene: Scene) -> str:
    """Which alerts would fire."""
    found = alarms(scene)
    by_state = {
        name: [one for one in found if one.state in states]
        for name, states in (
            ("loud", ("firing", "pending")), ("quiet", ("quiet",)), ("unknown", ("unknown",)),
        )
    }  # fmt: skip
    return rendered("live/alarms.html", **by_state)


def devices_html(scene: Scene, sort: str = "") -> str:
    """The heat map of devices, by default with the oddest first. ``sort``: a column, or -column."""
    return rendered(
        "live/devices.html", heat=devices.device_heat(scene, sort), recorded=_RECORDED,
        pushes=scene.pushes,
    )  # fmt: skip


def device_html(scene: Scene, device: int) -> str:
    """What is known of one device."""
    heat = devices.device_heat(scene, "device", only=device)
    names = {key: f"{name}, {unit}" if unit else name for key, name, unit in devices.COLUMNS}
    return rendered(
        "live/device.html", device=device, line=heat.lines[0] if heat.lines else None, names=names,
        ends=heat.ends, charts=curves.of_device(scene, device), pushes=scene.pushes,
        tasks=[
            {"phase": one.phase, "lane": one.lane, "seconds": max(0.0, scene.now - one.phase_since)}
            for one in scene.tasks
            if one.device == device
        ],
    )  # fmt: skip
