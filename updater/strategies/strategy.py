"""What a strategy is: what an arriving update does to the global model.

A strategy is a pure function of its state and an update: no I/O, no clock, no randomness. The live
updater, replay and simulation run the same classes. Vectors are large, so ownership replaces
copying: ``receive`` may write into ``spare``, and keep it, and into what its memory holds; it never
writes into ``state.model`` or the update's, and keeps neither. Models that the new state does not
hold are free for reuse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from fedstream.broker.layout import Model
from fedstream.broker.messages import Sends
from fedstream.updater.strategies.vectors import DeviceVectors


@dataclass(frozen=True, slots=True)
class Update:
    """What a device sent that trained x_tau into x_new.

    ``model`` is x_new, or, where the strategy asks for deltas, x_new - x_tau in place of the
    parameters and c_i+ - c_i in place of the controls; buffers and integers are x_new's always.
    """

    model: Model
    tau: int
    device: int
    samples: int
    steps: int  # H
    lr: float  # gamma
    weight: float | None = None
    """that it was given when it was recorded; None: the strategy's ``weigh`` says.

    The exponential and the power of a staleness function are the C library's: another machine's may
    end in another bit, and the models made with it would be others."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What a strategy keeps between versions."""

    model: Model | None = None  # what has arrived for the next version, summed up
    arrivals: int = 0  # for the next version
    weight: float = 0.0  # summed
    devices: DeviceVectors | None = None


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
        memory = self.memory
        return State(
            self.version,
            self.model.copy(),
            Memory(
                memory.model and memory.model.copy(),
                memory.arrivals,
                memory.weight,
                memory.devices and memory.devices.copy(),
            ),
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of an update, and the weight that it was given (0 if dropped)."""

    outcome: Literal["applied", "buffered", "dropped"]
    weight: float
    staleness: int


class Strategy(Protocol):
    """The server's rule."""

    sends: Sends  # what it wants of devices
    controls: bool  # the layout has a control variate (SCAFFOLD)
    per_step: bool  # it divides by gamma H: an update without steps is of no use
    rate: float  # by which a delta that comes alone would move the model; 1 where models are sent
    devices: int | None  # M, where it keeps something of each
    max_staleness: int | None  # an older update is dropped

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """The weight of an update trained from x_tau that arrives when ``version`` is the newest.

        Its last bits are the machine's.
        """

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Takes one update in. A version more means that a model was made."""

    def end_round(self, state: State) -> State:
        """Nothing more will come for this version: makes the model of what has arrived."""
