"""Heat maps as tables: every cell has its number, and a colour that only repeats it.

The page's style sheet has the colours: one hue whose lightness alone says how much, so that nobody
needs to tell hues apart, and for what is far from usual a second hue and a sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log

import numpy as np

from fedstream.history.display import duration
from fedstream.history.live.scene import SceneRows
from fedstream.history.timeline import BINS

LEVELS = 6  # shades above an empty cell
COLUMNS = 24  # slices of time at most: the newest fit on a screen
_NICE_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


@dataclass(frozen=True)
class HeatCell:
    """A number and its shade, from 0 (empty) to ``LEVELS``."""

    value: int
    level: int


@dataclass(frozen=True)
class HeatMap:
    """SceneRows of counts over slices of time."""

    title: str
    columns: tuple[str, ...]  # when each slice begins, as minutes and seconds of the run
    rows: tuple[tuple[str, tuple[HeatCell, ...]], ...]  # label, cells
    slice_s: float


def level_of(value: float, most: float) -> int:
    """The shade of a value: by its logarithm, so that a single update beside thousands shows."""
    if value <= 0 or most <= 0:
        return 0
    return max(1, min(LEVELS, ceil(LEVELS * log(1 + value) / log(1 + most))))


def staleness_over_time(
    times: SceneRows, staleness: SceneRows, *, began: float, now: float
) -> HeatMap:
    """How many updates were how stale, in slices of time.

    ``times`` of updates and ``began``, of the run: seconds since 1970. The slices are as short as
    the time that the updates span allows; they begin at multiples of their width, so that they
    don't move while the run goes on.
    """
    at = (times - began).clip(0.0, max(0.0, now - began))
    end = max(0.0, now - began)
    first = float(at.min()) if len(at) else end
    width = slice_of(end - first)
    last = int(end // width)
    begin = max(int(first // width), last - COLUMNS + 1)
    place = (at // width).astype(int) - begin
    kind = np.searchsorted([low for _, low, _ in BINS], staleness, "right") - 1
    counts = np.zeros((len(BINS), last - begin + 1), int)
    np.add.at(counts, (kind[place >= 0], place[place >= 0]), 1)
    seen = np.flatnonzero(counts.any(axis=1))
    most = int(counts.max())
    return HeatMap(
        "Staleness over time",
        tuple(duration(width * (begin + n)) for n in range(counts.shape[1])),
        tuple(
            (label, tuple(HeatCell(value, level_of(value, most)) for value in row))
            for (label, _, _), row in zip(BINS[: seen[-1] + 1], counts.tolist(), strict=False)
        )
        if len(seen)
        else (),
        width,
    )


def slice_of(seconds: float) -> float:
    """A handy width for which ``seconds`` take at most ``COLUMNS`` slices."""
    for width in _NICE_S:
        if seconds / width <= COLUMNS - 1:
            return width
    return float(_NICE_S[-1] * ceil(seconds / (COLUMNS - 1) / _NICE_S[-1]))
