"""Wire formats once more: what an update's bytes mean, and how far that is from what was made.

Nothing here comes from `fedstream/core/`: decoding that is wrong there gives other bits here.
"""

from __future__ import annotations

import numpy as np
import zstandard

from tests.chaos.arithmetic import Shape, Vector

BLOCK = 256
_MOST = {"int8": 127, "int4": 7}
_HALF = 0.5001  # of a step, and what is rounded on the way


def decoded(name: str, payload: bytes, shape: Shape) -> Vector:
    """A model in the order of its vector: parameters, buffers, controls."""
    format_, _, frame = name.partition("+")
    kind = format_.partition(":")[0]
    data = zstandard.ZstdDecompressor().decompress(payload) if frame else payload
    if kind == "f32":
        return np.frombuffer(data, np.float32)
    as_it_is = 4 * (shape.buffers + shape.controls)
    values = _values(kind, data[as_it_is:], shape.parameters)
    return np.concatenate([values, np.frombuffer(data[:as_it_is], np.float32)])


def _values(kind: str, data: bytes, count: int) -> Vector:
    if kind == "bf16":
        return _widened(data)
    if kind == "topk":
        return _scattered(data, count)
    blocks = -(-count // BLOCK)
    scales = np.repeat(np.frombuffer(data[: 4 * blocks], np.float32), BLOCK)[:count]
    rest = np.frombuffer(data[4 * blocks :], np.uint8)
    if kind == "int8":
        return scales * rest.view(np.int8).astype(np.float32)
    pairs = np.stack([rest & 15, rest >> 4], axis=1).reshape(-1)[:count]
    return scales * (pairs.astype(np.float32) - np.float32(8))


def _widened(data: bytes) -> Vector:
    halves = np.frombuffer(data, np.uint16).astype(np.uint32)
    return (halves << np.uint32(16)).view(np.float32)


def _scattered(data: bytes, count: int) -> Vector:
    """A few values, each behind a gap: whole numbers of 7 bits to a byte, the last below 128."""
    k = int.from_bytes(data[:4], "little")
    values, place = np.zeros(count, np.float32), -1
    rest = iter(data[4 + 2 * k :])
    for value in _widened(data[4 : 4 + 2 * k]):
        gap = shift = 0
        while (byte := next(rest)) >= 128:
            gap, shift = gap | (byte - 128) << shift, shift + 7
        place += 1 + (gap | byte << shift)
        values[place] = value
    return values


def feeds_back(name: str) -> bool:
    """Whether what an update in this format leaves unsent goes into the device's next one."""
    return name.startswith(("int4", "topk"))


def fits(name: str, got: Vector, made: Vector, shape: Shape, *, at_random: bool) -> bool:
    """Whether a decoded model is one that its sender may have sent that made this one.

    ``at_random``: rounded up or down, not to nearest.
    """
    format_, split = name.partition("+")[0], shape.parameters
    kind, _, share = format_.partition(":")
    if kind == "f32":
        return got.tobytes() == made.tobytes()
    if got[split:].tobytes() != made[split:].tobytes():
        return False
    x, wanted, steps = got[:split], made[:split], 1.0001 if at_random else _HALF
    if kind == "bf16":
        return bool(np.all(np.abs(x - wanted) <= steps * 2.0**-7 * np.abs(wanted)))
    if kind == "topk":
        return _are_largest(x, wanted, round(float(share) * split))
    padded = np.zeros(-(-split // BLOCK) * BLOCK, np.float32)
    padded[:split] = np.abs(wanted)
    step = np.repeat(padded.reshape(-1, BLOCK).max(axis=1) / _MOST[kind], BLOCK)[:split]
    return bool(np.all(np.abs(x - wanted) <= steps * step))


def _are_largest(x: Vector, wanted: Vector, k: int) -> bool:
    """Whether these are the k values of largest magnitude, in bfloat16, and zeros."""
    kept, sizes = x != 0, np.abs(wanted)
    return bool(
        np.count_nonzero(kept) == k
        and np.all(np.abs(x - wanted)[kept] <= _HALF * 2.0**-7 * sizes[kept])
        and sizes[kept].min() >= sizes[~kept].max(initial=0)
    )
