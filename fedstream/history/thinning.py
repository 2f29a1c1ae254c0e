"""Fewer points for a curve than there are values, with all of its extremes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

POINTS = 1000  # of a curve: more than a screen has columns of pixels to tell apart


def thinned(*curves: Sequence[float] | npt.NDArray[np.float64], most: int = POINTS) -> list[int]:
    """The places to show of curves of one length, ascending: about ``most``, or all if fewer.

    Of each part of a curve, the least and the greatest value are shown, so a single value that
    stands out always is; and both ends.
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
