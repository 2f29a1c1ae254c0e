"""Random numbers to round by, up or down, so that the mean of many roundings is exact.

A device that sends its model sends what it was given, moved a little. Rounded to nearest, both
would be pulled back to the same values again and again, and moves of less than half a step would be
lost for good (decision 47 has figures). Rounded like this, each move has its effect in the mean:
stochastic rounding, as in *Deep Learning with Limited Numerical Precision* (Gupta and others 2015),
section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt


class Dither:
    """Uniform numbers of 16 bits, the same for the same seed on every machine."""

    def __init__(self, seed: int) -> None:
        self._source = np.random.SFC64(seed)  # numpy promises that its stream never changes

    def draw(self, count: int) -> npt.NDArray[np.uint16]:
        """The next ``count`` numbers, and as many more as a word has room for are skipped."""
        words: npt.NDArray[np.uint64] = self._source.random_raw(-(-count // 4))
        return words.astype("<u8", copy=False).view("<u2")[:count]
