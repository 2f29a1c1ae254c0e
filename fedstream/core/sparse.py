"""The format ``topk``: the k values of largest magnitude and their places; others are zero.

    uint32 k ++ bfloat16[k] values ++ k gaps

A gap is the number of values left out before a kept one, in LEB128: seven bits per byte, lowest
first, the highest bit set in all bytes but the last, in the shortest form. So indices rise by
construction, and none occurs twice.

top_k of *Sparsified SGD with Memory* (Stich, Cordonnier, Jaggi 2018), definition 2.2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedstream.core import bf16, reasons
from fedstream.core.errors import Undecodable

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from fedstream.core.layout import Floats

_HEAD = 4  # bytes of k
_LONGEST = 5  # bytes of a gap: 35 bits
_AT_ONCE = 1 << 16  # bytes of gaps


def kept(count: int, share: float) -> int:
    """The number of kept values, k: a share of ``count``, rounded; at least 1 if there are any."""
    return min(count, max(1, round(share * count)))


def nbytes_between(count: int, share: float) -> tuple[int, int]:
    """The fewest and the most bytes of ``count`` values if at most ``share`` are kept."""
    k = kept(count, share)
    # A gap takes a second byte from 128 on and a third from 16,384 on, so at most one extra byte
    # for each 128 values left out.
    return _HEAD, _HEAD + k * 3 + (count - k) // 128


def encode(values: Floats, share: float) -> npt.NDArray[np.uint8]:
    """Encode values. Of equal magnitudes the first are kept; NaN counts as the largest."""
    k = kept(values.size, share)
    places = _largest(values, k)
    gaps = np.diff(places, prepend=-1) - 1
    head = np.array([k], "<u4").view(np.uint8)
    halves = np.empty(bf16.nbytes(k), np.uint8)
    bf16.encode(values[places], halves)
    return np.concatenate([head, halves, _leb128(gaps)])


def decode(data: npt.NDArray[np.uint8], share: float, into: Floats) -> None:
    """Decode into ``into``, with zero at all other places.

    Raises Undecodable unless there are at most ``share`` values, at different places.
    """
    if data.size < _HEAD:
        raise Undecodable(reasons.WIRE_LENGTH, f"{data.size} bytes: too few for a count")
    k, most = int(np.frombuffer(data[:_HEAD], "<u4")[0]), kept(into.size, share)
    if k > most:
        raise Undecodable(reasons.WIRE_LENGTH, f"{k} values: at most {most} may be kept")
    split = _HEAD + bf16.nbytes(k)
    if data.size < split:
        raise Undecodable(reasons.WIRE_LENGTH, f"{data.size} bytes for {k} values")
    halves, gaps = data[_HEAD:split], data[split:]
    into[:] = 0
    found, last = 0, -1
    # In parts, as 64-bit integers take far more memory than the bytes.
    for part in _parts(gaps):
        places = np.cumsum(_gaps(part) + 1) + last
        if found + places.size > k:
            break
        if places[-1] >= into.size:
            raise Undecodable(reasons.WIRE_INDEX, f"place {places[-1]} of {into.size} values")
        values = np.empty(places.size, np.float32)
        bf16.decode(halves[2 * found : 2 * (found + places.size)], values)
        into[places] = values
        found, last = found + places.size, int(places[-1])
    ends = int(np.count_nonzero(gaps < 128))
    if ends != k or (gaps.size and gaps[-1] >= 128):
        raise Undecodable(reasons.WIRE_LENGTH, f"{ends} places for {k} values")


def _largest(values: Floats, k: int) -> npt.NDArray[np.int64]:
    """The places of the k largest magnitudes, in order."""
    if k >= values.size:
        return np.arange(values.size)
    sizes = values.view("<u4") & np.uint32(0x7FFFFFFF)  # in the order of magnitudes, NaN last
    least = np.partition(sizes, -k)[-k]
    places = np.flatnonzero(sizes >= least)
    if surplus := places.size - k:
        equal = np.flatnonzero(sizes[places] == least)
        places = np.delete(places, equal[-surplus:])
    return places


def _leb128(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
    rest = numbers.astype(np.uint64)
    longest = max(1, -(-int(numbers.max(initial=0)).bit_length() // 7))
    table = np.zeros((numbers.size, longest), np.uint8)
    used = np.zeros((numbers.size, longest), bool)
    for place in range(longest):
        used[:, place] = (rest > 0) | (place == 0)
        table[:, place] = rest & np.uint64(127)
        rest >>= np.uint64(7)
        table[:, place] |= (rest > 0).astype(np.uint8) << np.uint8(7)
    return table[used]


def _parts(data: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    """Split the bytes of gaps into parts of whole gaps, without an unfinished one at the end.

    Raises Undecodable for a too long gap.
    """
    at = 0
    while at < data.size:
        some = data[at : at + _AT_ONCE]
        ends = np.flatnonzero(some < 128)
        if not ends.size:
            if some.size > _LONGEST:
                raise Undecodable(reasons.WIRE_INDEX, f"a gap of {some.size} bytes or more")
            return
        yield some[: ends[-1] + 1]
        at += int(ends[-1]) + 1


def _gaps(data: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Decode whole gaps. Raises Undecodable if a gap isn't in the shortest form or is too long."""
    ends = np.flatnonzero(data < 128)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _LONGEST or (data[ends[lengths > 1]] == 0).any():
        raise Undecodable(reasons.WIRE_INDEX, "a gap with more bytes than it needs")
    gaps: npt.NDArray[np.int64] = data[starts].astype(np.int64) & 127
    for place in range(1, longest):
        there = np.flatnonzero(lengths > place)
        gaps[there] |= (data[starts[there] + place].astype(np.int64) & 127) << 7 * place
    return gaps
