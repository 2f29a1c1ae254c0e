"""Adaptive steps: a rule's rate, scaled from time to time by what held-out data say.

FedAsync (Xie, Koyejo, Gupta) leaves an adaptive alpha to future work; this rule is ours. With m_k
the mean of the models of the k-th W versions, r the configured rate (alpha, or server_lr), c its
scale (1 at first) and F some factors, the models

    m_{k-1} + f (m_k - m_{k-1}),  f in F

are scored on held-out data. They are, to first order, where the mean would be if the W versions had
stepped f times as far. Then c <- c f for the best f, with c r between two bounds, and later
versions step by c r in place of r. Means are compared because single models are noisy: a smaller
step averages more of the noise away, so it wins most short comparisons of single models, also far
from the optimum, where the larger step is the better one in the long run.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedstream.core.layout import Model
from fedstream.runtime.config import Positive, Section
from fedstream.strategies.mixing import toward


class Adapt(Section):
    """The table ``[strategy.adapt]``: when a rule's rate is scaled, by how much, and by what."""

    every: Annotated[int, Field(ge=1)] = 50
    """W, the versions between two decisions"""
    factors: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1, max_length=8)] = (
        0.5,
        2.0,
    )
    """F; 1 is always tried too"""
    least: Positive = 0.01
    """the smallest rate"""
    most: Positive = 1.0
    """the largest rate"""
    metric: Annotated[str, Field(min_length=1, max_length=200)] = "loss"
    """the metric that scores a model"""
    rows: Annotated[int, Field(ge=1)] = 1000
    """the items of the held-out data that score a model, at most"""

    @field_validator("factors")
    @classmethod
    def _change(cls, factors: tuple[float, ...]) -> tuple[float, ...]:
        if set(factors) == {1.0}:
            raise ValueError("name at least one factor that is not 1, such as 2: 1 changes nothing")
        return factors

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.least > self.most:
            raise ValueError(f"least = {self.least:g} is above most = {self.most:g}")
        return self

    def bounded(self, rate: float, scale: float) -> float:
        """The scale nearest to ``scale`` of a configured ``rate`` that is within the bounds."""
        return min(max(scale, self.least / rate), self.most / rate)

    def tried(self, rate: float, scale: float) -> tuple[float, ...]:
        """The scales to compare, ``scale`` first, which is the present one."""
        found = (self.bounded(rate, scale * factor) for factor in self.factors)
        return tuple(dict.fromkeys((scale, *found)))


class Windows:
    """The means of the versions' models in the last two windows of W versions.

    Window k has the versions k W + 1 to k W + W. Floating-point buffers have their mean in the last
    window, and integers their newest value.
    """

    def __init__(self, every: int) -> None:
        """``every``: W."""
        self._every = every
        self._before: Model | None = None  # the mean of a whole window, the one before
        self._mean: Model | None = None
        self._count = 0  # versions in this window's mean

    def add(self, version: int, model: Model) -> None:
        """Add a version, the one after the version that was added last."""
        if self._mean is None or (version - 1) % self._every == 0:
            self._before = self._mean if self._count == self._every else None
            self._mean, self._count = model.copy(), 0
        self._count += 1
        toward(self._mean.floats, model.floats, 1.0 / self._count, into=self._mean.floats)
        self._mean.integers[:] = model.integers

    @property
    def is_due(self) -> bool:
        """Whether the newest version ends a window, and the means of two windows are known."""
        return self._before is not None and self._count == self._every

    def at(self, factor: float) -> Model:
        """The model at ``factor`` times the way between the means; only if :attr:`is_due`."""
        if self._before is None or self._mean is None:
            raise RuntimeError("two windows have not passed")
        made = self._mean.copy()
        toward(self._before.parameters, made.parameters, factor, into=made.parameters)
        return made


def best_scale(scores: Iterable[tuple[float, float]], goal: Literal["min", "max"]) -> float | None:
    """The scale with the best score, the first of equals; None if no score is finite.

    ``scores``: pairs of a scale and its score.
    """
    finite = [(score, scale) for scale, score in scores if isfinite(score)]
    best = min if goal == "min" else max
    return best(finite, key=lambda one: one[0])[1] if finite else None
