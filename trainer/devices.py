"""Simulated devices: how long one takes for a task, and whether it vanishes midway.

For experiments and demonstrations on one machine, where real devices' differences are missing.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, model_validator

from runtime.config import Section

Seconds = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class NoLatency(Section):
    """As fast as the machine computes."""

    kind: Literal["none"] = "none"


class FixedLatency(Section):
    """Always ``mean_s`` seconds."""

    kind: Literal["fixed"] = "fixed"
    mean_s: Seconds


class UniformLatency(Section):
    """Uniform on [``low_s``, ``high_s``] seconds."""

    kind: Literal["uniform"] = "uniform"
    low_s: Seconds = 0.0
    high_s: Seconds

    @model_validator(mode="after")
    def _ordered(self) -> UniformLatency:
        if self.low_s > self.high_s:
            raise ValueError(f"low_s = {self.low_s} is above high_s = {self.high_s}")
        return self


class ExponentialLatency(Section):
    """Exponential with mean ``mean_s`` seconds."""

    kind: Literal["exponential"] = "exponential"
    mean_s: Positive


class LognormalLatency(Section):
    """Log-normal with mean ``mean_s`` seconds; ``sigma`` is the deviation of its logarithm."""

    kind: Literal["lognormal"] = "lognormal"
    mean_s: Positive
    sigma: Positive = 1.0


Latency = NoLatency | FixedLatency | UniformLatency | ExponentialLatency | LognormalLatency


class DeviceSettings(Section):
    """How the simulated devices differ from this machine."""

    latency: Annotated[Latency, Field(discriminator="kind")] = NoLatency()
    slow_devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    slow_factor: Positive = 20.0
    """The latency of ``slow_devices`` is multiplied by this."""
    dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a device vanishes in the middle of a task."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """What one device does with one task.

    ``latency_s`` is the whole time from the task to the upload, training included: whoever has
    trained in less sleeps the rest.
    """

    latency_s: float
    drops_out: bool


def behaviour(settings: DeviceSettings, device: int, seed: int) -> Behaviour:
    """What ``device`` does in the task of this ``seed``: a function of its arguments only."""
    # seeding by text is hashed, so that neighbouring seeds and devices draw independently
    draw = random.Random(f"{seed}/{device}")
    drops_out = draw.random() < settings.dropout  # first: another latency leaves drop-outs alone
    factor = settings.slow_factor if device in settings.slow_devices else 1.0
    return Behaviour(factor * _latency_s(settings.latency, draw), drops_out)


def _latency_s(latency: Latency, draw: random.Random) -> float:
    match latency:
        case NoLatency():
            return 0.0
        case FixedLatency(mean_s=mean_s):
            return mean_s
        case UniformLatency(low_s=low_s, high_s=high_s):
            return draw.uniform(low_s, high_s)
        case ExponentialLatency(mean_s=mean_s):
            return draw.expovariate(1 / mean_s)
        case LognormalLatency(mean_s=mean_s, sigma=sigma):
            # the mean of exp(N(mu, sigma^2)) is exp(mu + sigma^2 / 2)
            return draw.lognormvariate(math.log(mean_s) - sigma**2 / 2, sigma)
