"""What arrives in a check, and states compared by their bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedstream.broker.layout import Layout, Model, Tensor
from fedstream.strategies import Memory, State, Update

DEVICES = 6
LATEST = 4  # the largest staleness that is drawn


@dataclass(frozen=True)
class DrawnUpdate:
    """A drawn update, as it comes to whatever version is the newest."""

    number: int
    device: int
    late: int  # wanted staleness
    samples: int
    steps: int
    lr: float
    moved: Model  # x_new - x_tau, except for buffers and integers

    def update(self, state: State, sends: str, late: int | None = None) -> Update:
        tau = max(0, state.version - (self.late if late is None else late))
        model = self.moved.copy()
        if sends == "model":
            model.parameters[:] += state.model.parameters
        return Update(
            model=model, tau=tau, device=self.device, samples=self.samples, steps=self.steps,
            lr=self.lr,
        )  # fmt: skip


# states, compared by their bits


@dataclass(frozen=True)
class MemoryPrint:
    model: str | None
    arrivals: int
    weight: float
    vectors: tuple[tuple[int, bytes], ...]


@dataclass(frozen=True)
class StatePrint:
    version: int
    model: str
    memory: MemoryPrint


def memory_print(memory: Memory) -> MemoryPrint:
    vectors = memory.devices
    heard = sorted(vectors.heard) if vectors is not None else []
    return MemoryPrint(
        memory.model.digest() if memory.model is not None else None,
        memory.arrivals,
        memory.weight,
        tuple((device, vectors[device].tobytes()) for device in heard) if vectors else (),
    )


def state_print(state: State) -> StatePrint:
    return StatePrint(state.version, state.model.digest(), memory_print(state.memory))


def layout_of(*, controls: bool) -> Layout:
    """Parameters, statistics, and integers of each kind."""
    layout = Layout(
        (
            Tensor("weight", (4, 3), "float32", "parameter"),
            Tensor("mean", (3,), "float32", "buffer"),
            Tensor("ids", (2,), "int64", "integer"),
            Tensor("seen", (), "int64", "counter"),
        )
    )
    return layout.with_controls() if controls else layout


def drawn(layout: Layout, rng: np.random.Generator, scale: float) -> Model:
    model = Model(layout)
    model.floats[:] = scale * rng.standard_normal(layout.floats)
    model.integers[:] = 0
    model.integers[layout.counters] = rng.integers(0, 1000, 1)
    return model


def filled(layout: Layout, byte: int) -> Model:
    model = Model(layout)
    model.buffer[:] = byte
    return model
