"""A device's SGD on an objective whose gradient is known, from a row of x for each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from fedstream.core.layout import Floats

Wide: TypeAlias = npt.NDArray[np.float64]
Whole: TypeAlias = npt.NDArray[np.int64]


class Objective(Protocol):
    """M devices' objectives and their mean f."""

    @property
    def dimensions(self) -> int:
        """d."""

    def train(
        self, devices: Whole, x: Floats, steps: Whole, lr: float, rng: np.random.Generator
    ) -> Floats:
        """(runs, d): where the devices' local steps end that start at the rows of x."""


def descend(
    gradient: Callable[[Floats], Floats],
    x: Floats,
    steps: Whole | int,
    lr: float,
    *,
    variance: float,
    rng: np.random.Generator,
    rho: float = 0.0,
) -> Floats:
    """x after SGD steps in float32, as many in each row as ``steps`` says.

    The noise z of a gradient is Gaussian with E|z|^2 = ``variance``; ``rho`` weighs the proximal
    term of FedAsync's option II.
    """
    start, rate, pull = x, np.float32(lr), np.float32(rho)
    spread = np.float32((variance / x.shape[-1]) ** 0.5)
    least, most = np.min(steps), np.max(steps)
    for step in range(most):
        slope = gradient(x)
        if spread:
            slope += spread * rng.standard_normal(x.shape, np.float32)
        if pull:
            slope += pull * (x - start)
        after = x - rate * slope  # never in place: the start is the server's
        x = after if step < least else np.where(np.less(step, steps)[:, None], after, x)
    return x
