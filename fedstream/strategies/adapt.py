"""Adaptive steps: a rule's rate, scaled from time to time by what held-out data say.

Every W versions, the updates of these versions are mixed in again at other step scales, from the
same beginning. The models are scored, and the best one's scale is proposed for the updates to come.
FedAsync (Xie, Koyejo, Gupta) names adaptive alpha as future work and gives no rule; this one is
ours. With r the configured rate (alpha, or server_lr), c the scale (1 at first) and F the factors,

    c <- the best of {clip(c f, least / r, most / r) : f in F}

and a version steps by r c in place of r.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Annotated, Literal

from pydantic import Field

from fedstream.runtime.config import Positive, Section


class Adapt(Section):
    """The table ``[strategy.adapt]``: when a rule's rate is scaled, by how much, and by what."""

    every: Annotated[int, Field(ge=1)] = 50
    """W, the versions between two proposals"""
    factors: Annotated[tuple[Positive, ...], Field(strict=False, min_length=1, max_length=8)] = (
        0.5,
        2.0,
    )
    """the factors that are tried besides 1"""
    least: Positive = 0.01
    """the smallest rate"""
    most: Positive = 1.0
    """the largest rate"""
    metric: Annotated[str, Field(min_length=1, max_length=200)] = "loss"
    """the metric that scores a model"""
    rows: Annotated[int, Field(ge=1)] = 1000
    """the rows of the held-out data that score a model, at most"""

    def bounded(self, rate: float, scale: float) -> float:
        """The scale nearest to ``scale`` at which the rate is within the bounds."""
        return min(max(scale, self.least / rate), self.most / rate)

    def tried(self, rate: float, scale: float) -> tuple[float, ...]:
        """The scales to try besides ``scale``, the present one."""
        found = (self.bounded(rate, scale * factor) for factor in self.factors)
        return tuple(dict.fromkeys(one for one in found if one != scale))


def best_scale(
    scores: Iterable[tuple[float, float]], present: float, goal: Literal["min", "max"]
) -> float:
    """The scale with the best score; ``present`` unless another one is better.

    ``scores``: pairs of a scale and its score; those that are not finite are never the best.
    """
    sign = 1.0 if goal == "min" else -1.0
    finite = [(sign * score, scale) for scale, score in scores if isfinite(score)]
    return min(finite, key=lambda one: (one[0], one[1] != present), default=(0.0, present))[1]
