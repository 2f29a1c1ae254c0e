"""Curves and bars of a run: the numbers that a chart draws, and a table without JavaScript."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from typing import Any, Literal

import numpy as np

from fedstream.observe.curves import bars, medians
from fedstream.page.columns import RowArray
from fedstream.page.run import RecordedRun

_POINTS = 1000  # of a curve: more than a screen has columns of pixels to tell apart


@dataclass(frozen=True)
class Curve:
    """One curve, or one set of bars; None where there is no value."""

    label: str
    values: list[float | None]
    how: Literal["line", "points", "bars"] = "line"
    scale: Literal["y", "right"] = "y"


@dataclass(frozen=True)
class Chart:
    """Curves over one axis, whose values ascend."""

    name: str  # an identifier
    title: str
    unit: str  # of the axis
    x: list[float]
    series: list[Curve]
    versions: bool = True  # the axis has versions, to which a click may lead

    def plain(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self)

    @property
    def header(self) -> list[str]:
        """The header of its table."""
        return [self.unit, *(one.label for one in self.series)]

    def rows(self, most: int = 50) -> list[list[float | None]]:
        """Its table, of at most about ``most`` evenly chosen rows and the last one."""
        step = -(-len(self.x) // most) or 1
        places = sorted({*range(0, len(self.x), step), len(self.x) - 1}) if self.x else []
        return [[self.x[at], *(one.values[at] for one in self.series)] for at in places]


def of_run(run: RecordedRun) -> list[Chart]:
    """The charts of a whole run, those that have anything to show."""
    found = [*_measured(run), _loss(run), _staleness_over(run), _staleness(run)]
    return [chart for chart in found if chart is not None and chart.x]


def of_both(run: RecordedRun, other: RecordedRun) -> list[Chart]:
    """The metrics that both runs have, and training loss, each as two curves."""
    ours, theirs = ({one.name: one for one in _curves(each)} for each in (run, other))
    found = []
    for name, one in ours.items():
        if name in theirs:
            two = theirs[name]
            x = sorted({*one.x, *two.x})
            series = [
                Curve(label, [known.get(at) for at in x])
                for label, chart in (("A", one), ("B", two))
                for known in [dict(zip(chart.x, chart.series[0].values, strict=True))]
            ]
            found.append(Chart(name, one.title, one.unit, x, series))
    return found


def _curves(run: RecordedRun) -> list[Chart]:
    """What is measured over the versions, by the metric's name."""
    measured = zip(run.metrics, _measured(run), strict=True)
    found = [replace(chart, name=f"metric-{name}") for name, chart in measured]
    loss = _loss(run)
    return [*found, loss] if loss is not None else found


def of_device(run: RecordedRun, device: int) -> list[Chart]:
    """How a device's updates change over the run."""
    rows = run.columns.updates[run.columns.used & (run.columns.updates["device"] == device)]
    shares = run.directions.shares
    if shares is not None and device in shares:
        apart = shares[device].distance.values
        if len(apart) == len(rows):  # all were recorded with their weights
            rows["norm"] = apart
    shown = rows[_spread(len(rows))]
    x = shown["version"].astype(float).tolist()
    found = [
        Chart(f"device-{name}", title, "version", x, [Curve(label, _floats(shown[name]), "points")])
        for name, title, label in (
            ("norm", "How far its updates alone would move the model", "norm"),
            ("loss", "Training loss that it reports", "loss"),
            ("staleness", "Staleness of its updates", "versions late"),
            ("weight", "Weight that its updates were given", "weight"),
        )
    ]
    return [chart for chart in found if any(one is not None for one in chart.series[0].values)]


def _measured(run: RecordedRun) -> list[Chart]:
    """A chart of each metric."""
    found: list[Chart] = []
    for name in run.metrics:
        points = [(one.version, one.metrics[name]) for one in run.measured if name in one.metrics]
        points = [points[at] for at in _spread(len(points)).tolist()]
        title = "Test accuracy" if name == "accuracy" else f"Test {name}"
        values = [finite(value) for _, value in points]
        found.append(
            Chart(
                f"metric-{len(found)}", title, "version", [float(at) for at, _ in points],
                [Curve(name, values)],
            )
        )  # fmt: skip
    return found


def _loss(run: RecordedRun) -> Chart | None:
    return _of_updates(run, "loss", "Training loss that devices report", "loss, median")


def _staleness_over(run: RecordedRun) -> Chart | None:
    title = "Staleness over the run"
    return _of_updates(run, "staleness", title, "versions late, median")


def _of_updates(run: RecordedRun, name: str, title: str, label: str) -> Chart | None:
    """The median and the most of a figure of the used updates, over the versions."""
    rows = run.columns.updates[run.columns.used]
    found = medians(rows["version"].tolist(), rows[name].tolist())
    if not found.at:
        return None
    series = [Curve(label, [*found.middle])]
    if found.most:
        series.append(Curve("most", [*found.most], "points"))
    return Chart(name, title, "version", found.at, series)


def _staleness(run: RecordedRun) -> Chart | None:
    """How many updates were how stale, and the weight that these were given."""
    rows: RowArray = run.columns.updates[run.columns.used]
    if not len(rows):
        return None
    late, counts = np.unique(rows["staleness"], return_counts=True)
    begins, heights, width = bars(dict(zip(late.tolist(), counts.tolist(), strict=True)))
    place = np.minimum(rows["staleness"] // width, len(begins) - 1)
    total = np.bincount(place, rows["weight"], len(begins))
    weights = [float(of) / count if count else None
               for of, count in zip(total, heights, strict=True)]  # fmt: skip
    last = f"; the last bar: {begins[-1]} and more" if late[-1] >= begins[-1] + width else ""
    return Chart(
        "lateness", "Staleness of updates, and the weight they were given",
        f"versions late{last}", [float(one) for one in begins],
        [
            Curve("updates", [float(one) for one in heights], "bars"),
            Curve("mean weight", weights, "line", "right"),
        ],
        versions=False,
    )  # fmt: skip


def _spread(length: int) -> Any:
    """The places of at most ``_POINTS`` evenly chosen values, the first and the last among them."""
    return np.unique(np.linspace(0, length - 1, min(length, _POINTS)).astype(np.int64))


def _floats(values: Sequence[float]) -> list[float | None]:
    return [finite(float(value)) for value in values]


def finite(value: float | None) -> float | None:
    """A value that a chart can show, or None."""
    return value if value is not None and isfinite(value) else None
