"""Ringmaster and Ringleader: asynchronous SGD with bounded staleness."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstream.core.layout import Model
from fedstream.strategies.batches import Batch
from fedstream.strategies.caches import Caching
from fedstream.strategies.mixing import add
from fedstream.strategies.strategy import InRounds, Memory, State, Update
from fedstream.strategies.vectors import DeviceVectors


class RingmasterSettings(Batch):
    """Ringmaster: x_{t+1} = x_t + server_lr (x_new - x_tau) for every arrival with d < R.

    Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity (Maranjyan, Tyurin,
    Richtarik, ICML 2025), algorithm 5, which stops the computations that reach d = R; without
    ``cancel_stale``, algorithm 4, which waits for them and drops the results. The paper's devices
    take one step of SGD; here x_tau - x_new may be of several, and ``server_lr`` times their
    learning rate is the paper's gamma.
    """

    rounds: ClassVar[InRounds] = "never"
    name: Literal["ringmaster"] = "ringmaster"
    buffer_size: Annotated[Literal[1], Field(exclude=True)] = 1
    max_staleness: Annotated[int, Field(ge=0)] = 9
    """R - 1"""
    cancel_stale: bool = True


class RingleaderSettings(Caching):
    """Ringleader: x_{t+1} = x_t + (server_lr / M) sum_i mean_i, mean_i over device i's deltas.

    Ringleader ASGD: The First Asynchronous SGD with Optimal Time Complexity under Data
    Heterogeneity (Maranjyan, Richtarik; ICLR 2026, arXiv 2509.22860), algorithm 1. Its rounds have
    two phases. In the first, updates are collected until every device has sent one. The last of
    them makes a version; in the second phase, the first update of each other device joins its mean
    and makes one. Further updates of a device that had its version are kept for the next round. So
    a round makes M versions, and staleness is at most 2 M - 2 while all devices are at work.

    The paper's devices send gradients of one step; here deltas may be of several, and ``server_lr``
    times their learning rate is the paper's gamma. A device's mean is updated incrementally, and
    the sum of the means with it; the sum is computed anew at the end of a round. One vector for
    each device is enough: once a device had its version, only the sum needs its mean, and the
    vector holds the mean for the next round. Its number is twice the count of deltas in that
    vector, plus one if the device had its version in this round.
    """

    rounds: ClassVar[InRounds] = "never"
    needs_all: ClassVar[bool] = True
    name: Literal["ringleader"] = "ringleader"
    buffer_size: Annotated[Literal[1], Field(exclude=True)] = 1
    server_lr: Annotated[float, Field(gt=0)] = 0.3
    """the step along the mean of the devices' means, M times in a round"""

    def completes(self, arrived: dict[int, int], device: int) -> bool:
        """Count an update; whether it is the first of its device after all have sent one."""
        number = arrived.get(device, 0)
        arrived[device] = number + 2
        if number % 2 or len(arrived) < (self.devices or 1):
            return False
        arrived[device] = 1
        if all(number % 2 for number in arrived.values()):  # the end of the round
            left = {device: number - 1 for device, number in arrived.items() if number > 1}
            arrived.clear()
            arrived.update(left)
        return True

    def is_complete(self, memory: Memory, device: int) -> bool:
        """Whether the device's update makes a version."""
        return memory.devices is not None and self.completes(memory.devices.numbers, device)

    def end_round(self, state: State) -> State:
        """Leave all as it is, since a version needs an update of each device."""
        return state

    def in_sum(self, vectors: DeviceVectors) -> Iterable[int]:
        """The devices with a mean of this round; vectors without a number are of earlier ones.

        If the sum was lost in the second phase, the means for the next round stand in for lost
        ones.
        """
        return vectors.numbers

    def add(
        self, update: Update, factor: float, total: Model, vectors: DeviceVectors | None
    ) -> DeviceVectors:
        """Add the delta to its device's mean, and to the sum unless it is for the next round."""
        delta = np.multiply(update.model.parameters, np.float32(factor))
        vectors = vectors if vectors is not None else self.vectors(delta.size)
        number = vectors.numbers.get(update.device, 0)
        mean = vectors.write(update.device)
        if number < 2:  # what is there is of an earlier round
            mean[:] = 0.0
        change = np.subtract(delta, mean)
        np.multiply(change, np.float32(1.0 / (number // 2 + 1)), out=change)
        np.add(mean, change, out=mean)
        if number % 2 == 0:
            add(total.parameters, change, 1.0, into=total.parameters)
        return vectors

    def forget(self, state: State, _devices: Iterable[int]) -> State:
        """Leave the means as they are, since a version needs one of each device."""
        return state

    def sum_anew(self, version: int, vectors: DeviceVectors, total: Model) -> None:
        """Begin the next round, if one has ended, with the means that are there for it."""
        if not any(number % 2 for number in vectors.numbers.values()):
            self.add_up(vectors, total)
