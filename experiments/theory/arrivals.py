"""Which devices arrive, how stale, after how many local steps; and the odds of a biased draw."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from experiments.theory.sgd import Whole, Wide

_BLOCK = 2048  # batches drawn at once, over all runs


class DrawnArrival(NamedTuple):
    """One answer in each run, (runs,) each; (1,) each where all runs have the same arrivals."""

    devices: Whole
    staleness: Whole
    """d = t - tau, less while there are fewer versions"""
    steps: Whole
    """H"""


def batches(
    rng: np.random.Generator,
    odds: Wide,
    size: int,
    *,
    oldest: int,
    newest: int = 0,
    steps: tuple[int, int] = (1, 1),
    repeated: bool = False,
    runs: int = 1,
) -> Iterator[DrawnArrival]:
    """Endless arrivals, ``size`` per version, with uniform H.

    Staleness is uniform from ``newest`` to ``oldest``. The devices of a batch are drawn one by one
    with these odds, without replacement unless ``repeated``; every run has its own arrivals.
    """
    # Taking the largest log p plus Gumbel noise draws without replacement.
    with np.errstate(divide="ignore"):
        log_odds = np.log(odds)
    block = max(1, _BLOCK // runs)
    for _ in count():
        if repeated:
            drawn = rng.choice(len(odds), (block, size, runs), p=odds / odds.sum())
        else:
            keys = log_odds + rng.gumbel(size=(block, runs, len(odds)))
            drawn = np.argsort(-keys, axis=2)[:, :, :size].swapaxes(1, 2)
        stale = rng.integers(newest, oldest, drawn.shape, endpoint=True)
        made = rng.integers(*steps, drawn.shape, endpoint=True)
        yield from map(
            DrawnArrival, *(of.reshape(block * size, runs) for of in (drawn, stale, made))
        )


def inclusion(odds: Wide, size: int) -> Wide:
    """pi_i: the probability that device i is among ``size`` drawn without replacement, exactly."""
    sets = {0: 1.0}
    for _ in range(size):
        grown: dict[int, float] = {}
        for chosen, probability in sets.items():
            left = [i for i in range(len(odds)) if not chosen >> i & 1]
            total = sum(float(odds[i]) for i in left)
            for i in left:
                key = chosen | 1 << i
                grown[key] = grown.get(key, 0.0) + probability * float(odds[i]) / total
        sets = grown
    return np.array(
        [sum(p for chosen, p in sets.items() if chosen >> i & 1) for i in range(len(odds))]
    )
