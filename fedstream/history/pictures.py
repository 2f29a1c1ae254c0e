"""Pictures of runs as files, by matplotlib; and their figures as tables of HTML and text.

The charts of the pages have the same numbers: both take them from :func:`medians` and
:func:`bars`.
"""

from __future__ import annotations

import html
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import isfinite, nan
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from fedstream.history.display import short
from fedstream.history.timeline import History
from fedstream.runtime.text import escaped
from fedstream.terminal import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedstream.core.messages import Goal
    from fedstream.history.measurements import Measurement
    from fedstream.journal import SegmentHead

_CELL = "text-align: left; vertical-align: top; padding: 1px 12px 1px 0"
_TEST, _TRAIN, _FAINT = "#1f5fa8", "#d9772b", "#eec39c"
# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000")
_DASHES = ("-", "--", ":", "-.")
_GROUPS = 150  # of updates, for medians
_MOST_BARS = 40  # in the panels of devices and of staleness
# By hand: to have matplotlib lay it out takes as long as to draw it, at the end of every run.
_MARGINS = {
    "left": 0.055,
    "right": 0.985,
    "bottom": 0.075,
    "top": 0.89,
    "wspace": 0.21,
    "hspace": 0.36,
}
STYLE: Any = {  # matplotlib names every key in its type
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "axes.edgecolor": "#888888",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}


def line_style(place: int) -> dict[str, Any]:
    """Colour and dashes of one of several curves.

    28 can be told apart (7 colours, 4 dashes), and neighbours even without colours.
    """
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": _DASHES[place % len(_DASHES)],
    }


@dataclass(frozen=True)
class Scale:
    """Upper end of an axis, and whether it is logarithmic."""

    top: float
    left_out: int = 0  # values above the top or not finite
    log: bool = False


def scale(values: Sequence[float]) -> Scale:
    """Choose an axis from zero that shows the usual values and leaves out a few extreme ones.

    If the maximum exceeds 10 times the 98th percentile, the axis ends at 1.5 times that percentile.
    If all values are positive and the 98th percentile exceeds 100 times the median, the run
    diverged, and the axis is logarithmic.
    """
    known = np.array([value for value in values if isfinite(value)])
    lost = len(values) - len(known)
    if not len(known):
        return Scale(1.0, lost)
    usual, high, most = (float(np.percentile(known, share)) for share in (50, 98, 100))
    if usual > 0 and float(known.min()) > 0 and high > 100 * usual:
        return Scale(2 * most, lost, log=True)
    if most > 10 * high > 0:
        return Scale(1.5 * high, lost + int((known > 1.5 * high).sum()))
    return Scale(1.05 * most if most > 0 else 1.0, lost)


class Medians(NamedTuple):
    """Groups of successive values; ``at`` is where each group ends."""

    at: list[float]
    middle: list[float]
    most: list[float]  # empty if each value is a group of its own


def medians(at: npt.ArrayLike, values: npt.ArrayLike) -> Medians:
    """The median and the maximum of each of at most 150 groups of successive finite values.

    The median is used because single values may be extreme.
    """
    x, y = np.asarray(at, float), np.asarray(values, float)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if not len(y):
        return Medians([], [], [])
    groups = np.array_split(y, min(_GROUPS, len(y)))
    ends = x[np.cumsum([len(group) for group in groups]) - 1]
    most = [float(group.max()) for group in groups] if len(y) > len(groups) else []
    return Medians(ends.tolist(), [_median(group) for group in groups], most)


def _median(values: npt.NDArray[np.float64]) -> float:
    """numpy's median in a fraction of the time: a picture has hundreds of small groups."""
    ordered, half = np.sort(values), len(values) // 2
    return float((ordered[half] + ordered[~half]) / 2)


def bars(late: Mapping[int, int]) -> tuple[list[int], list[int], int]:
    """Staleness histogram, as (start of each bar, updates in each bar, bar width).

    If the maximum exceeds 40, the last bar collects about 1% of the updates, the most stale.
    """
    most, total, seen = max(late), sum(late.values()), 0
    last = most
    if most > _MOST_BARS:
        for last in sorted(late):
            seen += late[last]
            if seen >= 0.99 * total:
                break
        last = min(last + 1, most)  # room for the collecting bar
    width = -(-(last + 1) // _MOST_BARS)
    begins = list(range(0, last + 1, width))
    counts = [0] * len(begins)
    for staleness, count in late.items():
        counts[min(staleness // width, len(begins) - 1)] += count
    return begins, counts, width


def draw(
    to: Path | BinaryIO,
    title: str,
    history: History,
    *,
    created: float,
    devices: int,
    time: str = "seconds",
) -> None:
    """Write the picture as PNG; times count from ``created``, in the unit named by ``time``."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        drawn = picture(title, history, created=created, devices=devices, time=time)
        drawn.savefig(to, dpi=110)


def picture(
    title: str, history: History, *, created: float, devices: int, time: str = "seconds"
) -> Figure:
    """Draw the picture; arguments as for :func:`draw`."""
    # Figure rather than pyplot: no global state, no display, half the import time.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 6.6))
    panels = figure.subplots(2, 3, width_ratios=(1.15, 1.15, 1), gridspec_kw=_MARGINS)
    # A task's name may be any text: don't read it as a formula, and escape control characters.
    figure.suptitle(escaped(title), x=0.01, ha="left", fontsize=11, parse_math=False)
    since = {n: max(0.0, v.time - created) for n, v in history.versions.items()}
    of_version = {n: float(n) for n in history.versions}
    for column, (at, name) in enumerate(((of_version, "versions"), (since, time))):
        _main_metric(panels[0][column], history, at, name)
        _loss(panels[1][column], history, at, name)
    _staleness(panels[0][2], history)
    _devices(panels[1][2], history, devices)
    return figure


def _main_metric(axes: Axes, history: History, at: dict[int, float], name: str) -> None:
    metric = history.main or "accuracy"
    points = [
        (at[v], m[metric])
        for v, m in sorted(history.evaluations.items())
        if v in at and isfinite(m.get(metric, nan))
    ]
    title = f"Test {escaped(metric)} over {name}"
    axes.set_title(title, parse_math=False)
    axes.set_xlabel(name)
    if not points:
        _nothing(axes, "not measured")
        return
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=_TEST, marker="o", markersize=2.5)
    axes.set_ylim(min(0.0, *y), 1.02 if max(y) <= 1 else 1.05 * max(y))
    axes.set_xlim(left=0)
    axes.set_title(f"{title}: {y[-1]:.3f} at the end", parse_math=False)


def _loss(axes: Axes, history: History, at: dict[int, float], name: str) -> None:
    losses = [
        (at[n], u.loss)
        for n, v in sorted(history.versions.items())
        for u in v.updates
        if u.loss is not None
    ]
    trained = medians([x for x, _ in losses], [loss for _, loss in losses])
    tested = [
        (at[v], m["loss"])
        for v, m in sorted(history.evaluations.items())
        if v in at and "loss" in m
    ]
    axes.set(title=f"Loss over {name}", xlabel=name)
    if not trained.at and not tested:
        _nothing(axes, "not measured")
        return
    curves = [*trained.middle, *trained.most, *(loss for _, loss in tested)]
    curves += [loss for _, loss in losses if not isfinite(loss)]
    shown = scale(curves)
    if trained.most:
        axes.plot(trained.at, trained.most, ".", color=_FAINT, markersize=3, label="most")
    if trained.at:
        axes.plot(trained.at, trained.middle, color=_TRAIN, label="training, median")
    if tested:
        x, y = zip(*tested, strict=True)
        axes.plot(x, y, color=_TEST, marker="o", markersize=2.5, label="test")
    axes.set_xlim(left=0)
    if shown.log:
        axes.set_yscale("log")
        axes.set_ylim(top=shown.top)
    else:
        axes.set_ylim(0, shown.top)
    if shown.left_out:
        axes.set_title(f"Loss over {name}: {shown.left_out} of {len(curves)} beyond this axis")
    axes.legend(loc="upper right")


def _staleness(axes: Axes, history: History) -> None:
    late = history.staleness()
    axes.set(title="Staleness of updates", xlabel="versions late", ylabel="updates")
    if not late:
        _nothing(axes, "no updates")
        return
    begins, counts, width = bars(late)
    axes.bar(begins, counts, color=_TEST, width=0.8 * width, align="center")
    axes.locator_params("x", integer=True, nbins=8)
    if max(late) >= begins[-1] + width:
        axes.set_xlabel(f"versions late; the last bar: {begins[-1]} and more")
    mean = history.mean_staleness
    if mean <= begins[-1]:
        axes.axvline(mean, color=_TRAIN)
    axes.set_title(f"Staleness of updates: mean {mean:.2f}, max {max(late)}")
    axes.grid(visible=False, axis="x")


def _devices(axes: Axes, history: History, devices: int) -> None:
    made = history.updates_by_device()
    axes.set(title="Updates per device", xlabel="device", ylabel="updates")
    if not made:
        _nothing(axes, "no updates")
        return
    counts = [made[device] for device in range(devices)]  # including devices without updates
    if devices <= _MOST_BARS:
        axes.bar(range(devices), counts, color=_TEST)
        axes.locator_params("x", integer=True, nbins=10)
    else:
        counts.sort(reverse=True)
        axes.fill_between(range(1, devices + 1), counts, color=_TEST, step="mid", linewidth=0)
        axes.set(xlabel="devices, the busiest first", xlim=(0, devices), ylim=(0, None))
    middle = number(float(median(counts)))
    axes.set_title(f"Updates per device: {min(counts)} to {max(counts)}, median {middle}")
    axes.grid(visible=False, axis="x")


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color="#888888")
    axes.set(xticks=[], yticks=[])


def curves_of(
    numbers: Mapping[str, Any], head: SegmentHead, history: History, clock: str
) -> Figure:
    """The picture of one run; ``clock`` names its seconds."""
    from matplotlib import rc_context

    title = (
        f"{short(numbers['task'])} · {short(str(numbers['strategy']))} · "
        f"{numbers['devices']} devices"
        f"{'' if head.created else ', simulated'} · {numbers['versions']} versions"
    )
    with rc_context(STYLE):
        return picture(title, history, created=head.created, devices=head.devices, time=clock)


def replayed(
    title: str,
    accuracies: Mapping[int, tuple[float, float]],
    distances: Mapping[int, float | None],
) -> Figure:
    """A replay by another rule: test accuracies, and the distance between the two models.

    ``accuracies``: by version, the accuracy by the recorded rule and by the other rule.
    ``distances``: by version.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(10.5, 3.9), layout="constrained")
        left, right = figure.subplots(1, 2)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        left.set(title="Test accuracy", xlabel="version as recorded")
        for place, (name, color) in enumerate((("original", _TEST), ("changed", _TRAIN))):
            values = [both[place] for both in accuracies.values()]
            if values:
                label = f"{name}: {values[-1]:.4f}"
                left.plot([*accuracies], values, color=color, marker="o", ms=3, label=label)
        if accuracies:
            figure.legend(loc="outside lower left", ncols=2)
        else:
            _nothing(left, "not measured")
        right.plot([*distances], [*distances.values()], color="#555555", marker="o", ms=3)
        right.set(title="Distance between the models", xlabel="version as recorded")
        right.set_ylim(bottom=0)
        return figure


def png(figure: Figure) -> bytes:
    """A figure as PNG."""
    from matplotlib import rc_context

    out = BytesIO()
    with rc_context(STYLE):
        figure.savefig(out, format="png", dpi=110)
    return out.getvalue()


def as_html(rows: Iterable[tuple[str, str]], picture: bytes) -> str:
    """Rows as a table, and a PNG below it. All texts are escaped."""
    body = "".join(_row(("th", name), ("td", value)) for name, value in rows)
    return f"<table>{body}</table>{_image(picture)}"


def comparison_html(
    table: Sequence[Sequence[str]], differences: Sequence[Sequence[str]], picture: bytes
) -> str:
    """Two tables, each with its header first, and a PNG below them."""
    parts = [_table(rows) for rows in (table, differences) if rows]
    return "".join((*parts, _image(picture)))


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table as lines of text, its header first: names to the left, numbers to the right."""
    shown = [[escaped(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(
            value.rjust(width) if place else value.ljust(width)
            for place, (value, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in shown
    )


def overlaid(
    names: Sequence[str],
    runs: Sequence[Sequence[Measurement]],
    metric: str,
    clock: str,
    target: float | None,
    goal: Goal | None,
) -> Figure:
    """A metric over versions, updates and time, one curve for each run.

    ``clock`` names the time. ``target`` is drawn as a line. ``goal``: the metric's goal.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(12.5, 4.4), layout="constrained")
        panels = figure.subplots(1, 3, sharey=True)
        of = ("version", "updates", "seconds")
        for axes, what, label in zip(panels, of, ("versions", "updates", clock), strict=True):
            for place, (name, points) in enumerate(zip(names, runs, strict=True)):
                axes.plot(
                    [getattr(one, what) for one in points],
                    [one.metrics[metric] for one in points],
                    **line_style(place),
                    marker="o",
                    markersize=2.5,
                    label=escaped(name) if axes is panels[0] else None,
                )
            if target is not None:
                axes.axhline(
                    target,
                    color="#888888",
                    linewidth=0.8,
                    linestyle=(0, (2, 3)),
                    label=f"target {number(target)}" if axes is panels[0] else None,
                )
            axes.set(xlabel=label)
            axes.set_xlim(left=0)
        panels[0].set_ylabel(escaped(metric), parse_math=False)
        values = [one.metrics[metric] for points in runs for one in points]
        if values and goal == "max":
            panels[0].set_ylim(min(0.0, *values), 1.02 if max(values) <= 1 else None)
        if not values:
            panels[1].text(
                0.5,
                0.5,
                "not measured",
                transform=panels[1].transAxes,
                ha="center",
                color="#888888",
            )
        legend = figure.legend(loc="outside upper left", ncols=4)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return figure


def _table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [_row(*(("th", value) for value in header))]
    lines += [_row(*(("td", value) for value in row)) for row in body]
    return f"<table>{''.join(lines)}</table>"


def _row(*cells: tuple[str, str]) -> str:
    inner = "".join(f'<{tag} style="{_CELL}">{_text(value)}</{tag}>' for tag, value in cells)
    return f"<tr>{inner}</tr>"


def _image(picture: bytes) -> str:
    data = b64encode(picture).decode()
    return f'<img src="data:image/png;base64,{data}" style="max-width: 100%">'


def _text(value: str) -> str:
    return html.escape(escaped(value))
