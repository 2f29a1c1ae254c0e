"""The formats ``int8`` and ``int4``: integers in blocks of 256 values with a scale per block.

A value v of a block becomes q = round(v / s), to nearest, with s = max|v| / 127 (int8) or
max|v| / 7 (int4), and is decoded as the float32 product s q. The bytes are

    float32[blocks] scales ++ int8[count], or two of int4 to a byte, the first in the lower half

where four bits hold q + 8. A block of zeros has the scale 0. A block with a value that is not
finite gets a scale that is not finite, so that its receiver refuses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from fedstream.core import reasons
from fedstream.core.errors import Undecodable

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedstream.core.bf16 import Dither
    from fedstream.core.layout import Floats

BLOCK = 256  # values

Bits = Literal[8, 4]
_MOST = {8: 127, 4: 7}  # the largest |q|
_EXACT = np.finfo(np.float32).smallest_normal  # smaller scales have fewer digits
_AT_ONCE = 128 * BLOCK  # values per step, so that temporaries stay in the processor's cache


def blocks(count: int) -> int:
    """The number of blocks of ``count`` values; the last may be shorter."""
    return -(-count // BLOCK)


def nbytes(count: int, bits: Bits) -> int:
    """Bytes of ``count`` values."""
    return 4 * blocks(count) + (count if bits == 8 else -(-count // 2))


def encode(
    values: Floats, bits: Bits, into: npt.NDArray[np.uint8], dither: Dither | None = None
) -> None:
    """Write scales and integers. ``dither``: for stochastic rounding instead of to nearest."""
    most, split = np.float32(_MOST[bits]), 4 * blocks(values.size)
    scales, numbers = into[:split].view("<f4"), into[split:]
    for at in range(0, values.size, _AT_ONCE):
        part = values[at : at + _AT_ONCE]
        rows = _rows(part)
        scale = np.maximum(rows.max(axis=1), -rows.min(axis=1)) / most
        scales[at // BLOCK : at // BLOCK + scale.size] = scale
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            quotients = rows / scale[:, None]
        if dither is None:
            np.rint(quotients, out=quotients)
        else:
            _drop_by(dither, quotients, part.size)
        # Quotients may be not finite, or slightly above the maximum before rounding.
        if dither is not None or not (scale >= _EXACT).all():
            quotients[~(scale > 0)] = 0
            np.clip(quotients, -most, most, out=quotients)
        with np.errstate(invalid="ignore"):  # the scale marks the block as not finite
            whole = quotients.astype(np.int8).reshape(-1)[: part.size]
        if bits == 8:
            numbers[at : at + part.size] = whole.view(np.uint8)
        else:
            numbers[at // 2 : at // 2 + -(-part.size // 2)] = _packed(whole)


def decode(data: npt.NDArray[np.uint8], bits: Bits, into: Floats) -> None:
    """Decode into ``into``.

    Raises Undecodable if the number of values differs, or if a scale is negative or not finite.
    """
    if data.size != nbytes(into.size, bits):
        raise Undecodable(
            reasons.WIRE_LENGTH,
            f"{data.size} bytes for {into.size} values of {bits} bits in blocks of {BLOCK}",
        )
    split = 4 * blocks(into.size)
    scales, numbers = np.frombuffer(data[:split], "<f4"), data[split:]
    wrong = np.flatnonzero(~(np.isfinite(scales) & (scales >= 0)))
    if wrong.size:
        raise Undecodable(
            reasons.WIRE_SCALE, f"the scale of block {wrong[0]} is {scales[wrong[0]]}"
        )
    for at in range(0, into.size, _AT_ONCE):
        part = into[at : at + _AT_ONCE]
        if bits == 8:
            part[:] = numbers[at : at + part.size].view(np.int8)
        else:
            part[:] = _unpacked(numbers[at // 2 : at // 2 + -(-part.size // 2)])[: part.size]
        here = scales[at // BLOCK : at // BLOCK + blocks(part.size)]
        whole = part.size // BLOCK * BLOCK
        rows = part[:whole].reshape(-1, BLOCK)
        with np.errstate(over="ignore"):  # checked like any other value
            np.multiply(rows, here[: len(rows), None], out=rows)
            np.multiply(part[whole:], here[-1:], out=part[whole:])


def _drop_by(dither: Dither, quotients: Floats, count: int) -> None:
    """Round up with the probability of the fractional part, else down."""
    numbers = dither.draw(count).astype(np.float32)
    numbers += np.float32(0.5)
    numbers *= np.float32(2**-16)
    quotients.reshape(-1)[:count] += numbers
    np.floor(quotients, out=quotients)


def _rows(part: Floats) -> Floats:
    """Values in one row per block, the last padded with zeros."""
    if part.size % BLOCK:
        part = np.concatenate([part, np.zeros(-part.size % BLOCK, np.float32)])
    return part.reshape(-1, BLOCK)


def _packed(numbers: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    halves = (numbers + np.int8(8)).view(np.uint8)
    if halves.size % 2:
        halves = np.append(halves, np.uint8(8))  # zero
    return halves[::2] | halves[1::2] << np.uint8(4)


def _unpacked(pairs: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    halves = np.empty(2 * pairs.size, np.uint8)
    halves[::2] = pairs & 15
    halves[1::2] = pairs >> 4
    return halves.view(np.int8) - np.int8(8)
