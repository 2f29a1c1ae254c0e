"""Weights of updates: staleness functions s(d) and schedules of the mixing weight alpha(t).

Asynchronous Federated Optimization (Xie, Koyejo, Gupta), section 4 of the 2019 edition. Staleness
here is d = t - tau, t being the version current when the update is applied, so that an update that
started from the current version has d = 0, and s(0) = 1 for every function.

A user's staleness function can be a plain function, whose parameters after d become keys.

    def logarithmic(d: int, a: float = 1.0) -> float:
        return 1.0 / (1.0 + a * math.log(d + 1.0))
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstream.runtime.config import NamedSettings, Positive, Section, call_function, own_class
from fedstream.runtime.plugins import OneOf, PluginRegistry


class StalenessFunction(NamedSettings):
    """Base of all staleness functions: fields are the parameters, and a call gives s(d)."""

    kind: str = ""
    """The function's name in the configuration; a user's is file.py:name."""

    @abstractmethod
    def __call__(self, d: int) -> float:
        """s(d), the weight of an update that is d versions old."""


class Constant(StalenessFunction):
    """s(d) = 1."""

    kind: Literal["constant"] = "constant"

    def __call__(self, d: int) -> float:
        return 1.0


class Linear(StalenessFunction):
    """s(d) = 1 / (a d + 1)."""

    kind: Literal["linear"] = "linear"
    a: Positive = 0.5

    def __call__(self, d: int) -> float:
        return 1.0 / (self.a * d + 1.0)


class Polynomial(StalenessFunction):
    """s(d) = (d + 1)^-a."""

    kind: Literal["polynomial"] = "polynomial"
    a: Positive = 0.5

    def __call__(self, d: int) -> float:
        return float((d + 1.0) ** -self.a)


class Exponential(StalenessFunction):
    """s(d) = exp(-a d)."""

    kind: Literal["exponential"] = "exponential"
    a: Positive = 0.3

    def __call__(self, d: int) -> float:
        return math.exp(-self.a * d)


class Hinge(StalenessFunction):
    """s(d) = 1 if d <= b, else 1 / (a (d - b) + 1)."""

    kind: Literal["hinge"] = "hinge"
    a: Positive = 10.0
    b: Annotated[int, Field(ge=0)] = 4

    def __call__(self, d: int) -> float:
        return 1.0 if d <= self.b else 1.0 / (self.a * (d - self.b) + 1.0)


class _Plain(StalenessFunction):
    """Base for a user's function; a subclass has the function's parameters as fields."""

    function: ClassVar[Callable[..., float]]

    def __call__(self, d: int) -> float:
        return float(call_function(self, d))


def _accept(value: object) -> type[StalenessFunction] | None:
    return own_class(value, StalenessFunction, _Plain, ["d"])


FUNCTIONS: PluginRegistry[type[StalenessFunction]] = PluginRegistry(
    "fedstream.staleness",
    "staleness function",
    {
        "constant": Constant,
        "linear": Linear,
        "polynomial": Polynomial,
        "exponential": Exponential,
        "hinge": Hinge,
    },
    accept=_accept,
    expected="a function of d, or a class derived from fedstream.strategies.StalenessFunction",
)
Staleness = Annotated[StalenessFunction, OneOf(FUNCTIONS)]


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
