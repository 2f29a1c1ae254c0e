"""What each device did lately, as far as a scene knows, and which devices stand out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.broker.messages import OUTCOMES
from fedstream.history.devices import (
    OUTLIER,
    mark_of_score,
    robust_scores,
    shade_of_score,
    style_of_score,
)
from fedstream.history.live.scene import Scene, SceneRows
from fedstream.history.ui.templating import cell_of

SHOWN = 50  # devices in the table: the first by the column that it is sorted by

COLUMNS = (
    ("device", "device", ""),
    ("used", "used", "updates"),
    ("refused", "refused", "updates"),
    ("refused_share", "refused", "%"),
    ("lost", "given up", "tasks"),
    ("staleness", "staleness", "versions, mean"),
    ("weight", "weight", "mean"),
    ("loss", "loss", "mean"),
    ("sent", "norm", "sent, mean"),
    ("norm", "distance", "mean"),
    ("cosine", "cosine", "mean"),
    ("last", "last version", ""),
    ("heard_s", "last word", "seconds ago"),
)
"""Of the table of devices: the figure, its name, its unit."""

OF_JOURNAL = {"sent": "norm", "norm": "distance", "cosine": "cosine"}
"""The figures that only the journal has, and their fields in its rows."""

JUDGED = ("refused_share", "staleness", "weight", "loss", "sent", "norm", "cosine")
"""The figures for which a device is compared with the others."""

_USED = [OUTCOMES.index(name) for name in ("applied", "buffered")]
_REFUSED = OUTCOMES.index("refused")
_WHOLE = frozenset(("used", "refused", "lost", "last"))

FigureArray: TypeAlias = npt.NDArray[np.float64]
"""A figure of each device; NaN: not known."""


@dataclass(frozen=True, slots=True)
class DeviceCell:
    """A figure of a device."""

    key: str
    value: float | None
    score: float | None  # robust z-score; None: not judged, or not known
    shade: int  # from -3 (far below the others) to 3 (far above)

    @property
    def text(self) -> str:
        """The figure, marked if it stands out."""
        said = f"{self.value:.0f}" if self.key == "heard_s" else cell_of(self.value, self.key)
        return f"{self.mark} {said}" if self.mark else said

    @property
    def style(self) -> str:
        """Its classes in the style sheet."""
        return style_of_score(self.score)

    @property
    def mark(self) -> str:
        """▲ or ▼ for an outlier."""
        return mark_of_score(self.score)


@dataclass(frozen=True)
class DeviceHeatRow:
    """A device as the table shows it."""

    device: int
    cells: tuple[DeviceCell, ...]  # but its number

    @property
    def marks(self) -> int:
        """In how many figures it stands out."""
        return sum(bool(cell.mark) for cell in self.cells)


@dataclass(frozen=True)
class DeviceHeat:
    """The table of devices."""

    columns: tuple[tuple[str, str, str], ...]  # of ``COLUMNS``
    lines: tuple[DeviceHeatRow, ...]  # at most ``SHOWN``
    total: int  # devices that did anything
    sort: str  # a column, with - before it to descend
    ends: int  # ended tasks that it is made of


def device_heat(scene: Scene, sort: str, *, only: int | None = None) -> DeviceHeat:
    """The table of devices, made of the newest ended tasks that the scene has.

    ``sort``: a column; one that it lacks ('', for example) sorts by in how many figures a device
    stands out, then by number. Devices without a value come last. ``only``: leave out all others,
    once they are compared.
    """
    devices, figures = _figures(scene)
    columns = tuple(one for one in COLUMNS if one[0] == "device" or one[0] in figures)
    scores = {name: robust_scores(figures[name]) for name in JUDGED if name in figures}
    key, descends = sort.removeprefix("-"), sort.startswith("-")
    if key == "device":
        order = np.arange(len(devices))[:: -1 if descends else 1]
    elif key in figures:  # what is not known comes last, whichever way the others are sorted
        order = np.argsort(-figures[key] if descends else figures[key], kind="stable")
    else:
        sort = ""
        odd = np.sum([np.abs(found) > OUTLIER for found in scores.values()], axis=0)
        order = np.argsort(-odd, kind="stable")
    shown = order[:SHOWN] if only is None else np.flatnonzero(devices == only)
    lines = tuple(_line(int(devices[place]), int(place), figures, scores) for place in shown)
    return DeviceHeat(columns, lines, len(devices), sort, len(scene.ended))


def _line(
    device: int, place: int, figures: Mapping[str, FigureArray], scores: Mapping[str, FigureArray]
) -> DeviceHeatRow:
    """A device's figures; the table has so many devices that only what is shown is made of them."""
    cells = []
    for name, _, _ in COLUMNS[1:]:
        if name not in figures:
            continue
        score = _known(scores[name][place]) if name in scores else None
        value = _known(figures[name][place])
        if value is not None and name in _WHOLE:
            value = int(value)
        cells.append(DeviceCell(name, value, score, shade_of_score(score)))
    return DeviceHeatRow(device, tuple(cells))


def _known(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _figures(scene: Scene) -> tuple[npt.NDArray[np.int64], dict[str, FigureArray]]:
    """The devices that ended a task, by number, and their figures."""
    ended = scene.ended[scene.ended["device"] >= 0]
    devices, place = np.unique(ended["device"], return_inverse=True)
    used = np.isin(ended["outcome"], _USED)
    answered = used | (ended["outcome"] == _REFUSED)

    def count(which: SceneRows) -> FigureArray:
        return np.bincount(place[which], minlength=len(devices)).astype(np.float64)

    def mean(name: str) -> FigureArray:
        known = used & np.isfinite(ended[name])
        if name == "staleness":
            known &= ended[name] >= 0
        return _share(np.bincount(place[known], ended[name][known], len(devices)), count(known))

    def most(name: str, which: SceneRows) -> FigureArray:
        found = np.full(len(devices), -1.0)
        np.maximum.at(found, place[which], ended[name][which])
        return found

    refused, last = count(answered & ~used), most("version", used)
    return devices, {
        "used": count(used),
        "refused": refused,
        "refused_share": _share(refused, count(answered)),
        "lost": count(~answered),
        "staleness": mean("staleness"),
        "weight": mean("weight"),
        "loss": mean("loss"),
        "last": np.where(last >= 0, last, nan),
        "heard_s": np.maximum(0.0, scene.now - most("time", np.ones(len(ended), bool))),
        **_of_journal(scene.pushes.rows, devices),
    }


def _of_journal(rows: SceneRows, devices: npt.NDArray[np.int64]) -> dict[str, FigureArray]:
    """The devices' means of what was read in the journal; nothing if nothing was."""
    if not len(rows) or not len(devices):
        return {}
    place = np.searchsorted(devices, rows["device"]).clip(max=len(devices) - 1)
    ours = devices[place] == rows["device"]
    found = {}
    for name, field in OF_JOURNAL.items():
        known = ours & np.isfinite(rows[field])
        total = np.bincount(place[known], rows[field][known], len(devices))
        found[name] = _share(total, np.bincount(place[known], minlength=len(devices)))
    return found


def _share(total: SceneRows, of: SceneRows) -> FigureArray:
    """``total / of``; NaN where that is nothing."""
    with np.errstate(invalid="ignore", over="ignore"):
        found: FigureArray = np.divide(total, of, out=np.full(len(of), nan), where=of > 0)
    return found
