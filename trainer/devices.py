"""Simulated devices: how long a task takes, drop-outs, and availability.

For experiments and demonstrations on one machine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedstream.runtime.config import Positive, Section

NonNegative = Annotated[float, Field(ge=0)]


class NoLatency(Section):
    """No delay beyond the machine's computing time."""

    kind: Literal["none"] = "none"


class FixedLatency(Section):
    """Always ``mean_s`` seconds."""

    kind: Literal["fixed"] = "fixed"
    mean_s: NonNegative


class UniformLatency(Section):
    """Uniform on [``low_s``, ``high_s``] seconds."""

    kind: Literal["uniform"] = "uniform"
    low_s: NonNegative = 0.0
    high_s: NonNegative

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
    """Log-normal with mean ``mean_s`` seconds; its logarithm has standard deviation ``sigma``."""

    kind: Literal["lognormal"] = "lognormal"
    mean_s: Positive
    sigma: Positive = 1.0


Latency = NoLatency | FixedLatency | UniformLatency | ExponentialLatency | LognormalLatency


class AlwaysAvailable(Section):
    """Eligible for tasks at any time."""

    kind: Literal["always"] = "always"


class OnOff(Section):
    """Alternates between eligible and not, each for an exponential time with the given mean."""

    kind: Literal["on_off"] = "on_off"
    mean_on_s: Positive
    mean_off_s: Positive


class Diurnal(Section):
    """Eligible for one interval per ``period_s``, which starts at a different time per device."""

    kind: Literal["diurnal"] = "diurnal"
    period_s: Positive = 86400.0
    share: Annotated[float, Field(gt=0, le=1)]
    """eligible share of the period"""


Availability = AlwaysAvailable | OnOff | Diurnal
DeviceState = Literal["idle", "working", "ineligible"]


class DeviceSettings(Section):
    """The table ``[devices]``: simulated latency, drop-outs and availability."""

    availability: Annotated[Availability, Field(discriminator="kind")] = AlwaysAvailable()
    latency: Annotated[Latency, Field(discriminator="kind")] = NoLatency()
    slow_devices: tuple[Annotated[int, Field(ge=0)], ...] = ()
    slow_factor: Positive = 20.0
    """Multiplies the latency of ``slow_devices``."""
    dropout: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Probability that a device drops out in the middle of a task."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """A device's behaviour in one task.

    ``latency_s``: the whole time from task to upload, including training; a faster trainer sleeps
    for the rest.
    """

    latency_s: float
    drops_out: bool


def behaviour(settings: DeviceSettings, device: int, seed: int) -> Behaviour:
    """The behaviour of ``device`` in the task with this seed; depends on the arguments only."""
    if settings.dropout == 0.0 and isinstance(settings.latency, NoLatency):
        return Behaviour(0.0, drops_out=False)  # nothing to draw
    # a text seed is hashed, so that neighbouring seeds and devices draw independently
    draw = random.Random(f"{seed}/{device}")
    drops_out = draw.random() < settings.dropout  # drawn first: independent of the latency kind
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


# Availability. A device receives two kinds of calls: to be eligible and to be ineligible. The
# latest call decides its state; a call that repeats the current state changes nothing. With two
# Poisson processes of calls, this is exactly the alternating exponential process: in either state,
# the call that ends it is an exponential time away. Each kind of call has its own blocks of time,
# and each block draws its calls, one on average, from its own seed. So any time can be looked up
# directly, however late, and blocks before time 0 make the process stationary from the start.


def eligible(settings: Availability, device: int, seed: int, at_s: float) -> bool:
    """Whether ``device`` may work at ``at_s`` seconds; depends on the arguments only.

    ``seed`` is the whole run's, not a task's: seed and device determine one timeline.
    """
    match settings:
        case AlwaysAvailable() | Diurnal(share=1.0):
            return True
        case OnOff() | Diurnal():
            on, off = (_Calls(settings, device, seed, to=to) for to in (True, False))
            return on.latest(at_s) > off.latest(at_s)


def next_change(settings: Availability, device: int, seed: int, at_s: float) -> float:
    """The first time after ``at_s`` at which :func:`eligible` changes; inf if it never does."""
    match settings:
        case AlwaysAvailable() | Diurnal(share=1.0):
            return math.inf
        case OnOff() | Diurnal():
            to = not eligible(settings, device, seed, at_s)
            return _Calls(settings, device, seed, to=to).next(at_s)


def state(
    settings: Availability, device: int, seed: int, at_s: float, *, busy: bool
) -> DeviceState:
    """The state of ``device`` at ``at_s`` seconds; ``busy``: it is working on a task."""
    if not eligible(settings, device, seed, at_s):
        return "ineligible"
    return "working" if busy else "idle"


class _Calls:
    """The times of the calls that make a device eligible (``to``) or ineligible (not ``to``)."""

    def __init__(self, settings: OnOff | Diurnal, device: int, seed: int, *, to: bool) -> None:
        self._settings = settings
        self._to = to
        self._course = f"{seed}/{device}/available"
        match settings:
            case OnOff(mean_on_s=mean_on_s, mean_off_s=mean_off_s):
                self._block_s = mean_off_s if to else mean_on_s
            case Diurnal(period_s=period_s):
                self._block_s = period_s

    # Rounding may put a call outside its block, so searches start one block early.

    def latest(self, at_s: float) -> float:
        """The latest call at or before ``at_s``."""
        for block in count(math.floor(at_s / self._block_s) + 1, -1):
            if block * self._block_s > at_s:
                continue  # all calls of the block are later: don't draw them
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
        """The calls in one block of time, in order."""
        begin_s = block * self._block_s
        match self._settings:
            case OnOff():
                draw = random.Random(f"{self._course}/{self._to}/{block}")
                calls, after = [], draw.expovariate(1.0)
                while after < 1.0:  # in blocks, whose length is the mean time between calls
                    calls.append(begin_s + after * self._block_s)
                    after += draw.expovariate(1.0)
                return calls
            case Diurnal(share=share):
                phase = random.Random(self._course).random()
                return [begin_s + (phase if self._to else (phase + share) % 1.0) * self._block_s]
