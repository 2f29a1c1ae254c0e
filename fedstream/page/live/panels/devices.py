"""What each device did lately, as far as a scene knows, and which devices stand out."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any, TypeAlias

import numpy as np

from fedstream.broker.messages import OUTCOMES
from fedstream.page.devices import (
    OUTLIER,
    mark_of_score,
    robust_scores,
    shade_of_score,
    style_of_score,
)
from fedstream.page.live.scene import Scene, SceneRows
from fedstream.page.templating import cell_of

SHOWN = 50  # devices in the table: the first by the column that it is sorted by

COLUMNS = (
    ("device", "device", ""),
    ("used", "used", "updates"),
    ("refused", "refused", "updates"),
    ("refused_share", "refused", "% of updates"),
    ("lost", "given up", "tasks"),
    ("staleness", "staleness", "versions, mean"),
    ("weight", "weight", "mean"),
    ("loss", "loss", "mean"),
    ("last", "last version", ""),
    ("heard_s", "last word", "seconds ago"),
)
"""Of the table of devices: the figure, its name, its unit."""

JUDGED = (
    "refused_share", "staleness", "weight", "loss"
)  # fmt: skip
"""The figures for which a device is compared with the others."""

_USED = [OUTCOMES.index(name) for name in ("applied", "buffered")]
_REFUSED = OUTCOMES.index("refused")


Figures: TypeAlias = dict[str, float | None]


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
    rows = _figures(scene)
    scores: dict[str, dict[int, float]] = {}
    for name in JUDGED:
        found = robust_scores([row.get(name) for row in rows.values()])
        scores[name] = {
            device: score for device, score in zip(rows, found, strict=True) if isfinite(score)
        }
    key = sort.removeprefix("-")
    order = sorted(rows)
    if key in {name for name, _, _ in COLUMNS}:
        order.sort(key=lambda d: rows[d].get(key) or 0.0, reverse=sort.startswith("-"))
        order.sort(key=lambda d: rows[d].get(key) is None)
    else:
        sort = ""
        odd = {d: sum(abs(s.get(d, 0.0)) > OUTLIER for s in scores.values()) for d in rows}
        order.sort(key=lambda d: -odd[d])
    shown = order[:SHOWN] if only is None else [only] if only in rows else []
    lines = tuple(
        DeviceHeatRow(
            device,
            tuple(
                DeviceCell(
                    name, rows[device].get(name), score := scores.get(name, {}).get(device),
                    shade_of_score(score),
                )
                for name, _, _ in COLUMNS[1:]
            ),
        )
        for device in shown
    )  # fmt: skip
    return DeviceHeat(lines, len(rows), sort, len(scene.ended))


def _figures(scene: Scene) -> dict[int, Figures]:
    """The figures of each device that ended a task, by its number."""
    ended = scene.ended[scene.ended["device"] >= 0]
    devices, place = np.unique(ended["device"], return_inverse=True)
    used = np.isin(ended["outcome"], _USED)
    answered = used | (ended["outcome"] == _REFUSED)

    def count(which: SceneRows) -> SceneRows:
        return np.bincount(place[which], minlength=len(devices))

    def mean(name: str) -> list[float | None]:
        known = used & np.isfinite(ended[name])
        if name == "staleness":
            known &= ended[name] >= 0
        total = np.bincount(place[known], ended[name][known], len(devices))
        return [t / n if n else None for t, n in zip(total, count(known), strict=True)]

    def most(name: str, which: SceneRows) -> SceneRows:
        found = np.full(len(devices), -1.0)
        np.maximum.at(found, place[which], ended[name][which])
        return found

    refused, total = count(answered & ~used), count(answered)
    columns: dict[str, list[Any]] = {
        "device": devices.tolist(),
        "used": count(used).tolist(),
        "refused": refused.tolist(),
        "refused_share": [r / n if n else None for r, n in zip(refused, total, strict=True)],
        "lost": count(~answered).tolist(),
        "staleness": mean("staleness"),
        "weight": mean("weight"),
        "loss": mean("loss"),
        "last": [int(v) if v >= 0 else None for v in most("version", used)],
        "heard_s": [max(0.0, scene.now - t) for t in most("time", np.ones(len(ended), bool))],
    }
    rows = zip(*columns.values(), strict=True)
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}
