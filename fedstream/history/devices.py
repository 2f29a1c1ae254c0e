"""What each device contributed, and which devices stand out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, nan

import numpy as np
import numpy.typing as npt

from fedstream.broker.messages import OUTCOMES
from fedstream.history.columns import Columns, RowArray
from fedstream.journal.shares import Share

OUTLIER = 3.5  # robust z-score; Iglewicz and Hoaglin, How to Detect and Handle Outliers (1993)
LEAST_DIFFERENCE = 0.1  # of an outlier from the median, relative to the median
_NORMAL = 1.4826  # a normal distribution's standard deviation, in median absolute deviations
_MEAN = 1.2533  # the same in mean absolute deviations

DEVICE_COLUMNS = (
    ("device", "device", ""),
    ("used", "used", "updates"),
    ("refused", "refused", "updates"),
    ("refused_share", "refused", "%"),
    ("staleness", "staleness", "versions, mean"),
    ("most_stale", "most stale", "versions"),
    ("weight", "weight", "mean"),
    ("loss", "loss", "mean"),
    ("sent", "norm", "sent, mean"),
    ("norm", "distance", "mean"),
    ("largest", "distance", "most"),
    ("cosine", "cosine", "mean"),
    ("bytes", "size", "mean"),
    ("last", "last seen", "version"),
)
"""Of the table of devices: the figure, its name, its unit."""

JUDGED = (
    "staleness", "weight", "loss", "sent", "norm", "largest", "cosine", "refused_share", "bytes"
)  # fmt: skip
"""The figures for which a device is compared with the others."""


@dataclass(frozen=True)
class DeviceRow:
    """A device's part in a run. Means are over its used updates; None: there are none."""

    device: int
    used: int
    refused: int
    refused_share: float | None  # of all its updates
    staleness: float | None  # mean, versions
    most_stale: int | None
    weight: float | None  # mean
    loss: float | None  # mean, of training
    sent: float | None  # mean norm of what was sent, a model or a delta; None: not measured either
    norm: float | None  # mean of how far its updates alone would move the parameters
    largest: float | None  # of these norms
    cosine: float | None  # mean, to the model's later movement; None: not measured either
    bytes: float | None  # mean of an update's, as sent
    last: int | None  # the newest version when its last update was decided
    scores: dict[str, float] = field(default_factory=dict)  # robust z-scores, by figure

    @property
    def outliers(self) -> list[str]:
        """The figures in which it stands out."""
        return [name for name, score in self.scores.items() if abs(score) > OUTLIER]


def devices_of(columns: Columns, shares: Mapping[int, Share] | None = None) -> list[DeviceRow]:
    """A row for each device that sent an update, by number.

    ``shares``: what models say of its updates, if that was measured; norms are then these.
    """
    updates, used = columns.updates, columns.used
    order = np.argsort(updates["device"], kind="stable")
    numbers, begins = np.unique(updates["device"][order], return_index=True)
    refused = OUTCOMES.index("refused")
    found: list[DeviceRow] = []
    for device, places in zip(numbers.tolist(), np.split(order, begins[1:]), strict=True):
        mine = updates[places]
        good = mine[used[places]]
        bad = int((mine["outcome"] == refused).sum())
        norm, largest, sent, cosine = _mean(good, "norm"), _most(good, "norm"), None, None
        if shares is not None and device in shares:
            apart, cosine = shares[device].distance, shares[device].cosine.mean
            norm, largest, sent = apart.mean, apart.most, shares[device].norm.mean
        found.append(
            DeviceRow(
                device, len(good), bad, bad / len(mine), _mean(good, "staleness"),
                int(good["staleness"].max()) if len(good) else None, _mean(good, "weight"),
                _mean(good, "loss"), sent, norm, largest, cosine, _mean(mine, "bytes"),
                int(mine["version"][-1]),
            )
        )  # fmt: skip
    for name in JUDGED:
        values = [getattr(row, name) for row in found]
        for row, score in zip(found, robust_scores(values), strict=True):
            if isfinite(score):
                row.scores[name] = float(score)
    return found


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
    """▲ or ▼ for an outlier: what its colour says, for those who don't see it."""
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


def _mean(rows: RowArray, name: str) -> float | None:
    known = _known(rows, name)
    return float(known.mean()) if len(known) else None


def _most(rows: RowArray, name: str) -> float | None:
    known = _known(rows, name)
    return float(known.max()) if len(known) else None


def _known(rows: RowArray, name: str) -> RowArray:
    values: RowArray = rows[name]
    return values[np.isfinite(values)]
