"""Vector arithmetic: mixing two vectors, and norms.

Replay must give the same bits on every machine, so models are computed only by separate
element-wise float32 subtractions, multiplications and additions: their results are the same
everywhere, unlike those of fused or reduced operations. Blocks keep the passes in the cache;
intermediate results are kept in the result's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fedstream.core.layout import Floats, Model

BLOCK = 1 << 16  # floats: three arrays of 256 KiB stay in the second-level cache


def mix(x: Model, new: Model, weight: float, into: Model) -> None:
    """into = x + weight (new - x), which is (1 - weight) x + weight new; ``into`` may be either.

    Floating-point buffers mix like parameters, integers by :func:`count`.
    """
    toward(x.floats, new.floats, weight, into=into.floats)
    count(x, new, into)


def count(x: Model, new: Model, into: Model) -> None:
    """Put the integers of ``new`` into ``into``, except that counters never fall below ``x``'s.

    Only ``into.integers`` is written; ``into`` may be either.
    """
    at = x.layout.counters
    counted = np.maximum(x.integers[at], new.integers[at])
    into.integers[:] = new.integers
    into.integers[at] = counted


def toward(x: Floats, new: Floats, weight: float, into: Floats) -> None:
    """into = x + weight (new - x), element by element; ``into`` may be either."""
    w = np.float32(weight)
    for part, step in _steps(x, into):
        np.subtract(new[part], x[part], out=step)
        np.multiply(step, w, out=step)
        np.add(x[part], step, out=into[part])


def add(x: Floats, direction: Floats, weight: float, into: Floats) -> None:
    """into = x + weight direction, element by element; ``into`` may be either."""
    w = np.float32(weight)
    for part, step in _steps(x, into):
        np.multiply(direction[part], w, out=step)
        np.add(x[part], step, out=into[part])


def _steps(x: Floats, into: Floats) -> Iterator[tuple[slice, Floats]]:
    """The blocks of a vector, each with memory for a step: in ``into``, unless that is ``x``."""
    apart = np.empty(min(BLOCK, x.size), np.float32) if np.may_share_memory(x, into) else None
    for start in range(0, x.size, BLOCK):
        part = slice(start, min(start + BLOCK, x.size))
        yield part, into[part] if apart is None else apart[: part.stop - start]


def distance(a: Floats, b: Floats) -> float:
    """The Euclidean norm of a - b; see :func:`norm`."""
    if not a.size:  # a model without buffers or controls: most have none
        return 0.0
    total, room = 0.0, np.empty(min(BLOCK, a.size), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, a.size, BLOCK):
            part = slice(start, min(start + BLOCK, a.size))
            total += _squares(np.subtract(a[part], b[part], out=room[: part.stop - start]))
    return float(np.sqrt(total))


def norm(vector: Floats) -> float:
    """The Euclidean norm; not finite if and only if an element is not finite.

    A reduction is allowed here: a norm may get an update refused, a recorded outcome, but never
    enters a model.
    """
    if not vector.size:
        return 0.0
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, vector.size, BLOCK):
            total += _squares(vector[start : start + BLOCK])
    return float(np.sqrt(total))


def _squares(block: Floats) -> float:
    squares = float(np.dot(block, block))
    if np.isfinite(squares):
        return squares
    wide = block.astype(np.float64)  # squares of 1e19 and more overflow float32
    return float(np.dot(wide, wide))
