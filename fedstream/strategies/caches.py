"""Base of the rules that cache every device's last update, and keep the sum of the caches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Self

import numpy as np
from pydantic import Field

from fedstream.core.layout import Model
from fedstream.strategies.batches import Batch
from fedstream.strategies.mixing import add, count
from fedstream.strategies.strategy import Memory, State, Update
from fedstream.strategies.vectors import DeviceVectors

# Versions until the sum is recomputed, or the number of devices if that is larger: a recomputation
# adds one vector for each device, so it costs at most one addition per version.
_SUMMED_ANEW = 100


class Caching(Batch):
    """A rule with a cache for each of M devices: the last f (x_new - x_tau), zero until then.

    The sum over the caches is updated as these change. To shed accumulated rounding errors it is
    recomputed at fixed version numbers, so that a replay recomputes it where the run did. It is in
    the memory's model, and kept between versions.
    """

    devices: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """M; by default all devices of the run"""

    @property
    def remembered(self) -> int | None:
        """M, the number of devices with a vector each."""
        return self.devices

    def build(self, devices: int = 0) -> Self:
        """The rule for a run with ``devices`` devices."""
        return self.model_copy(update={"devices": self.devices or devices})

    def begin(self, total: Model, vectors: DeviceVectors | None) -> None:
        """Begin with the sum of the caches, in case the sum itself was lost."""
        super().begin(total, vectors)
        if vectors is not None:
            self.add_up(vectors, total)

    def add(
        self, update: Update, factor: float, total: Model, vectors: DeviceVectors | None
    ) -> DeviceVectors:
        """Replace the device's cache, also in the sum."""
        new = update.model.parameters
        vectors = vectors if vectors is not None else self.vectors(new.size)
        last = vectors.write(update.device)
        latest = np.multiply(new, np.float32(factor))
        add(total.parameters, np.subtract(latest, last), 1.0, into=total.parameters)
        last[:] = latest
        return vectors

    def step(self, state: State, spare: Model | None) -> State:
        """Make the batch's version by :meth:`move`; the sum is kept."""
        x, total = state.model, self.total(state)
        made = spare or Model(x.layout)
        vectors = self.move(state, self.divisor(state), into=made)
        made.buffers[:] = total.buffers
        count(x, total, into=made)
        if vectors is not None:
            self.sum_anew(state.version + 1, vectors, total)
        return State(state.version + 1, made, Memory(total, devices=vectors))

    def forget(self, state: State, devices: Iterable[int]) -> State:
        """Clear the devices' caches, also in the sum."""
        vectors, total = state.memory.devices, state.memory.model
        for device in devices:
            if vectors is not None and device in vectors.heard:
                if total is not None:
                    add(total.parameters, vectors[device], -1.0, into=total.parameters)
                self.clear(vectors, device)
        return state

    def clear(self, vectors: DeviceVectors, device: int) -> None:
        """Clear a device's cache, which is out of the sum."""
        vectors.write(device)[:] = 0.0

    def sum_anew(self, version: int, vectors: DeviceVectors, total: Model) -> None:
        """Recompute the sum after some versions, ``version`` among them."""
        if version % max(_SUMMED_ANEW, vectors.devices) == 0:
            self.add_up(vectors, total)

    def divisor(self, state: State) -> int:
        """The number by which :meth:`move` divides the sum: M."""
        return self.devices or 1

    def in_sum(self, vectors: DeviceVectors) -> Iterable[int]:
        """The devices whose vectors the sum is over: all that were heard."""
        return vectors.heard

    def add_up(self, vectors: DeviceVectors, total: Model) -> None:
        """Compute the sum, in the order of the devices' numbers."""
        total.parameters[:] = 0.0
        for device in sorted(self.in_sum(vectors)):
            add(total.parameters, vectors[device], 1.0, into=total.parameters)
