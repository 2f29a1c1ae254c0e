"""Correlated noise: each sum's noise takes back a part of the noise of the sums before it.

A model adds up its versions' sums, so what counts is how much noise has added up. With z_t drawn
for the t-th sum of a run and coefficients 1 = c_0 > c_1 > ... > c_{b-1}, the noise is
n_t = z_t - sum_{0 < i < b} c_i n_{t-i}: C n = z, where C is a lower triangular Toeplitz matrix of
b bands. The c_i are those of (1 - x)**(-1/2), whose square is the series of summing up (Kalinin and
Lampert 2024, arXiv 2405.13763).

Coefficients are integers in steps of 2**-bits, z is a discrete Gaussian in such steps, and n_t is
rounded to units *before* the sums after it take it back. So all arithmetic is exact, and with the
sums x the server's view x + n is a function of C x + z, which is a discrete Gaussian mechanism on
integers (proof in docs/privacy.md). A device that takes part at least b sums apart changes C x by
the norm of c times its update at each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

MOST_BANDS: Final = 16
_BITS: Final = 8  # at 16 bands, the coefficients still differ
_FOLLOWED: Final = 400  # sums; the part of z that is left after them is below 2**-52


@dataclass(frozen=True)
class Correlation:
    """The matrix C of a number of bands; one band: independent noise, in units."""

    bands: int

    @property
    def bits(self) -> int:
        """The coefficients and z count steps of ``2**-bits`` units."""
        return _BITS if self.bands > 1 else 0

    @cached_property
    def coefficients(self) -> tuple[int, ...]:
        """c_0, c_1, ... in steps: binomial(2i, i) / 4**i, rounded."""
        doubled = (math.comb(2 * i, i) * (2 << self.bits) // 4**i for i in range(self.bands))
        return tuple((one + 1) // 2 for one in doubled)

    @property
    def norm(self) -> float:
        """Steps by which an update of norm 1 changes C x at most; never rounded down."""
        square = sum(one**2 for one in self.coefficients)
        root = math.isqrt(square)
        return float(root) if root**2 == square else math.sqrt(square) * (1 + 2**-50)

    @cached_property
    def _answers(self) -> list[float]:
        """What a z of one unit adds to this noise and the next ones: the first column of C^-1."""
        _, *others = (one / self.coefficients[0] for one in self.coefficients)
        found = [1.0]
        for _ in range(_FOLLOWED):
            recent = reversed(found[-len(others) :] if others else [])
            found.append(-sum(c * one for c, one in zip(others, recent, strict=False)))
        return found

    @property
    def gain(self) -> float:
        """Deviation of a sum's noise in units, for a z of deviation 1 unit."""
        return math.hypot(*self._answers)

    @property
    def rounding(self) -> float:
        """Most that rounding changes a value of a sum's noise, in units."""
        return sum(map(abs, self._answers)) / 2 if self.bands > 1 else 0.0

    def noise(
        self, drawn: NDArray[np.int64], earlier: Iterable[NDArray[np.int64]]
    ) -> NDArray[np.int64]:
        """A sum's noise in units, from its z in steps and the noise of the sums before it.

        ``earlier``: newest first; those that are missing are not taken back. Overwrites ``drawn``.
        """
        for factor, one in zip(self.coefficients[1:], earlier, strict=False):
            drawn -= factor * one
        drawn += (1 << self.bits) >> 1
        drawn >>= self.bits
        return drawn


@lru_cache
def correlation(bands: int) -> Correlation:
    """The correlation of so many bands."""
    return Correlation(bands)
