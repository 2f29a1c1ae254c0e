"""Simulated devices: how long one takes for a task, whether it vanishes midway, and when it is
there at all.

For experiments and demonstrations on one machine, where real devices' differences are missing.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedstream.runtime.config import Section

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


class AlwaysAvailable(Section):
    """Eligible for tasks at any time."""

    kind: Literal["always"] = "always"


class OnOff(Section):
    """Eligible and not by turns, for exponential times with means ``mean_on_s``, ``mean_off_s``."""

    kind: Literal["on_off"] = "on_off"
    mean_on_s: Positive
    mean_off_s: Positive


class Diurnal(Section):
    """Eligible for one stretch of each ``period_s``, the same at each device but for its begin."""

    kind: Literal["diurnal"] = "diurnal"
    period_s: Positive = 86400.0
    share: Annotated[float, Field(gt=0, le=1)]
    """of the period"""


Availability = AlwaysAvailable | OnOff | Diurnal
State = Literal["idle", "working", "ineligible"]


class DeviceSettings(Section):
    """How the simulated devices differ from this machine."""

    availability: Annotated[Availability, Field(discriminator="kind")] = AlwaysAvailable()
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


# Availability. Two kinds of events come to a device, each kind in blocks of time of its own: calls
# that make it eligible and calls that make it ineligible. What it is, the latest call says; one
# that changes nothing is no change. Two Poisson processes of such calls are exactly the alternating
# exponential process: whatever the state, the call that ends it is an exponential time away. A
# block's calls are drawn from a seed of its own, one in the mean, so any time is found at once,
# however late; and blocks before time 0 make the process stationary from the start.


def eligible(settings: Availability, device: int, seed: int, at_s: float) -> bool:
    """Whether ``device`` may work at ``at_s`` seconds: a function of its arguments only.

    ``seed`` is of the whole simulation, not of a task: it and the device make one course of time.
    """
    match settings:
        case AlwaysAvailable() | Diurnal(share=1.0):
            return True
        case OnOff() | Diurnal():
            on, off = (_Calls(settings, device, seed, to=to) for to in (True, False))
            return on.latest(at_s) > off.latest(at_s)


def next_change(settings: Availability, device: int, seed: int, at_s: float) -> float:
    """The first time after ``at_s`` at which :func:`eligible` is another; inf if there is none."""
    match settings:
        case AlwaysAvailable() | Diurnal(share=1.0):
            return math.inf
        case OnOff() | Diurnal():
            to = not eligible(settings, device, seed, at_s)
            return _Calls(settings, device, seed, to=to).next(at_s)


def state(settings: Availability, device: int, seed: int, at_s: float, *, busy: bool) -> State:
    """What ``device`` is at ``at_s`` seconds; ``busy``: it has a task in hand."""
    if not eligible(settings, device, seed, at_s):
        return "ineligible"
    return "working" if busy else "idle"


class _Calls:
    """The times at which one device is told ``to`` be eligible, or not to be."""

    def __init__(self, settings: OnOff | Diurnal, device: int, seed: int, *, to: bool) -> None:
        self._settings = settings
        self._to = to
        self._course = f"{seed}/{device}/available"
        match settings:
            case OnOff(mean_on_s=mean_on_s, mean_off_s=mean_off_s):
                self._block_s = mean_off_s if to else mean_on_s
            case Diurnal(period_s=period_s):
                self._block_s = period_s

    # A block's border, which is rounded, may lie beyond its calls: a search begins one block early.

    def latest(self, at_s: float) -> float:
        """The latest call that is not after ``at_s``."""
        for block in count(math.floor(at_s / self._block_s) + 1, -1):
            if block * self._block_s > at_s:
                continue  # and so are its calls, which take longer to draw
            if past := [call for call in self._in(block) if call <= at_s]:
                return past[-1]
        raise AssertionError("count() ended")

    def next(self, at_s: float) -> float:
        """The first call after ``at_s``."""
        for block in count(math.floor(at_s / self._block_s) - 1):
            if coming := [call for call in self._in(block) if call > at_s]:
                return coming[0]
        raise AssertionError("count() ended")

    def _in(self, block: int) -> list[float]:
        """The calls of one block, in order."""
        begin_s = block * self._block_s
        match self._settings:
            case OnOff():
                draw = random.Random(f"{self._course}/{self._to}/{block}")
                calls, after = [], draw.expovariate(1.0)
                while after < 1.0:  # of the block, which is the mean time between two calls
                    calls.append(begin_s + after * self._block_s)
                    after += draw.expovariate(1.0)
                return calls
            case Diurnal(share=share):
                phase = random.Random(self._course).random()
                return [begin_s + (phase if self._to else (phase + share) % 1.0) * self._block_s]
