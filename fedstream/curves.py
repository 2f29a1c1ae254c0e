"""The picture of a run: accuracy and loss, staleness, and who took part."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedstream.observer import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TEST, _TRAIN, _FAINT = "#1f5fa8", "#d9772b", "#eec39c"
_MOST_BARS = 40  # devices shown one by one
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


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to ``window - 1`` before it."""
    return [fmean(values[max(0, n - window + 1) : n + 1]) for n in range(len(values))]


def draw(path: Path, title: str, history: History, *, created: float, devices: int) -> None:
    """Writes the picture as PNG; seconds count from ``created``."""
    # Figure rather than pyplot: no global state, no display, half the import.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(12.5, 6.6), layout="constrained")
        panels = figure.subplots(2, 3, width_ratios=(1.15, 1.15, 1))
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)
        seconds = {n: max(0.0, v.time - created) for n, v in history.versions.items()}
        of_version = {n: float(n) for n in history.versions}
        for column, (at, name) in enumerate(((of_version, "versions"), (seconds, "seconds"))):
            _accuracy(panels[0][column], history, at, name)
            _loss(panels[1][column], history, at, name)
        _staleness(panels[0][2], history)
        _devices(panels[1][2], history, devices)
        figure.savefig(path, dpi=110)


def _accuracy(axes: Axes, history: History, at: dict[int, float], name: str) -> None:
    points = [
        (at[v], m["accuracy"])
        for v, m in sorted(history.evaluations.items())
        if v in at and "accuracy" in m
    ]
    axes.set(title=f"Test accuracy over {name}", xlabel=name)
    if not points:
        _nothing(axes, "not measured")
        return
    x, y = zip(*points, strict=True)
    axes.plot(x, y, color=_TEST, marker="o", markersize=2.5)
    axes.set_ylim(min(0.0, *y), 1.02)
    axes.set_xlim(left=0)
    axes.set_title(f"Test accuracy over {name}: {y[-1]:.3f} at the end")


def _loss(axes: Axes, history: History, at: dict[int, float], name: str) -> None:
    trained = [
        (at[n], fmean(losses))
        for n, v in sorted(history.versions.items())
        if (losses := [u.loss for u in v.updates if u.loss is not None])
    ]
    tested = [
        (at[v], m["loss"])
        for v, m in sorted(history.evaluations.items())
        if v in at and "loss" in m
    ]
    axes.set(title=f"Loss over {name}", xlabel=name)
    if not trained and not tested:
        _nothing(axes, "not measured")
        return
    if trained:
        x, y = zip(*trained, strict=True)
        window = max(1, len(y) // 20)
        axes.plot(x, y, color=_FAINT, linewidth=0.6)
        axes.plot(x, smooth(y, window), color=_TRAIN, label=f"training, mean of {window}")
    if tested:
        x, y = zip(*tested, strict=True)
        axes.plot(x, y, color=_TEST, marker="o", markersize=2.5, label="test")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right")


def _staleness(axes: Axes, history: History) -> None:
    late = history.staleness()
    axes.set(title="Staleness of updates", xlabel="versions late", ylabel="updates")
    if not late:
        _nothing(axes, "no updates")
        return
    axes.bar(list(late), list(late.values()), color=_TEST, width=0.8)
    axes.locator_params("x", integer=True)
    mean = history.mean_staleness
    axes.axvline(mean, color=_TRAIN)
    axes.set_title(f"Staleness of updates: mean {mean:.2f}, max {max(late)}")
    axes.grid(visible=False, axis="x")


def _devices(axes: Axes, history: History, devices: int) -> None:
    made = history.updates_by_device()
    axes.set(title="Updates per device", xlabel="device", ylabel="updates")
    if not made:
        _nothing(axes, "no updates")
        return
    if devices <= _MOST_BARS:  # one that made none has its place too
        axes.bar(range(devices), [made[device] for device in range(devices)], color=_TEST)
        axes.set_xticks(range(0, devices, 1 if devices <= 20 else 5))
    else:
        axes.plot(sorted((made[d] for d in range(devices)), reverse=True), color=_TEST)
        axes.set(xlabel="devices, the busiest first", ylim=(0, None))
    axes.grid(visible=False, axis="x")


def _nothing(axes: Axes, why: str) -> None:
    axes.text(0.5, 0.5, why, transform=axes.transAxes, ha="center", color="#888888")
    axes.set(xticks=[], yticks=[])
