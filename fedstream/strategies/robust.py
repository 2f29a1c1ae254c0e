"""Means of a few vectors that outliers can't move far: of updates, or of the means of buckets.

A sum of masked updates hides its outliers. So a private version's updates are split into buckets
with a sum each, and one of these rules runs over the buckets' means (Karimireddy, He and Jaggi
2022, Byzantine-robust learning on heterogeneous datasets via bucketing). All give the same bits on
every machine: element-wise operations in a fixed order, also where a sum is reduced to a number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from statistics import median_low
from typing import Final

import numpy as np

from fedstream.core.layout import Floats
from fedstream.strategies.mixing import BLOCK, add

ITERATIONS: Final = 16
_NEAREST: Final = 1e-6  # nu: a smaller distance counts as this one
STANDS_OUT: Final = 3.0  # times as far, or as long, as is usual


def mean(vectors: Sequence[Floats], into: Floats) -> None:
    """The mean of at least one vector. ``into`` may be the first."""
    into[:] = vectors[0]
    for vector in vectors[1:]:
        np.add(into, vector, out=into)
    np.multiply(into, np.float32(1 / len(vectors)), out=into)


def median(vectors: Sequence[Floats], into: Floats) -> None:
    """The median of each coordinate; of an even number, the mean of the two in the middle.

    Yin et al. 2018, Byzantine-robust distributed learning. ``into`` may be one of the vectors.
    """
    low, high = (len(vectors) - 1) // 2, len(vectors) // 2
    for start in range(0, into.size, BLOCK):
        part = slice(start, start + BLOCK)
        ordered = np.sort(np.stack([vector[part] for vector in vectors]), axis=0)
        np.add(ordered[low], ordered[high], out=into[part])
        np.multiply(into[part], np.float32(0.5), out=into[part])


def geometric_median(vectors: Sequence[Floats], into: Floats) -> None:
    """The point z with the least sum of distances to the vectors, nearly. ``into``: none of them.

    Weiszfeld's algorithm, smoothed (Pillutla, Kakade and Harchaoui 2022, Robust aggregation for
    federated learning, algorithm 2): from the median of each coordinate, :data:`ITERATIONS` times

        z <- sum b_i v_i / sum b_i,    b_i = 1 / max(nu, |z - v_i|)
    """
    median(vectors, into)
    for _ in range(ITERATIONS):
        shares = [1 / max(_NEAREST, distance(into, vector)) for vector in vectors]
        total = 0.0
        for share in shares:  # not sum(): from Python 3.12 on, its last bits differ
            total += share
        into[:] = 0.0
        for vector, share in zip(vectors, shares, strict=True):
            add(into, vector, share / total, into=into)


def far_from(middle: Floats, vectors: Sequence[Floats]) -> tuple[int, ...]:
    """The places of the vectors more than :data:`STANDS_OUT` times as far from ``middle`` as usual.

    Usual is the median of the vectors' distances, of an even number the smaller of two.
    """
    found = [distance(middle, vector) for vector in vectors]
    usual = median_low(found)
    return tuple(n for n, far in enumerate(found) if far > STANDS_OUT * usual > 0)


def norm(a: Floats) -> float:
    """The Euclidean norm of a; unlike that of ``mixing``, with the same bits everywhere."""
    return distance(a, np.broadcast_to(np.float32(0.0), a.shape))


def distance(a: Floats, b: Floats) -> float:
    """The norm of a - b, with the same bits everywhere."""
    total, room = 0.0, np.empty(min(BLOCK, a.size))
    for start in range(0, a.size, BLOCK):
        part = slice(start, start + BLOCK)
        left = room[: a[part].size]
        np.square(np.subtract(a[part], b[part], out=left), out=left)
        while left.size > 1:  # halved, as the order of a reduction depends on the machine
            half = (left.size + 1) // 2
            left[: left.size - half] += left[half:]
            left = left[:half]
        total += float(left[0])
    return sqrt(total)


RULES: Final[Mapping[str, Callable[[Sequence[Floats], Floats], None]]] = {
    "mean": mean,
    "median": median,
    "geometric median": geometric_median,
}
