"""SCAFFOLD's server: control variates correct the drift of devices whose data differ."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator

from fedstream.core.layout import Model
from fedstream.strategies.batches import Batch
from fedstream.strategies.mixing import add
from fedstream.strategies.strategy import Memory, State, Update
from fedstream.strategies.vectors import DeviceVectors


class ScaffoldSettings(Batch):
    """SCAFFOLD: x += server_lr mean(x_new - x_tau), c += (|S| / M) mean(c_i+ - c_i), for each S.

    SCAFFOLD: Stochastic Controlled Averaging for Federated Learning (Karimireddy et al.),
    algorithm 1. In rounds as in its paper, or asynchronous: every K arrivals. c is published with
    x, and a device uses the c of its x_tau. The server also keeps every c_i, the sum of the
    changes that the device sent; trainers get the c_i of the device that they train for.
    """

    controls: ClassVar[bool] = True
    name: Literal["scaffold"] = "scaffold"
    buffer_size: Annotated[int, Field(ge=1)] = 5
    """|S|, the updates in a version"""
    per_step: bool = False
    """Divide updates by gamma H, as AFA-CD does (AFL + SCAFFOLD)."""
    devices: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """M; by default all devices of the run"""

    @field_validator("clip")
    @classmethod
    def _no_clip(cls, clip: float | None) -> float | None:
        if clip is not None:
            raise ValueError(
                "scaffold can't shorten a delta, as c_i+ - c_i belongs to all of it: leave it out"
            )
        return clip

    @property
    def remembered(self) -> int | None:
        """M, the number of devices with a vector each."""
        return self.devices

    @property
    def by_steps(self) -> bool:
        """Whether ``per_step`` is set."""
        return self.per_step

    def build(self, devices: int = 0) -> Self:
        """The rule for a run with ``devices`` devices."""
        return self.model_copy(update={"devices": self.devices or devices})

    def factor(self, update: Update, weight: float) -> float:
        """1, or 1 / (gamma H)."""
        return 1.0 / (update.lr * update.steps) if self.per_step else 1.0

    def add(
        self, update: Update, factor: float, total: Model, vectors: DeviceVectors | None
    ) -> DeviceVectors:
        """Add both parts to the sum, and the change of c_i to the device's c_i."""
        super().add(update, factor, total, vectors)
        change = update.model.controls
        add(total.controls, change, 1.0, into=total.controls)
        vectors = vectors if vectors is not None else self.vectors(change.size)
        own = vectors.write(update.device)
        add(own, change, 1.0, into=own)
        return vectors

    def step(self, state: State, spare: Model | None) -> State:
        """Make the batch's version: x and c."""
        total, c = self.total(state), state.model.controls
        add(c, total.controls, 1.0 / (self.devices or 1), into=total.controls)
        return super().step(state, spare)

    def drop_round(self, state: State) -> State:
        """Drop the batch, but keep its effect on c, which the c_i already include."""
        vectors = state.memory.devices
        if vectors is None:
            return super().drop_round(state)
        return State(state.version, state.model, without_batch(state.model, vectors))


def without_batch(model: Model, vectors: DeviceVectors) -> Memory:
    """The memory after dropping a batch: the change of c that the c_i already include.

    So the next version has c = mean(c_i) again. The batch's effect on x is lost.
    """
    owed = Model(model.layout)
    owed.buffer[:] = 0
    for device in sorted(vectors.heard):
        add(owed.controls, vectors[device], 1.0, into=owed.controls)
    add(owed.controls, model.controls, -float(vectors.devices), into=owed.controls)
    return Memory(owed, devices=vectors)
