"""Quadratic objectives with diagonal Hessians: every constant in the theorems is known exactly.

Device i has f_i(x) = (x - b_i)' A_i (x - b_i) / 2, and f = mean f_i. A stochastic gradient is the
gradient plus Gaussian noise z with E|z|^2 = ``variance``. Devices compute in float32, as real ones
do; gaps and gradients are measured in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from experiments.theory.sgd import Whole, Wide, descend
from fedstream.core.layout import Floats


@dataclass(frozen=True)
class Quadratics:
    """M devices in d dimensions."""

    hessians: Wide
    """(M, d): the diagonals of A_i"""
    centres: Wide
    """(M, d): b_i"""
    variance: float = 0.0
    """sigma^2, over all coordinates together"""

    @property
    def devices(self) -> int:
        """M."""
        return int(self.centres.shape[0])

    @property
    def dimensions(self) -> int:
        """d."""
        return int(self.centres.shape[1])

    @property
    def smoothness(self) -> float:
        """L, of every f_i."""
        return float(self.hessians.max())

    @cached_property
    def hessian(self) -> Wide:
        """(d,): the diagonal of f's Hessian."""
        return np.asarray(self.hessians.mean(axis=0))

    @property
    def convexity(self) -> float:
        """mu, of f."""
        return float(self.hessian.min())

    @cached_property
    def optimum(self) -> Wide:
        """(d,): x*."""
        return np.asarray((self.hessians * self.centres).mean(axis=0) / self.hessian)

    @cached_property
    def _narrow(self) -> tuple[Floats, Floats]:
        return self.hessians.astype(np.float32), self.centres.astype(np.float32)

    def gap(self, x: Floats | Wide) -> Wide:
        """f(x) - f*, of each row of x."""
        away = np.asarray(x, np.float64) - self.optimum
        return np.asarray(0.5 * (self.hessian * away**2).sum(axis=-1))

    def slope(self, x: Floats | Wide) -> Wide:
        """|grad f(x)|^2, of each row of x."""
        away = np.asarray(x, np.float64) - self.optimum
        return np.asarray(((self.hessian * away) ** 2).sum(axis=-1))

    def diversity(self, x: Floats | Wide) -> Wide:
        """(M,): |grad f_i(x) - grad f(x)|^2 at one x; the same everywhere if A_i = A."""
        x = np.asarray(x, np.float64)
        own = self.hessians * (x - self.centres)
        return np.asarray(((own - own.mean(axis=0)) ** 2).sum(axis=1))

    def train(
        self,
        devices: Whole | int,
        x: Floats,
        steps: Whole | int,
        lr: float,
        rng: np.random.Generator,
    ) -> Floats:
        """x_new: SGD steps of a device from each row of x, all in float32."""
        hessians, centres = self._narrow[0][devices], self._narrow[1][devices]
        return descend(
            lambda x: hessians * (x - centres), x, steps, lr, variance=self.variance, rng=rng
        )


def fan(low: float, high: float, devices: int, dimensions: int = 10) -> Wide:
    """(M, d): one Hessian for all, its eigenvalues evenly spaced from low to high."""
    return np.tile(np.linspace(low, high, dimensions), (devices, 1))


def stationary(problem: Quadratics, present: slice, *, steps: int, lr: float) -> Wide:
    """(d,): the point where the mean of G_i over the present devices is zero.

    Without noise G_i(x) = P_i (x - b_i), P_i = (I - (I - gamma A_i)^H) / (gamma H).
    """
    hessians, centres = problem.hessians[present], problem.centres[present]
    gains = (1 - (1 - lr * hessians) ** steps) / (lr * steps)
    return np.asarray((gains * centres).sum(axis=0) / gains.sum(axis=0))
