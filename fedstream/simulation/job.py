"""What a simulated device is asked to train."""

from __future__ import annotations

from dataclasses import dataclass

from fedstream.core.layout import Floats, Model
from fedstream.simulation.arrivals import Arrival


@dataclass(frozen=True, slots=True)
class Job:
    """A device's training that starts from a version."""

    arrival: Arrival
    base: Model
    """x_tau"""
    version: int
    """tau"""
    digest: str
    """of x_tau"""
    into: Model
    """receives what the device sends"""
    device_control: Floats | None
    """SCAFFOLD's c_i; None: zero"""
