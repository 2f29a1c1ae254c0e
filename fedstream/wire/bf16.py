"""bfloat16: the upper half of a float32, rounded to nearest, ties to even, or at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedstream.broker import reasons
from fedstream.wire.refused import Undecodable

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.broker.layout import Floats
    from fedstream.wire.dither import Dither

_AT_ONCE = 1 << 15  # elements: what an encoder holds meanwhile stays in the processor's cache


def nbytes(count: int) -> int:
    """Bytes of ``count`` values."""
    return 2 * count


def encode(values: Floats, into: npt.NDArray[np.uint8], dither: Dither | None = None) -> None:
    """Write the rounded values: a relative error of at most 2^-8; NaN stays NaN.

    ``dither``: to round by; the error is then at most 2^-7, and zero in the mean.
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
    """Write the values into ``into``, exactly. Raises Undecodable if their number differs."""
    if data.size != nbytes(into.size):
        raise Undecodable(
            reasons.WIRE_LENGTH, f"{data.size} bytes for {into.size} values in bfloat16"
        )
    bits = into.view("<u4")
    np.copyto(bits, np.frombuffer(data, "<u2"), casting="safe")
    np.left_shift(bits, 16, out=bits)
