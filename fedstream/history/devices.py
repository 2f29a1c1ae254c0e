"""Each device's contribution to a run, recorded or live, and the devices that stand out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite, nan
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.core.messages import OUTCOMES
from fedstream.history.table import RowArray, is_used_row
from fedstream.journal.contributions import DeviceContribution

OUTLIER = 3.5  # robust z-score; Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993)
LEAST_DIFFERENCE = 0.1  # of an outlier from the median, relative to the median
_NORMAL = 1.4826  # a normal distribution's standard deviation, in median absolute deviations
_MEAN = 1.2533  # the same in mean absolute deviations

DEVICE_COLUMNS = (
    ("device", "device", ""),
    ("refused_share", "refused", "%"),
    ("sent", "norm", "sent, mean"),
    ("norm", "distance", "mean"),
    ("largest", "distance", "most"),
    ("cosine", "cosine", "mean"),
    ("loss", "loss", "mean"),
    ("weight", "weight", "mean"),
    ("staleness", "staleness", "mean"),
    ("most_stale", "staleness", "most"),
    ("used", "used", "updates"),
    ("refused", "refused", "updates"),
    ("lost", "given up", "tasks"),
    ("bytes", "size", "mean"),
    ("last", "seen", "version"),
    ("heard_s", "seen", "s ago"),
)
"""The columns of the table of devices: key, name, unit. Those that expose a device come first."""

JUDGED = (
    "refused_share",
    "sent",
    "norm",
    "largest",
    "cosine",
    "loss",
    "weight",
    "staleness",
    "bytes",
)
"""The figures for which a device is compared with the others."""

_WHOLE = frozenset(("used", "refused", "most_stale", "lost", "last"))

FigureArray: TypeAlias = npt.NDArray[np.float64]
"""A figure of each device; NaN: not known."""


@dataclass(frozen=True)
class DeviceRow:
    """A device's figures by column; None: not known."""

    device: int
    figures: Mapping[str, float | None]
    scores: Mapping[str, float]  # robust z-scores, by column

    @property
    def outliers(self) -> list[str]:
        """The columns in which the device stands out."""
        return [name for name, score in self.scores.items() if abs(score) > OUTLIER]


@dataclass(frozen=True)
class DeviceTable:
    """The devices' figures. Means are over used updates."""

    devices: npt.NDArray[np.int64]  # numbers, ascending
    figures: Mapping[str, FigureArray]  # by column

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """The columns that have a value."""
        return [one for one in DEVICE_COLUMNS if one[0] in ("device", *self.figures)]

    @cached_property
    def scores(self) -> dict[str, FigureArray]:
        """Robust z-scores, by column."""
        return {name: robust_scores(self.figures[name]) for name in JUDGED if name in self.figures}

    def rows(
        self, sort: str = "device", *, most: int | None = None, only: int | None = None
    ) -> list[DeviceRow]:
        """The devices, sorted; at most ``most`` of them, or ``only`` one.

        ``sort``: a column, with - before it to descend; devices without a value come last. With an
        unknown column, devices that stand out in most columns come first.
        """
        key, descends = sort.removeprefix("-"), sort.startswith("-")
        if only is not None:
            order = np.flatnonzero(self.devices == only)
        elif key == "device":
            order = np.arange(len(self.devices))[:: -1 if descends else 1]
        elif key in self.figures:  # NaN comes last, whichever way the others are sorted
            values = self.figures[key]
            order = np.argsort(np.negative(values) if descends else values, kind="stable")
        else:
            odd = sum((np.abs(one) > OUTLIER for one in self.scores.values()), start=np.zeros(1))
            order = np.argsort(np.negative(np.broadcast_to(odd, len(self.devices))), kind="stable")
        return [self._row(int(place)) for place in order[:most]]

    def _row(self, place: int) -> DeviceRow:
        figures = {name: _known(values[place]) for name, values in self.figures.items()}
        for name in _WHOLE.intersection(figures):
            value = figures[name]
            figures[name] = None if value is None else int(value)
        scores = {name: float(values[place]) for name, values in self.scores.items()}
        there = {name: score for name, score in scores.items() if isfinite(score)}
        return DeviceRow(int(self.devices[place]), figures, there)


def devices_of(
    rows: RowArray,
    *,
    shares: Mapping[int, DeviceContribution] | None = None,
    now: float | None = None,
) -> DeviceTable:
    """The devices that ``rows`` of updates name.

    ``shares``: figures of each device's updates from the models, if these were measured.
    ``now``: for a live run, the time by the clock of the rows.
    """
    rows = rows[rows["device"] >= 0]
    devices, place = np.unique(rows["device"], return_inverse=True)
    used, refused = is_used_row(rows), rows["outcome"] == OUTCOMES.index("refused")
    answered, length = used | refused, len(devices)

    def count(which: RowArray) -> FigureArray:
        return np.bincount(place[which], minlength=length).astype(np.float64)

    def known(name: str) -> RowArray:
        values = rows[name]
        there: RowArray = values >= 0 if values.dtype.kind == "i" else np.isfinite(values)
        return there

    def mean(name: str, which: RowArray) -> FigureArray:
        which = which & known(name)
        return _ratio(np.bincount(place[which], rows[name][which], length), count(which))

    def most(name: str, which: RowArray) -> FigureArray:
        which, found = which & known(name), np.full(length, nan)
        np.fmax.at(found, place[which], rows[name][which])
        return found

    figures = {
        "used": count(used),
        "refused": count(refused),
        "lost": count(~answered),
        "refused_share": _ratio(count(refused), count(answered)),
        **{name: mean(name, used) for name in ("norm", "loss", "weight", "staleness")},
        "largest": most("norm", used),
        "most_stale": most("staleness", used),
        "bytes": mean("bytes", answered),
        "last": most("version", used if now else answered),
        **(_of_shares(shares, devices) if shares is not None else {}),
    }
    if now is not None:
        figures["heard_s"] = np.maximum(0.0, now - most("time", np.ones(len(rows), bool)))
    elif not figures["lost"].any():
        del figures["lost"]
    shown = [key for key, _, _ in DEVICE_COLUMNS[1:] if key in figures]
    return DeviceTable(
        devices, {key: figures[key] for key in shown if np.isfinite(figures[key]).any()}
    )


def _of_shares(
    shares: Mapping[int, DeviceContribution], devices: RowArray
) -> dict[str, FigureArray]:
    found = [shares.get(int(device), DeviceContribution()) for device in devices]
    values = {
        "sent": [one.norm.mean for one in found],
        "norm": [one.distance.mean for one in found],
        "largest": [one.distance.most for one in found],
        "cosine": [one.cosine.mean for one in found],
    }
    return {name: np.array(one, np.float64) for name, one in values.items()}  # None: NaN


def _ratio(total: RowArray, of: RowArray) -> FigureArray:
    """``total / of``; NaN where ``of`` is 0 or less."""
    with np.errstate(invalid="ignore", over="ignore"):
        found: FigureArray = np.divide(total, of, out=np.full(len(of), nan), where=of > 0)
    return found


def _known(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def robust_scores(values: Sequence[float | None] | RowArray) -> npt.NDArray[np.float64]:
    """How far each value is from the median, in robust standard deviations; NaN for a missing one.

    The deviation comes from the median absolute deviation; if that is zero, because most values are
    the same, from the mean absolute deviation. It is never so small that a value within 10% of the
    median would be an outlier, because devices that hardly differ have none.
    """
    found = np.array(values, np.float64)  # None: NaN
    there = np.isfinite(found)
    scores = np.full(len(found), nan)
    if there.any():
        with np.errstate(over="ignore", invalid="ignore"):
            median = np.median(found[there])
            apart = found[there] - median
            unit = _NORMAL * np.median(np.abs(apart)) or _MEAN * np.abs(apart).mean()
            unit = max(unit, LEAST_DIFFERENCE * abs(median) / OUTLIER)
            scores[there] = apart / unit if unit else 0.0
    return scores


def shade_of_score(score: float | None) -> int:
    """The shade of a robust z-score: 0 is usual, 1 to 3 more and more above, -1 to -3 below."""
    if score is None:
        return 0
    shade = 3 if abs(score) > OUTLIER else 2 if abs(score) > OUTLIER / 2 else int(abs(score) > 1)
    return shade if score > 0 else -shade


def mark_of_score(score: float | None) -> str:
    """▲ or ▼ for an outlier, so that colour is not the only sign."""
    if score is None or abs(score) <= OUTLIER:
        return ""
    return "▲" if score > 0 else "▼"


def style_of_score(score: float | None) -> str:
    """The classes that a figure has in the style sheet."""
    shade = shade_of_score(score)
    if not shade:
        return ""
    name = f"heat {'above' if shade > 0 else 'below'}{abs(shade)}"
    return f"{name} outlier" if mark_of_score(score) else name
