"""The picture of a sweep: the metric over each key, and the curves of the best configurations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from fedstream.history.pictures import COLOURS, STYLE, line_style
from fedstream.history.table import or_nan
from fedstream.runtime.text import escaped
from fedstream.sweep.results import Ranked, Ranking
from fedstream.sweep.trials import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_KEYS = 5  # panels
_MOST_CURVES = 5
_ALL, _MEAN, _BEST = "#9aa7b5", COLOURS[0], COLOURS[5]
_LOG_FROM = 20.0  # ratio of the largest to the smallest value


def draw(path: Path, title: str, found: Sequence[Ranked], ranking: Ranking) -> None:
    """Write the picture as PNG; ``found`` has the best configuration first."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys(key for line in found for key in line.keys))[:_MOST_KEYS]
    panels = len(keys) + 1
    columns = min(3, panels)
    rows = -(-panels // columns)
    with rc_context(STYLE):
        figure = Figure(figsize=(4.2 * columns, 3.3 * rows + 0.9), layout="constrained")
        grid = list(figure.subplots(rows, columns, squeeze=False).flat)
        figure.suptitle(escaped(title), x=0.01, ha="left", fontsize=11, parse_math=False)
        _curves(grid[0], found, ranking)
        for axes, key in zip(grid[1:], keys, strict=False):
            _over(axes, found, key)
        for axes in grid[panels:]:
            axes.set_axis_off()
        figure.savefig(path, dpi=110)


def _curves(axes: Axes, found: Sequence[Ranked], ranking: Ranking) -> None:
    """Draw the metric over updates, as the mean over the repeats."""
    shown = [line for line in found if line.values][:_MOST_CURVES]
    axes.set(
        title=f"The best {len(shown)} of {len(found)}", xlabel="updates", ylabel=found[0].metric
    )
    for n, line in enumerate(shown):
        runs = [run.curve for run in line.runs if ranking.of(run) is not None]
        points = min(len(curve["updates"]) for curve in runs)
        x = [fmean(float(curve["updates"][at] or 0) for curve in runs) for at in range(points)]
        values = np.array(
            [[or_nan(value) for value in curve[line.metric][:points]] for curve in runs]
        )
        axes.plot(
            x,
            values.mean(axis=0),
            lw=1.5,
            **line_style(n),
            label=escaped(words(line.keys)),
        )
    if shown:
        axes.set_xlim(left=0)
        for text in axes.legend(fontsize=7, loc="best").get_texts():
            text.set_parse_math(False)


def _over(axes: Axes, found: Sequence[Ranked], key: str) -> None:
    """Draw every configuration's mean over one key, and the mean of those with the same value."""
    lines = [line for line in found if line.mean is not None and key in line.keys]
    values = list({repr(line.keys[key]): line.keys[key] for line in lines}.values())
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if numeric:
        values.sort(key=float)  # type: ignore[arg-type]
        places = {repr(value): float(value) for value in values}  # type: ignore[arg-type]
    else:
        values.sort(key=str)
        places = {repr(value): float(n) for n, value in enumerate(values)}
        axes.set_xticks(range(len(values)), [escaped(value) for value in values])
    metric = found[0].metric
    axes.set(xlabel=key, ylabel=metric, title=f"{metric} over {key}")
    x = [places[repr(line.keys[key])] for line in lines]
    y = [line.mean or 0.0 for line in lines]
    axes.errorbar(
        x,
        y,
        [line.deviation or 0.0 for line in lines],
        fmt="o",
        ms=4,
        capsize=2,
        lw=0.9,
        color=_ALL,
        label="configuration ± deviation",
    )
    if len(values) < len(lines):  # otherwise the means are the points themselves
        at = [places[repr(value)] for value in values]
        means = [
            fmean(line.mean or 0.0 for line in lines if repr(line.keys[key]) == repr(value))
            for value in values
        ]
        axes.plot(
            at,
            means,
            color=_MEAN,
            lw=1.5 if numeric else 0,
            marker="_",
            ms=12,
            label="mean at this value",
        )
    if lines:
        axes.plot(x[0], y[0], marker="*", ms=12, lw=0, color=_BEST, label="the best")
        axes.legend(fontsize=7, loc="best")
    least, most = min(places.values(), default=0.0), max(places.values(), default=0.0)
    if numeric and least > 0 and most / least >= _LOG_FROM:
        axes.set_xscale("log")
