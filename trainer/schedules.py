"""How the learning rate falls from one version of the global model to the next.

A device that trains from version tau uses the rate ``solver.lr`` times s(tau). A user's
schedule can be a plain function, whose parameters after tau become keys of ``solver.schedule``.

    def halving(tau: int, every: int = 10) -> float:
        return 0.5 ** (tau // every)
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedstream.runtime.config import NamedSettings, call_function, own_class
from fedstream.runtime.plugins import OneOf, PluginRegistry

Share = Annotated[float, Field(gt=0, le=1)]
_LEAST = 1e-30  # a rate above 0, however many versions there are


class Schedule(NamedSettings):
    """Base of all schedules: its fields are its parameters, and calling it gives s(tau) > 0."""

    kind: str = ""
    """Its name in the configuration; own ones have file.py:name."""

    @abstractmethod
    def __call__(self, tau: int) -> float:
        """s(tau), by which ``solver.lr`` is multiplied."""


class ConstantRate(Schedule):
    """s(tau) = 1."""

    kind: Literal["constant"] = "constant"

    def __call__(self, tau: int) -> float:
        return 1.0


class StepRate(Schedule):
    """s(tau) = factor^(tau // every)."""

    kind: Literal["step"] = "step"
    every: Annotated[int, Field(ge=1)]
    factor: Share = 0.5

    def __call__(self, tau: int) -> float:
        return max(float(self.factor ** (tau // self.every)), _LEAST)


class LinearRate(Schedule):
    """s falls from 1 to ``end`` at version ``versions``, after a rise to 1 over ``warmup``."""

    kind: Literal["linear"] = "linear"
    versions: Annotated[int, Field(ge=1)]
    end: Share = 0.01
    warmup: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _falls(self) -> Self:
        if self.warmup >= self.versions:
            raise ValueError(f"warmup = {self.warmup} must be below versions = {self.versions}")
        return self

    def __call__(self, tau: int) -> float:
        if tau < self.warmup:
            return (tau + 1) / (self.warmup + 1)
        passed = min(1.0, (tau - self.warmup) / (self.versions - self.warmup))
        return self.end + (1.0 - self.end) * self.left(passed)

    def left(self, passed: float) -> float:
        """The share of the fall that is left after the share ``passed`` of the versions."""
        return 1.0 - passed


class CosineRate(LinearRate):
    """As ``linear``, but along half a cosine (Loshchilov, Hutter: SGDR, equation 5, one cycle)."""

    kind: Literal["cosine"] = "cosine"  # type: ignore[assignment]

    def left(self, passed: float) -> float:
        """The share of the fall that is left after the share ``passed`` of the versions."""
        return (1.0 + math.cos(math.pi * passed)) / 2.0


class InverseSqrtRate(Schedule):
    """s(tau) = sqrt(warmup / max(tau + 1, warmup)), after a linear rise over the first versions."""

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"
    warmup: Annotated[int, Field(ge=1)] = 1

    def __call__(self, tau: int) -> float:
        n = tau + 1
        return n / self.warmup if n < self.warmup else math.sqrt(self.warmup / n)


class _Plain(Schedule):
    """Base for a user's function; a subclass has the function's parameters as fields."""

    function: ClassVar[Callable[..., float]]

    def __call__(self, tau: int) -> float:
        return float(call_function(self, tau))


def _accept(value: object) -> type[Schedule] | None:
    return own_class(value, Schedule, _Plain, ["tau"])


SCHEDULES: PluginRegistry[type[Schedule]] = PluginRegistry(
    "fedstream.schedules",
    "schedule",
    {
        "constant": ConstantRate,
        "step": StepRate,
        "linear": LinearRate,
        "cosine": CosineRate,
        "inverse_sqrt": InverseSqrtRate,
    },
    accept=_accept,
    expected="a function of tau, or a class derived from fedstream.trainer.schedules.Schedule",
)
RateSchedule = Annotated[Schedule, OneOf(SCHEDULES)]
