"""What a scene knows over versions and over time, as charts."""

from __future__ import annotations

from collections import Counter
from math import isfinite

import numpy as np

from fedstream.broker.messages import OUTCOMES
from fedstream.history.charts import Chart, Curve
from fedstream.history.curves import bars
from fedstream.history.live.panels.heat import slice_of
from fedstream.history.live.panels.weights import WeightRule, weight_rule
from fedstream.history.live.scene import Scene, SceneRows

_POINTS = 400  # of a curve: a panel is narrower than a screen, and drawn every second
_METRICS = 2  # with charts of their own; all are in the header's numbers
_LEAST = 10  # versions late that the weight function is drawn for, at least
_SAMPLES = 100  # of a device, until one has said how many it has
_MIB = 1 << 20
_USED = [OUTCOMES.index(name) for name in ("applied", "buffered")]


def used(scene: Scene) -> SceneRows:
    """The newest updates that went into a version."""
    return scene.ended[np.isin(scene.ended["outcome"], _USED)]


def of_metrics(scene: Scene) -> list[Chart]:
    """Each metric over versions and over time."""
    began = scene.tally.run.created
    found = []
    names = list(dict.fromkeys(name for one in scene.measured for name in one.metrics))
    for name in names[:_METRICS]:
        points = [one for one in scene.measured if name in one.metrics]
        points = [points[at] for at in _spread(len(points))]
        label = name.removeprefix("test_")
        values = [_finite(one.metrics[name]) for one in points]
        for axis, unit, x in (
            ("versions", "version", [float(one.version) for one in points]),
            ("time", "seconds", [max(0.0, one.time - began) for one in points]),
        ):
            title = f"Test {label} over {axis}"
            found.append(
                Chart(f"{label}-{axis}", title, unit, *_ascending(x, label, values), versions=False)
            )
    return found


def _ascending(
    x: list[float], label: str, values: list[float | None]
) -> tuple[list[float], list[Curve]]:
    """A curve whose x values ascend, as charts need them: clocks may step back."""
    order = sorted(range(len(x)), key=lambda at: x[at])
    return [x[at] for at in order], [Curve(label, [values[at] for at in order])]


def of_pace(scene: Scene) -> list[Chart]:
    """Updates a second, open tasks and queue, and Redis's memory, over time."""
    found = [_updates_a_second(scene)]
    rows = scene.gauged[_spread(len(scene.gauged))]
    x = _seconds(rows["time"], scene)
    for name, title, series in (
        (
            "in-flight", "Tasks over time",
            [Curve("open", _floats(rows["open"])), Curve("in the queue", _floats(rows["queue"]))],
        ),
        ("memory", "Redis's memory over time", [Curve("MiB", _floats(rows["memory"] / _MIB))]),
    ):  # fmt: skip
        found.append(Chart(name, title, "seconds", x, series, versions=False))
    return [one for one in found if len(one.x) > 1]


def _updates_a_second(scene: Scene) -> Chart:
    """In slices of time; the newest is left out until it is over."""
    made, began = scene.made, scene.tally.run.created
    title = "Updates a second"
    if len(made) < 2:
        return Chart("pace", title, "seconds", [], [Curve("updates/s", [])], versions=False)
    first, end = max(0.0, float(made["time"][0]) - began), max(0.0, scene.now - began)
    width = slice_of((end - first) / 4)  # finer than a heat map's
    begins = np.arange(first // width, end // width)
    places = ((made["time"] - began) // width - first // width).clip(min=0).astype(int)
    sums = np.bincount(places, made["updates"], len(begins) + 1)[: len(begins)]
    x = [float(one) for one in begins * width]
    return Chart(
        "pace", title, "seconds", x, [Curve("updates/s", _floats(sums / width))], versions=False
    )


def of_weights(scene: Scene) -> tuple[Chart, WeightRule]:
    """Staleness of the newest updates, what they were given, and what the rule gives now."""
    rows = used(scene)
    rows = rows[rows["staleness"] >= 0]
    late = Counter(rows["staleness"].tolist())
    known = rows["samples"][rows["samples"] > 0]
    samples = int(np.median(known)) if len(known) else _SAMPLES
    run = scene.tally.run
    begins, heights, width = bars(late or Counter({_LEAST: 0}))
    while begins[-1] + width <= _LEAST:
        begins.append(begins[-1] + width)
        heights.append(0)
    rule = weight_rule(
        scene.settings.rule, scene.tally.head.version, begins, last=run.versions, samples=samples
    )
    place = np.minimum(rows["staleness"] // width, len(begins) - 1)
    weighed = np.isfinite(rows["weight"])
    total = np.bincount(place[weighed], rows["weight"][weighed], len(begins))
    counts = np.bincount(place[weighed], minlength=len(begins))
    given = [float(of / n) if n else None for of, n in zip(total, counts, strict=True)]
    chart = Chart(
        "weights", "Weight over the staleness of updates", "versions late",
        [float(one) for one in begins],
        [
            Curve("updates", [float(one) for one in heights], "bars"),
            Curve("weight by the rule", [*rule.weights], "line", "right"),
            Curve("weight given, mean", given, "points", "right"),
        ],
        versions=False,
    )  # fmt: skip
    return chart, rule


def of_device(scene: Scene, device: int) -> list[Chart]:
    """How a device's newest updates change."""
    rows = used(scene)
    rows = rows[rows["device"] == device]
    rows = rows[_spread(len(rows))]
    x = rows["version"].astype(float).tolist()
    found = [
        Chart(f"device-{name}", title, "version", x, [Curve(label, _floats(rows[name]), "points")],
              versions=False)
        for name, title, label in (
            ("loss", "Training loss that it reports", "loss"),
            ("staleness", "Staleness of its updates", "versions late"),
            ("weight", "Weight that its updates were given", "weight"),
        )
    ]  # fmt: skip
    return [one for one in found if any(value is not None for value in one.series[0].values)]


def _seconds(times: SceneRows, scene: Scene) -> list[float]:
    """Times as seconds of the run, ascending."""
    found: list[float] = np.maximum.accumulate(times - scene.tally.run.created).tolist()
    return [round(one, 2) for one in found]


def _spread(length: int) -> SceneRows:
    """The places of at most ``_POINTS`` evenly chosen values, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, _POINTS)).astype(np.int64))


def _floats(values: SceneRows) -> list[float | None]:
    return [_finite(float(value)) for value in values]


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
