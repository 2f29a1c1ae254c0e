"""How often each device takes part and how long it trains, by groups of devices.

Anarchic Federated Learning, section 3: each worker may use 'a time-varying number of local update
steps', and decides when it takes part. Schedulers, anarchic trainers and simulations draw from it.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Sequence
from itertools import repeat
from statistics import fmean
from typing import Annotated

from pydantic import Field

from fedstream.runtime.config import Section
from fedstream.runtime.steps import Length, Steps


class ParticipationGroup(Section):
    """How often some devices take part, and how long they train."""

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    rate: Annotated[float, Field(gt=0)] = 1.0
    """relative to devices in no group, whose rate is 1"""
    steps: Steps | None = None
    """None: the usual ones"""


class Rated(Sequence[int]):
    """Devices that keep a running total of their rates, so that a draw need not add them up."""

    @property
    @abstractmethod
    def is_rated(self) -> bool:
        """Whether they do: not if all rates are the usual one."""

    @abstractmethod
    def place_at(self, share: float) -> int:
        """The place at which the running total exceeds this share of the sum of all rates."""


class Participation:
    """How often every device takes part, and how long it trains."""

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
        """The rates of devices 0 to ``devices`` - 1 as whole numbers, in exactly their proportion.

        None: they are all the same.
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
        """How long a device trains this time."""
        return self._steps.get(device, self._usual).draw(rng)
