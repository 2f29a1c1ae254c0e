"""Anarchic Federated Averaging: devices choose when they train, and for how many steps.

Anarchic Federated Learning (Yang, Zhang, Khanduri, Liu), algorithms 1 to 3. A device's answer is
G = (x_tau - x_new) / (gamma H), the mean gradient over its own number of steps. ``server_lr`` is
eta eta_L: the paper's algorithm box has eta G, but its proofs and tables need eta eta_L G.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

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


class AfaCdSettings(Batch):
    """AFA-CD: x_{t+1} = x_t - server_lr mean(G) over m arrivals (algorithm 2).

    For devices that take part alike (cross-device).
    """

    name: Literal["afa-cd"] = "afa-cd"
    buffer_size: Annotated[int, Field(ge=1)] = 5
    """m"""
    server_lr: Annotated[float, Field(gt=0)] = 0.1
    """eta eta_L"""

    @property
    def by_steps(self) -> bool:
        """True, because G is a mean over steps."""
        return True

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """Weigh every update equally."""
        return 1.0

    def factor(self, update: Update, weight: float) -> float:
        """1 / (gamma H): a device's mean gradient."""
        return 1.0 / (update.lr * update.steps)


class AfaCsSettings(AfaCdSettings):
    """AFA-CS: x_{t+1} = x_t - (server_lr / M) sum_i G_i over all M devices, every m arrivals.

    Algorithm 3, for devices of which some come often and some seldom (cross-silo). The sum is over
    every device's last G (zero until it is heard), and is updated as these change. To shed
    accumulated rounding errors it is recomputed at fixed version numbers, so that a replay
    recomputes it where the run did.
    """

    name: Literal["afa-cs"] = "afa-cs"  # type: ignore[assignment]
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
        """Begin with the sum of the remembered vectors, in case the sum itself was lost."""
        super().begin(total, vectors)
        if vectors is not None:
            _sum(vectors, total)

    def add(
        self, update: Update, factor: float, total: Model, vectors: DeviceVectors | None
    ) -> DeviceVectors:
        """Replace the device's last -G by the new -G, also in the sum."""
        new = update.model.parameters
        vectors = vectors if vectors is not None else self.vectors(new.size)
        last = vectors.write(update.device)
        latest = np.multiply(new, np.float32(factor))
        add(total.parameters, np.subtract(latest, last), 1.0, into=total.parameters)
        last[:] = latest
        return vectors

    def step(self, state: State, spare: Model | None) -> State:
        """Step along the mean over all devices; the sum is kept."""
        x, total = state.model, self.total(state)
        made = spare or Model(x.layout)
        vectors = self.move(state, self.devices or 1, into=made)
        made.buffers[:] = total.buffers
        count(x, total, into=made)
        if vectors is not None and (state.version + 1) % max(_SUMMED_ANEW, vectors.devices) == 0:
            _sum(vectors, total)
        return State(state.version + 1, made, Memory(total, devices=vectors))


def _sum(vectors: DeviceVectors, total: Model) -> None:
    """Recompute the sum over all devices, in the order of their numbers."""
    total.parameters[:] = 0.0
    for device in sorted(vectors.heard):
        add(total.parameters, vectors[device], 1.0, into=total.parameters)
