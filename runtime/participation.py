"""How often each device takes part, and how long it trains: groups of devices that differ.

Anarchic Federated Learning, section 3: each worker may use 'a time-varying number of local update
steps', and decides when it takes part. Schedulers, anarchic trainers and simulations draw by this.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated

from pydantic import Field

from runtime.config import Section
from runtime.steps import Length, Steps


class ParticipationGroup(Section):
    """Some devices' part in a run."""

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    rate: Annotated[float, Field(gt=0)] = 1.0
    """relative to that of devices in no group, which is 1"""
    steps: Steps | None = None
    """None: the usual ones"""


class Participation:
    """Every device's part."""

    def __init__(self, usual: Steps, groups: Sequence[ParticipationGroup] = ()) -> None:
        """Raises ValueError if a device is in two groups."""
        self._usual = usual
        self.groups: dict[int, ParticipationGroup] = {}  # by device
        for n, group in enumerate(groups):
            for device in group.devices:
                if device in self.groups:
                    raise ValueError(f"participation[{n}].devices: device {device} is listed twice")
                self.groups[device] = group

    def rate(self, device: int) -> float:
        """A device's, relative to the usual one."""
        group = self.groups.get(device)
        return group.rate if group is not None else 1.0

    def mean(self, devices: Sequence[int]) -> float:
        """The mean of some devices' rates."""
        return fmean(map(self.rate, devices)) if self.groups else 1.0

    def pick(self, rng: random.Random, devices: Sequence[int]) -> int:
        """The place in ``devices`` of one of them, drawn with probability proportional to rate."""
        if not self.groups:
            return rng.randrange(len(devices))
        return rng.choices(range(len(devices)), list(map(self.rate, devices)))[0]

    def length(self, rng: random.Random, device: int) -> Length:
        """How long a device trains this time."""
        group = self.groups.get(device)
        steps = group.steps if group is not None else None
        return (steps or self._usual).draw(rng)
