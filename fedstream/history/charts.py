"""Curves and bars of a run: the numbers that a chart draws, and a table without JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import isfinite, nan
from typing import Any, Literal, TypeAlias
from urllib.parse import urlencode

import numpy as np
import numpy.typing as npt

from fedstream.history.measurements import Measurement
from fedstream.history.pictures import bars, medians
from fedstream.history.recorded_run import RecordedRun
from fedstream.history.table import NONE, RowArray
from fedstream.journal.contributions import DeviceContribution
from fedstream.trainer.goals import ON_DEVICES, is_on_devices

POINTS = 1000  # of a curve: more than a screen has columns of pixels to tell apart


@dataclass(frozen=True)
class Window:
    """The range of versions that a page's curves show, and their axis."""

    first: int | None = None  # version; None: the oldest
    last: int | None = None  # None: the newest
    over_time: bool = False

    @property
    def is_part(self) -> bool:
        """Whether the range may leave out versions."""
        return self.first is not None or self.last is not None

    def query(self, *, over_time: bool) -> str:
        """The query of an address for this range, with time or versions as the axis."""
        asked = {"over": "time" if over_time else None, "from": self.first, "until": self.last}
        known = {name: value for name, value in asked.items() if value is not None}
        return f"?{urlencode(known)}" if known else ""

    def within(self, versions: RowArray) -> RowArray:
        """A mask of the versions in the range."""
        found = np.ones(len(versions), bool)
        if self.first is not None:
            found &= versions >= self.first
        if self.last is not None:
            found &= versions <= self.last
        return found


WHOLE = Window()
UsedUpdates: TypeAlias = Mapping[str, RowArray] | RowArray  # by column


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
    versions: bool = True  # a point belongs to a version, to which a click may lead
    leads: list[int] = field(default_factory=list)  # these versions, if the axis has other values
    led: str = "version"  # what these are, in its table

    def plain(self) -> dict[str, Any]:
        """The chart as plain values, for JSON."""
        return asdict(self)

    @property
    def header(self) -> list[str]:
        """The header of the chart's table."""
        at = [self.led] if self.leads else []
        return [self.unit, *at, *(one.label for one in self.series)]

    def rows(self, most: int = 50) -> list[list[float | None]]:
        """The chart's table: at most ``most`` evenly spaced rows, and the last one."""
        step = -(-len(self.x) // most) or 1
        places = sorted({*range(0, len(self.x), step), len(self.x) - 1}) if self.x else []
        return [
            [self.x[at], *self.leads[at : at + 1], *(one.values[at] for one in self.series)]
            for at in places
        ]


def over_time(
    charts: Sequence[Chart], unit: str, times: Callable[[Sequence[int]], list[float]]
) -> list[Chart]:
    """The charts, with the times of versions in place of versions on their axes."""
    return [
        replace(chart, unit=unit, x=times(versions), leads=versions) if chart.versions else chart
        for chart in charts
        for versions in [[int(one) for one in chart.x]]
    ]


def _over_time(run: RecordedRun, charts: Sequence[Chart]) -> list[Chart]:
    """The charts, with seconds since the run's beginning in place of versions."""
    unit = "seconds of the simulation" if run.is_simulated else "seconds since the beginning"
    return over_time(charts, unit, run.times)


def of_run(run: RecordedRun, window: Window = WHOLE) -> list[Chart]:
    """The charts of a run, without empty ones."""
    shown = [one for one in of_metrics(_measured(run, window), run.metrics) if one.x]
    shown += of_updates(_used(run, window))
    return _over_time(run, shown) if window.over_time else shown


def of_both(run: RecordedRun, other: RecordedRun, window: Window = WHOLE) -> list[Chart]:
    """The metrics that both runs have, and training loss, each as two curves.

    Over time, each run counts from its own beginning; a point then leads to the newest version that
    the first run had at that moment.
    """
    ours, theirs = ({one.name: one for one in _curves(each, window)} for each in (run, other))
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
            unit = one.unit if one.unit == two.unit else f"A: {one.unit}, B: {two.unit}"
            leads = run.newest_at(x) if window.over_time else []
            found.append(Chart(name, one.title, unit, x, series, leads=leads, led="version of A"))
    return found


def _curves(run: RecordedRun, window: Window) -> list[Chart]:
    """A chart of each metric, and of the training loss."""
    shown = _measured(run, window)
    found = [
        replace(chart, name=f"metric-{name}")
        for name in run.metrics
        for chart in of_metrics(shown, [name])
    ]
    found += of_updates(_used(run, window), "loss")
    return _over_time(run, found) if window.over_time else found


def of_device(run: RecordedRun, device: int, window: Window = WHOLE) -> list[Chart]:
    """How a device's updates change over the run."""
    mine = run.columns.used & (run.columns.updates["device"] == device)
    rows = run.columns.updates[mine]
    versions, sent = rows["version"], np.full(len(rows), nan)
    measured = run.measured_shares()
    share = (run.shares or {}).get(device, DeviceContribution())
    within = np.ones(len(rows), bool)
    if measured is not None:
        contained = run.columns.contained[mine]
        within = (contained != NONE) & (contained <= measured.until)
    for column, found in ((rows["norm"], share.distance.values), (sent, share.norm.values)):
        if len(found) == within.sum():  # all were recorded with their weights
            column[within] = found
    compared, cosines = np.array(share.compared), np.array(share.cosine.values)
    drawn = of_points(
        [
            ("device-sent", "Norm of its updates, as sent", "norm", versions, sent),
            (
                "device-norm",
                "How far its updates alone would move the model",
                "distance",
                versions,
                rows["norm"],
            ),
            (
                "device-cosine",
                "Cosine of its updates to the model's movement afterwards",
                "cosine",
                compared,
                cosines,
            ),
        ],
        window,
    )
    drawn += of_device_rows(rows, window)
    return _over_time(run, drawn) if window.over_time else drawn


def of_device_rows(rows: RowArray, window: Window = WHOLE) -> list[Chart]:
    """Training loss, staleness and weight of a device's used updates, over the versions."""
    return of_points(
        [
            (f"device-{name}", title, label, rows["version"], rows[name])
            for name, title, label in (
                ("loss", "Training loss that it reports", "loss"),
                ("staleness", "Staleness of its updates", "versions late"),
                ("weight", "Weight that its updates were given", "weight"),
            )
        ],
        window,
    )


def of_points(
    figures: Sequence[tuple[str, str, str, RowArray, RowArray]], window: Window = WHOLE
) -> list[Chart]:
    """A chart of each figure with values; ``figures``: name, title, label, versions, values."""
    found = []
    for name, title, label, versions, values in figures:
        known = np.isfinite(values) & window.within(versions)
        x, y = versions[known], values[known].astype(float)
        if len(x):
            places = thinned(y)
            curve = Curve(label, y[places].tolist(), "points")
            found.append(Chart(name, title, "version", x[places].astype(float).tolist(), [curve]))
    return found


def _measured(run: RecordedRun, window: Window) -> list[Measurement]:
    inside = window.within(np.array([one.version for one in run.measured], np.int64))
    return [run.measured[at] for at in np.flatnonzero(inside).tolist()]


def of_metrics(measured: Sequence[Measurement], names: Sequence[str]) -> list[Chart]:
    """A chart of each metric, over the versions.

    ``devices_accuracy``, which devices measure, is drawn beside ``accuracy``.
    """
    found: list[Chart] = []
    for name in names:
        if is_on_devices(name) and name.removeprefix(ON_DEVICES) in names:
            continue
        both = [one for one in (name, f"{ON_DEVICES}{name}") if one in names]
        curves = [_points(measured, one) for one in both]
        x = sorted({at for curve in curves for at in curve})
        title = "Test accuracy" if name == "accuracy" else f"Test {name}"
        series = [
            Curve(one, [curve.get(at) for at in x]) for one, curve in zip(both, curves, strict=True)
        ]
        found.append(Chart(f"metric-{len(found)}", title, "version", [*map(float, x)], series))
    return found


def _points(measured: Sequence[Measurement], name: str) -> dict[int, float | None]:
    """A metric's values by version, thinned."""
    points = [(one.version, one.metrics[name]) for one in measured if name in one.metrics]
    places = thinned([value for _, value in points])
    return {points[at][0]: finite(points[at][1]) for at in places}


def _used(run: RecordedRun, window: Window) -> UsedUpdates:
    """The used updates in a window; only the columns that charts need, as rows are long."""
    rows = run.columns.updates
    inside = run.columns.used & window.within(rows["version"])
    return {name: rows[name][inside] for name in ("version", "loss", "staleness", "weight")}


def of_updates(rows: UsedUpdates, *names: Literal["loss", "staleness", "lateness"]) -> list[Chart]:
    """The named charts of used updates (default: all), without empty ones."""
    found = {
        "loss": lambda: _of_updates(
            rows, "loss", "Training loss that devices report", "loss, median"
        ),
        "staleness": lambda: _of_updates(
            rows, "staleness", "Staleness over the run", "versions late, median"
        ),
        "lateness": lambda: _staleness(rows),
    }
    made = [found[name]() for name in names or found]
    return [chart for chart in made if chart is not None and chart.x]


def _of_updates(rows: UsedUpdates, name: str, title: str, label: str) -> Chart | None:
    """The median and the maximum of a figure of used updates, over the versions."""
    found = medians(rows["version"], rows[name])
    if not found.at:
        return None
    series = [Curve(label, [*found.middle])]
    if found.most:
        series.append(Curve("most", [*found.most], "points"))
    return Chart(name, title, "version", found.at, series)


def _staleness(rows: UsedUpdates) -> Chart | None:
    """A histogram of the used updates' staleness, with their mean weights."""
    if not len(rows["version"]):
        return None
    late, counts = np.unique(rows["staleness"], return_counts=True)
    begins, heights, width = bars(dict(zip(late.tolist(), counts.tolist(), strict=True)))
    place = np.minimum(rows["staleness"] // width, len(begins) - 1)
    known = np.isfinite(rows["weight"])
    total = np.bincount(place[known], rows["weight"][known], len(begins))
    counts = np.bincount(place[known], minlength=len(begins))
    weights = [
        float(of) / count if count else None for of, count in zip(total, counts, strict=True)
    ]
    last = f"; the last bar: {begins[-1]} and more" if late[-1] >= begins[-1] + width else ""
    return Chart(
        "lateness",
        "Staleness of updates, and the weight they were given",
        f"versions late{last}",
        [float(one) for one in begins],
        [
            Curve("updates", [float(one) for one in heights], "bars"),
            Curve("mean weight", weights, "line", "right"),
        ],
        versions=False,
    )


def finite(value: float | None) -> float | None:
    """The value if it is finite, so that a chart can show it; else None."""
    return value if value is not None and isfinite(value) else None


def thinned(*curves: Sequence[float] | npt.NDArray[np.float64], most: int = POINTS) -> list[int]:
    """The places at which to draw curves of one length, ascending: about ``most``, or all if fewer.

    These are both ends, and the places of the least and the greatest value in each part of each
    curve, so that a single value that stands out is always drawn.
    """
    values = np.atleast_2d(np.asarray(curves, np.float64))
    length = values.shape[1]
    if length <= most:
        return list(range(length))
    parts = max(1, most // (2 * len(values)))
    size = -(-length // parts)
    wide = np.full((len(values), parts * size), np.nan)
    wide[:, :length] = values
    split = wide.reshape(len(values), parts, size)
    begins = np.arange(parts) * size
    low = np.where(np.isnan(split), np.inf, split).argmin(axis=2) + begins
    high = np.where(np.isnan(split), -np.inf, split).argmax(axis=2) + begins
    found = {*low.ravel().tolist(), *high.ravel().tolist(), 0, length - 1}
    return sorted(place for place in found if place < length)
