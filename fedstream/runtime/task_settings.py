"""Settings of training tasks that services share: length, lease, participation, wire formats.

From these settings, schedulers, anarchic trainers and simulations draw the participating devices
and the lengths of tasks (H, the number of local steps). Anarchic Federated Learning, section 3:
each worker may use 'a time-varying number of local update steps', and decides when it takes part.
"""

from __future__ import annotations

import random
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field, field_validator

from fedstream.core.digest import DigestAlgorithm
from fedstream.core.errors import Undecodable
from fedstream.core.formats import ENCODINGS, Format, format_of
from fedstream.runtime.config import Section

StepCount = Annotated[int, Field(ge=1, le=1_000_000_000)]  # more than any task takes


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
        """Always the same length."""
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
        """Always the same length."""
        return Length(epochs=self.n)


class Seconds(Section):
    """As many steps as fit into this time, at least one."""

    kind: Literal["seconds"] = "seconds"
    s: Annotated[float, Field(gt=0)] = 1.0

    def draw(self, _rng: random.Random) -> Length:
        """Always the same length."""
        return Length(seconds=self.s)


Steps = Annotated[FixedSteps | UniformSteps | Epochs | Seconds, Field(discriminator="kind")]


class ParticipationGroup(Section):
    """The rate and length of training of some devices."""

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    rate: Annotated[float, Field(gt=0)] = 1.0
    """relative to devices in no group, whose rate is 1"""
    steps: Steps | None = None
    """None: the usual length"""


class Rated(Sequence[int]):
    """Devices with a running total of their rates, so that a draw need not sum them."""

    @property
    @abstractmethod
    def is_rated(self) -> bool:
        """Whether rates differ, so that there is a running total."""

    @abstractmethod
    def place_at(self, share: float) -> int:
        """The place at which the running total exceeds this share of the sum of all rates."""


class Participation:
    """The rate and length of training of every device."""

    def __init__(self, usual: Steps, groups: Sequence[ParticipationGroup] = ()) -> None:
        """Raises ValueError if a device is in two groups."""
        self._usual = usual
        self._rates: dict[int, float] = {}
        self._steps: dict[int, Steps] = {}
        for n, group in enumerate(groups):
            for device in group.devices:
                if device in self._rates:
                    raise ValueError(f"participation[{n}].devices: device {device} is listed twice")
                self._rates[device] = group.rate
                self._steps[device] = group.steps or usual

    def rates(self, devices: Sequence[int]) -> list[float]:
        """The rates of these devices, relative to the usual rate."""
        return list(map(self._rates.get, devices, repeat(1.0)))

    def shares(self, devices: int) -> list[int] | None:
        """The rates of devices 0 to ``devices`` - 1 as integers in exact proportion.

        None if all rates are equal.
        """
        if not self._rates:
            return None
        ratios = {device: rate.as_integer_ratio() for device, rate in self._rates.items()}
        unit = max(below for _, below in ratios.values())  # all are powers of two
        shares = [unit] * devices
        for device, (above, below) in ratios.items():
            if device < devices:
                shares[device] = above * (unit // below)
        return shares

    def mean(self, devices: Sequence[int]) -> float:
        """The mean of these devices' rates."""
        return fmean(self.rates(devices)) if self._rates else 1.0

    def pick(self, rng: random.Random, devices: Sequence[int]) -> int:
        """An index into ``devices``, drawn with probability proportional to the device's rate."""
        if not self._rates:
            return rng.randrange(len(devices))
        if isinstance(devices, Rated) and devices.is_rated:
            return devices.place_at(rng.random())
        return rng.choices(range(len(devices)), self.rates(devices))[0]

    def length(self, rng: random.Random, device: int) -> Length:
        """Draw the length of a device's next task."""
        return self._steps.get(device, self._usual).draw(rng)


class LeaseSettings(Section):
    """The table ``[lease]``: a task's lease, renewed after a quarter of its time.

    Once the lease expires, other trainers may take the task over. Trainers renew from the event
    loop while they train in a thread, so the lease need only outlast a pause of the process, not
    the task.
    """

    seconds: Annotated[float, Field(gt=0)] = 15.0
    attempts: Annotated[int, Field(ge=1)] = 3  # deliveries after which a task is poison


class WireSettings(Section):
    """The table ``[wire]``: formats and digests; ``+zstd`` after a format's name compresses."""

    update: str = "f32"  # of updates; may differ between trainers
    model: str = "f32"  # of published models: f32, bf16 or int8
    # Digest algorithm of models and updates, fixed at the beginning of a run.
    digest: DigestAlgorithm = "blake3"

    @field_validator("update", "model")
    @classmethod
    def _is_a_format(cls, name: str) -> str:
        """Raises ValueError unless ``format_of`` knows the name."""
        try:
            return format_of(name).name
        except Undecodable:
            pass
        if re.fullmatch(r"topk(\+zstd)?", name):
            raise ValueError("topk needs the share of values it keeps, as in topk:0.1")
        if name.startswith("topk:"):
            raise ValueError(
                "the share of topk is a decimal number above 0 and at most 1, with at most nine "
                "digits, as in topk:0.1"
            )
        shown = ", ".join("topk:SHARE" if kind == "topk" else kind for kind in ENCODINGS)
        raise ValueError(f"expected one of {shown}, or one of them with +zstd, as in int8+zstd")

    @field_validator("model")
    @classmethod
    def _is_fit_for_models(cls, name: str) -> str:
        if format_of(name).of_changes:
            raise ValueError(f"{name} is too coarse for models: use f32, bf16 or int8")
        return name

    @property
    def of_updates(self) -> Format:
        """The format of updates."""
        return format_of(self.update)

    @property
    def of_models(self) -> Format:
        """The format of published models."""
        return format_of(self.model)
