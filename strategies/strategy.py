"""The strategy protocol: what an arriving update does to the global model.

A strategy is a pure function of its state and an update: no I/O, no clock, no randomness. The live
updater, replay and simulation run the same classes. Vectors are large, so ownership replaces
copying: ``receive`` may write into ``spare`` and keep it, and may write into the models in its
memory; it never writes into ``state.model`` or the update's model, and takes neither into its
memory. Models that the new state does not hold are free for reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from fedstream.broker.layout import Model
from fedstream.broker.messages import Sends
from fedstream.strategies.vectors import DeviceVectors


@dataclass(frozen=True, slots=True)
class Update:
    """What a device sent after training x_tau into x_new.

    ``model`` is x_new or, if the strategy asks for deltas, has x_new - x_tau in place of the
    parameters and c_i+ - c_i in place of the controls; buffers and integers are always x_new's.
    """

    model: Model
    tau: int
    device: int
    samples: int
    steps: int  # H
    lr: float  # gamma
    weight: float | None = None
    """The recorded weight, if the update is replayed; None: the strategy's ``weigh`` decides.

    Staleness functions use the C library's exponential and power, whose last bits may differ
    between machines; the models would then differ too."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a strategy keeps between versions."""

    model: Model | None = None  # what has arrived for the next version, summed up
    arrivals: int = 0  # for the next version
    weight: float = 0.0  # summed
    devices: DeviceVectors | None = None

    def copy(self, into: Model | None = None) -> Memory:
        """The same with buffers of its own; the sum's is that of ``into``, if given."""
        total = self.model
        if total is not None and into is not None:
            into.buffer[:] = total.buffer
            total = into
        elif total is not None:
            total = total.copy()
        return replace(self, model=total, devices=self.devices and self.devices.copy())


@dataclass(frozen=True, slots=True)
class State:
    """Version t, its model x_t, and the strategy's memory."""

    version: int
    model: Model
    memory: Memory = Memory()

    def models(self) -> Iterator[Model]:
        """The models whose buffers are in use."""
        yield self.model
        if self.memory.model is not None:
            yield self.memory.model

    def copy(self) -> State:
        """The same with buffers of its own."""
        return State(self.version, self.model.copy(), self.memory.copy())


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of an update, and the weight that it was given (0 if dropped)."""

    outcome: Literal["applied", "buffered", "dropped"]
    weight: float
    staleness: int


class Strategy(Protocol):
    """The server's rule."""

    sends: Sends  # what devices send
    controls: bool  # the layout has a control variate (SCAFFOLD)
    per_step: bool  # it divides by gamma H, so it can't use an update without steps
    rate: float  # by which a delta on its own would move the model; 1 if models are sent
    devices: int | None  # M, if it keeps a vector for each
    max_staleness: int | None  # staler updates are dropped

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """The weight of an update trained from x_tau that arrives when ``version`` is the newest.

        Its last bits depend on the machine.
        """

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Take in one update. The version goes up by one if that made a model."""

    def end_round(self, state: State) -> State:
        """End the round: make the next version of what has arrived, if anything has."""
