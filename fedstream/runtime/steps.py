"""How long a task trains: H, the number of local steps.

Schedulers, anarchic devices and simulations draw it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from fedstream.runtime.config import Section

StepCount = Annotated[int, Field(ge=1, le=1_000_000_000)]  # more than any task does


@dataclass(frozen=True, slots=True)
class Length:
    """The length of a task; exactly one of these is set."""

    steps: int | None = None
    """H"""
    epochs: int | None = None
    """passes over the device's data"""
    seconds: float | None = None
    """a time budget: as many steps as fit, at least one"""


class FixedSteps(Section):
    """H steps."""

    kind: Literal["fixed"] = "fixed"
    n: StepCount = 5

    def draw(self, _rng: random.Random) -> Length:
        """Always the same."""
        return Length(steps=self.n)


class UniformSteps(Section):
    """H uniform on [1, 2c], drawn anew for every task (AFL: dynamic)."""

    kind: Literal["uniform"] = "uniform"
    c: StepCount = 5

    def draw(self, rng: random.Random) -> Length:
        """A new draw for each task."""
        return Length(steps=rng.randint(1, 2 * self.c))


class Epochs(Section):
    """Passes over the device's data."""

    kind: Literal["epochs"] = "epochs"
    n: StepCount = 1

    def draw(self, _rng: random.Random) -> Length:
        """Always the same."""
        return Length(epochs=self.n)


class Seconds(Section):
    """As many steps as the device manages in this time, at least one."""

    kind: Literal["seconds"] = "seconds"
    s: Annotated[float, Field(gt=0)] = 1.0

    def draw(self, _rng: random.Random) -> Length:
        """Always the same."""
        return Length(seconds=self.s)


Steps = Annotated[FixedSteps | UniformSteps | Epochs | Seconds, Field(discriminator="kind")]
