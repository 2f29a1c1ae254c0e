"""How long a task trains: H, the number of local steps. Schedulers draw it, and so do anarchic
devices."""

from __future__ import annotations

import random
from typing import Annotated, Literal

from pydantic import Field

from runtime.config import Section


class FixedSteps(Section):
    """H steps."""

    kind: Literal["fixed"] = "fixed"
    n: Annotated[int, Field(ge=1)] = 5

    def draw(self, _rng: random.Random) -> tuple[int | None, int | None]:
        """(steps, epochs), one of them None."""
        return self.n, None


class UniformSteps(Section):
    """H uniform on [1, 2c], drawn anew for every task (AFL: dynamic)."""

    kind: Literal["uniform"] = "uniform"
    c: Annotated[int, Field(ge=1)] = 5

    def draw(self, rng: random.Random) -> tuple[int | None, int | None]:
        """(steps, epochs), one of them None."""
        return rng.randint(1, 2 * self.c), None


class Epochs(Section):
    """Passes over the device's data."""

    kind: Literal["epochs"] = "epochs"
    n: Annotated[int, Field(ge=1)] = 1

    def draw(self, _rng: random.Random) -> tuple[int | None, int | None]:
        """(steps, epochs), one of them None."""
        return None, self.n


Steps = Annotated[FixedSteps | UniformSteps | Epochs, Field(discriminator="kind")]
