"""Wire formats once more: what an update's bytes mean, and how far that is from what was made.

Nothing here comes from `wire/`: decoding that is wrong there gives other bits here.
"""

from __future__ import annotations

import numpy as np
import zstandard

from tests.chaos.arithmetic import Shape, Vector

BLOCK = 256
_MOST = {"int8": 127, "int4": 7}


def decoded(name: str, payload: bytes, shape: Shape) -> Vector:
    """A model in the order of its vector: parameters, buffers, controls."""
    kind, _, frame = name.partition("+")
    data = zstandard.ZstdDecompressor().decompress(payload) if frame else payload
    if kind == "f32":
        return np.frombuffer(data, np.float32)
    as_it_is = 4 * (shape.buffers + shape.controls)
    values = _values(kind, data[as_it_is:], shape.parameters)
    return np.concatenate([values, np.frombuffer(data[:as_it_is], np.float32)])


def _values(kind: str, data: bytes, count: int) -> Vector:
    if kind == "bf16":
        halves = np.frombuffer(data, np.uint16).astype(np.uint32)
        return (halves << np.uint32(16)).view(np.float32)
    blocks = -(-count // BLOCK)
    scales = np.repeat(np.frombuffer(data[: 4 * blocks], np.float32), BLOCK)[:count]
    rest = np.frombuffer(data[4 * blocks :], np.uint8)
    if kind == "int8":
        return scales * rest.view(np.int8).astype(np.float32)
    pairs = np.stack([rest & 15, rest >> 4], axis=1).reshape(-1)[:count]
    return scales * (pairs.astype(np.float32) - np.float32(8))


def fits(name: str, got: Vector, made: Vector, shape: Shape, *, at_random: bool) -> bool:
    """Whether a decoded model is one that its sender may have sent that made this one.

    ``at_random``: rounded up or down, not to nearest.
    """
    kind, split = name.partition("+")[0], shape.parameters
    if kind == "f32":
        return got.tobytes() == made.tobytes()
    if got[split:].tobytes() != made[split:].tobytes():
        return False
    x, wanted, steps = got[:split], made[:split], 1.0001 if at_random else 0.5001
    if kind == "bf16":
        return bool(np.all(np.abs(x - wanted) <= steps * 2.0**-7 * np.abs(wanted)))
    if kind == "int4":
        return True  # with what earlier ones left unsent: nothing is known of it here
    padded = np.zeros(-(-split // BLOCK) * BLOCK, np.float32)
    padded[:split] = np.abs(wanted)
    step = np.repeat(padded.reshape(-1, BLOCK).max(axis=1) / _MOST[kind], BLOCK)[:split]
    return bool(np.all(np.abs(x - wanted) <= steps * step))
