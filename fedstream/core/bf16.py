"""bfloat16: the upper half of a float32, rounded to nearest, ties to even, or at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstream.core import reasons
from fedstream.core.errors import Undecodable

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.core.layout import Floats

_AT_ONCE = 1 << 15  # elements per step, so that temporaries stay in the processor's cache


class Dither:
    """Random numbers for stochastic rounding, whose mean error is zero.

    The numbers are uniform, have 16 bits, and depend only on the seed.

    A device that sends its model sends the received model with small changes. Rounding to nearest
    would lose every change of less than half a step for good (decision 47 has figures). Stochastic
    rounding keeps each change in the mean: *Deep Learning with Limited Numerical Precision* (Gupta
    and others 2015), section 3.1.
    """

    def __init__(self, seed: int) -> None:
        self._source = np.random.SFC64(seed)  # numpy promises that its stream never changes

    def draw(self, count: int) -> npt.NDArray[np.uint16]:
        """The next ``count`` numbers; the rest of the last generated word is skipped."""
        words: npt.NDArray[np.uint64] = self._source.random_raw(-(-count // 4))
        return words.astype("<u8", copy=False).view("<u2")[:count]


def nbytes(count: int) -> int:
    """Bytes of ``count`` values."""
    return 2 * count


def encode(values: Floats, into: npt.NDArray[np.uint8], dither: Dither | None = None) -> None:
    """Write the rounded values: a relative error of at most 2^-8; NaN stays NaN.

    ``dither``: for stochastic rounding; the error is then at most 2^-7, and zero in the mean.
    """
    halves = into.view("<u2")
    for at in range(0, values.size, _AT_ONCE):
        part = values[at : at + _AT_ONCE]
        bits = part.view("<u4")
        rounded: npt.NDArray[Any]
        if dither is None:
            rounded = bits >> 16
            rounded &= 1
            rounded += 0x7FFF
            rounded += bits
        else:
            rounded = bits + dither.draw(part.size)
        rounded >>= 16
        if (unknown := np.isnan(part)).any():  # rounding could carry a NaN over into infinity
            rounded[unknown] = bits[unknown] >> 16 | 0x40
        halves[at : at + part.size] = rounded


def decode(data: npt.NDArray[np.uint8], into: Floats) -> None:
    """Decode exactly into ``into``. Raises Undecodable if the number of values differs."""
    if data.size != nbytes(into.size):
        raise Undecodable(
            reasons.WIRE_LENGTH, f"{data.size} bytes for {into.size} values in bfloat16"
        )
    bits = into.view("<u4")
    np.copyto(bits, np.frombuffer(data, "<u2"), casting="safe")
    np.left_shift(bits, 16, out=bits)
