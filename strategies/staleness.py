"""How much an update weighs: staleness functions s(d) and schedules of the mixing weight alpha(t).

Asynchronous Federated Optimization (Xie, Koyejo, Gupta), section 4 of the 2019 edition. Staleness
here is d = t - tau, t being the version current when the update is applied, so that an update that
started from the current version has d = 0, and s(0) = 1 for every function.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from fedstream.runtime.config import Positive, Section


class Constant(Section):
    """s(d) = 1."""

    kind: Literal["constant"] = "constant"

    def __call__(self, d: int) -> float:
        return 1.0


class Linear(Section):
    """s(d) = 1 / (a d + 1)."""

    kind: Literal["linear"] = "linear"
    a: Positive = 0.5

    def __call__(self, d: int) -> float:
        return 1.0 / (self.a * d + 1.0)


class Polynomial(Section):
    """s(d) = (d + 1)^-a."""

    kind: Literal["polynomial"] = "polynomial"
    a: Positive = 0.5

    def __call__(self, d: int) -> float:
        return float((d + 1.0) ** -self.a)


class Exponential(Section):
    """s(d) = exp(-a d)."""

    kind: Literal["exponential"] = "exponential"
    a: Positive = 0.3

    def __call__(self, d: int) -> float:
        return math.exp(-self.a * d)


class Hinge(Section):
    """s(d) = 1 if d <= b, else 1 / (a (d - b) + 1)."""

    kind: Literal["hinge"] = "hinge"
    a: Positive = 10.0
    b: Annotated[int, Field(ge=0)] = 4

    def __call__(self, d: int) -> float:
        return 1.0 if d <= self.b else 1.0 / (self.a * (d - self.b) + 1.0)


Staleness = Annotated[
    Constant | Linear | Polynomial | Exponential | Hinge, Field(discriminator="kind")
]


class ConstantAlpha(Section):
    """alpha(t) = alpha."""

    kind: Literal["constant"] = "constant"

    def __call__(self, alpha: float, version: int) -> float:
        return alpha


class StepAlpha(Section):
    """Versions 1 to ``at`` use alpha, later ones alpha * factor (the paper: 0.5 at 800)."""

    kind: Literal["step"] = "step"
    at: Annotated[int, Field(ge=1)] = 800
    factor: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __call__(self, alpha: float, version: int) -> float:
        return alpha if version <= self.at else alpha * self.factor


class InverseSqrtAlpha(Section):
    """alpha / sqrt(t + 1) for the update that makes version t + 1."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"

    def __call__(self, alpha: float, version: int) -> float:
        return alpha / math.sqrt(version)


AlphaSchedule = Annotated[ConstantAlpha | StepAlpha | InverseSqrtAlpha, Field(discriminator="kind")]
