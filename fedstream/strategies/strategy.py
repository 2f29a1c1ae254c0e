"""What a strategy is: the server's rule, which says what an arriving update does to the model.

A strategy is a pure function of its state and an update: no I/O, no clock, no randomness. The live
updater, replay and simulation run the same classes. Vectors are large, so ownership replaces
copying: ``receive`` may write into ``spare`` and keep it, and may write into the models in its
memory; it never writes into ``state.model`` or the update's model, and takes neither into its
memory. Models that the new state does not hold are free for reuse.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field

from fedstream.core.layout import Model
from fedstream.core.messages import Sends
from fedstream.runtime.config import NamedSettings
from fedstream.strategies.vectors import DeviceVectors

InRounds: TypeAlias = Literal["never", "possible", "always"]


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


class Strategy(NamedSettings):
    """Base of all strategies: its fields are the keys of ``[strategy]``, its methods the rule.

    An object is one rule with its parameters, frozen. Most rules derive from
    :class:`fedstream.strategies.Mixing` or :class:`fedstream.strategies.Batch` and define only how
    much an update weighs. The class variables describe the rule to the scheduler, the solvers and
    the journal, so nothing else needs to know one strategy from another.
    """

    naming_key: ClassVar[str] = "name"

    sends: ClassVar[Sends] = "delta"
    """what its devices send: ``model`` (x_new) or ``delta`` (x_new - x_tau)"""
    has_memory: ClassVar[bool] = True
    """it keeps something between versions, such as a batch that is not full yet"""
    controls: ClassVar[bool] = False
    """it corrects client drift, and needs solvers that do so too (SCAFFOLD)"""
    rounds: ClassVar[InRounds] = "possible"
    """whether the scheduler may ask devices in rounds"""
    batch_key: ClassVar[str] = "buffer_size"
    """the key that sets ``batch``, for error messages"""

    name: str = ""
    """Its name in the configuration; own rules have file.py:Name."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Updates that are staler are dropped."""

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return 1

    @property
    def remembered(self) -> int | None:
        """M, if it keeps a vector for each of M devices; None if it keeps none, or M is not known
        before :meth:`build`."""
        return None

    @property
    def by_steps(self) -> bool:
        """Whether it divides by gamma H, so that it can't use an update without steps."""
        return False

    @property
    def rate(self) -> float:
        """By which a delta on its own would move the model; 1 if models are sent."""
        return 1.0

    def build(self, devices: int = 0) -> Self:
        """The rule for a run with ``devices`` devices: itself, unless it needs to know them."""
        return self

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """The weight of an update trained from x_tau that arrives when ``version`` is the newest.

        Its last bits may depend on the machine: it is recorded, and replay mixes by the record.
        """
        return 1.0

    @abstractmethod
    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Take in one update. The version goes up by one if that made a model."""

    def end_round(self, state: State) -> State:
        """End the round: make the next version of what has arrived, if anything has."""
        return state

    def drop_round(self, state: State) -> State:
        """End the round without using what has arrived: the version stays as it is.

        What is kept for each device stays.
        """
        return replace(state, memory=Memory(devices=state.memory.devices))

    def is_too_stale(self, staleness: int) -> bool:
        """Whether an update as stale as this is dropped."""
        return self.max_staleness is not None and staleness > self.max_staleness

    def weight_of(self, state: State, update: Update) -> float:
        """The update's recorded weight if it is replayed, else what :meth:`weigh` says."""
        if update.weight is not None:
            return update.weight
        return self.weigh(state.version, update.tau, update.samples)
