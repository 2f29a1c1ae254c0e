"""CA2FL and ACED: rules that average the caches of devices that did not answer lately.

With h_i the cache of device i, both step along h + w sum_S (Delta_i - h_i) of the devices S in the
batch. ``numbers`` of the devices' vectors says of every cache since which version it takes part;
0: the batch with it has not made its version.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from fedstream.core.layout import Model
from fedstream.strategies.afa import AfaCsSettings
from fedstream.strategies.caches import Caching
from fedstream.strategies.mixing import add
from fedstream.strategies.strategy import State, Update
from fedstream.strategies.vectors import DeviceVectors

_BEFORE = "ca2fl sum"  # of the caches as they were before the batch


class Ca2flSettings(Caching):
    """CA2FL: x_{t+1} = x_t + server_lr (h + (1 / |S|) sum_S (Delta_i - h_i)), every K arrivals.

    Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
    Calibration (Wang, Cao, Wu, Chen, Chen; ICLR 2024), algorithm 2. Delta_i = x_new - x_tau, and
    h = (1 / M) sum h_i over all M devices, both as they were before the batch; afterwards
    h_i = Delta_i for the devices in it. S is a set: a device that answers twice in a batch counts
    once, with its last update.
    """

    name: Literal["ca2fl"] = "ca2fl"

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The optimizer's vectors, and the sum of the caches before the batch."""
        return (*super().vector_names, _BEFORE)

    def begin(self, total: Model, vectors: DeviceVectors | None) -> None:
        """Begin with the sum of the caches, which a dropped batch may have changed."""
        super().begin(total, vectors)
        if vectors is not None:
            vectors.write(_BEFORE)[:] = total.parameters
            vectors.numbers.clear()

    def add(
        self, update: Update, factor: float, total: Model, vectors: DeviceVectors | None
    ) -> DeviceVectors:
        """Replace the device's cache, and note that the device is in the batch."""
        vectors = super().add(update, factor, total, vectors)
        vectors.numbers[update.device] = 0
        return vectors

    def clear(self, vectors: DeviceVectors, device: int) -> None:
        """Clear a device's cache; in a batch with the device, its update is zero instead."""
        if device not in vectors.numbers:
            before = vectors.write(_BEFORE)
            add(before, vectors[device], -1.0, into=before)
        super().clear(vectors, device)

    def move(self, state: State, n: int, into: Model) -> DeviceVectors:
        """Move along the calibrated mean: as caches replace each other, sum_S (Delta_i - h_i) is
        the change of their sum."""
        vectors, total = _vectors(state), self.total(state).parameters
        before = vectors.write(_BEFORE)
        np.subtract(total, before, out=into.parameters)
        np.multiply(into.parameters, np.float32(1.0 / len(vectors.numbers)), out=into.parameters)
        add(into.parameters, before, 1.0 / n, into=into.parameters)
        super().move(replace(state, memory=replace(state.memory, model=into)), 1, into)
        return vectors

    def step(self, state: State, spare: Model | None) -> State:
        """Make the batch's version, and keep the sum with which the next batch begins."""
        after = super().step(state, spare)
        vectors = _vectors(after)
        vectors.write(_BEFORE)[:] = self.total(after).parameters
        vectors.numbers.clear()
        return after


class AcedSettings(AfaCsSettings):
    """ACED: x_{t+1} = x_t - (server_lr / |A|) sum_A G_i over the devices A with a recent cache.

    Mitigating Participation Imbalance Bias in Asynchronous Federated Learning (Chang et al.;
    arXiv 2511.19066), the delay-aware form of its ACE. A holds the devices whose last answer
    arrived at most ``max_age`` versions ago; the answer that makes a version always takes part.
    ACE is ``afa-cs`` with a buffer of 1. A reviewer disputes the paper's proof of convergence.
    """

    name: Literal["aced"] = "aced"  # type: ignore[assignment]
    buffer_size: Annotated[int, Field(ge=1)] = 1
    """the updates in a version; 1 in the paper"""
    max_age: Annotated[int, Field(ge=0)] = 50
    """tau_algo, the age in versions up to which a cache takes part"""

    def add(
        self, update: Update, factor: float, total: Model, vectors: DeviceVectors | None
    ) -> DeviceVectors:
        """Replace the device's cache, which is the youngest now: the last in ``numbers``."""
        vectors = super().add(update, factor, total, vectors)
        vectors.numbers.pop(update.device, None)
        vectors.numbers[update.device] = 0
        return vectors

    def step(self, state: State, spare: Model | None) -> State:
        """Clear the caches that have become too old, and step along the mean of the others."""
        vectors, total = _vectors(state), self.total(state).parameters
        made, numbers = state.version + 1, vectors.numbers  # the oldest first, new ones last
        for device in list(takewhile(lambda one: not numbers[one], reversed(numbers))):
            numbers[device] = made
        for device in list(takewhile(lambda one: made - numbers[one] > self.max_age, numbers)):
            add(total, vectors[device], -1.0, into=total)
            self.clear(vectors, device)
        return super().step(state, spare)

    def clear(self, vectors: DeviceVectors, device: int) -> None:
        """Clear a device's cache, which then takes no part."""
        super().clear(vectors, device)
        vectors.numbers.pop(device, None)

    def divisor(self, state: State) -> int:
        """|A|; 1 if all devices of a round were quarantined, so that the sum is empty."""
        return len(_vectors(state).numbers) or 1


def _vectors(state: State) -> DeviceVectors:
    """The devices' caches."""
    if state.memory.devices is None:
        raise RuntimeError("a batch without updates")
    return state.memory.devices
