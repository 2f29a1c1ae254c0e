"""The interface of strategies, the server's rules for arriving updates.

A strategy is a pure function of its state and an update: no I/O, no clock, no randomness. The live
updater, replay and simulation run the same classes. Vectors are large, so models change owners
instead of being copied: ``receive`` may write into ``spare`` and keep it, and may write into the
models in its memory. It never writes into ``state.model`` or the update's model, and stores neither
in its memory. Models that the new state does not contain are free for reuse.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from fedstream.core import reasons
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Sends
from fedstream.runtime.config import NamedSettings
from fedstream.strategies.adapt import Adapt
from fedstream.strategies.vectors import DeviceVectors

InRounds: TypeAlias = Literal["never", "possible", "always"]


@dataclass(frozen=True, slots=True)
class Update:
    """A device's update after training x_tau into x_new.

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
    """A strategy's state between versions."""

    model: Model | None = None  # sum of the updates for the next version
    arrivals: int = 0  # updates for the next version
    weight: float = 0.0  # sum of their weights
    devices: DeviceVectors | None = None
    closed: bool = False  # a private batch that takes no more updates, as its round has ended
    opened: int = 0  # buckets of the next private version whose sums are among the vectors
    stalest: int = 0  # the largest staleness of the updates, in a `Batch`

    def copy(self, into: Model | None = None) -> Memory:
        """A deep copy; the sum is copied into ``into``, if given."""
        total = self.model
        if total is not None and into is not None:
            into.buffer[:] = total.buffer
            total = into
        elif total is not None:
            total = total.copy()
        vectors = self.devices.copy() if self.devices is not None else None
        return replace(self, model=total, devices=vectors)


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
        """A deep copy."""
        return State(self.version, self.model.copy(), self.memory.copy())


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of an update, and its weight (0 if dropped)."""

    outcome: Literal["applied", "buffered", "dropped"]
    weight: float
    staleness: int
    reason: str = reasons.TOO_STALE
    """why the update is refused, if it is dropped: one of ``reasons.REFUSED``"""
    suspects: tuple[int, ...] = ()
    """the places, from 0, of updates that stand out among those of the next version"""
    is_reference: bool = False
    """whether the update stays in the rule's memory to judge others, and goes into no version"""


class Strategy(NamedSettings):
    """Base of all strategies: its fields are the keys of ``[strategy]``, its methods the rule.

    An object is a frozen rule with its parameters. Most rules derive from
    :class:`fedstream.strategies.Mixing` or :class:`fedstream.strategies.Batch` and define only the
    weight of an update. The class variables describe the rule to the scheduler, the solvers and the
    journal, which need no code for single strategies.
    """

    naming_key: ClassVar[str] = "name"

    sends: ClassVar[Sends] = "delta"
    """what devices send: ``model`` (x_new) or ``delta`` (x_new - x_tau)"""
    has_memory: ClassVar[bool] = True
    """whether the rule has state between versions, such as an incomplete batch"""
    controls: ClassVar[bool] = False
    """whether the rule corrects client drift, which also needs such solvers (SCAFFOLD)"""
    rounds: ClassVar[InRounds] = "possible"
    """whether the scheduler may ask devices in rounds"""
    needs_all: ClassVar[bool] = False
    """whether the rule waits for every device, so that one in quarantine stops the run"""
    masked: ClassVar[bool] = False
    """whether updates are masked: versions are then made by opening a batch's sum"""
    batch_key: ClassVar[str] = "buffer_size"
    """the key that sets ``batch``, for error messages"""
    step_key: ClassVar[str] = ""
    """the key that sets the length of a step, which ``adapt`` scales; '': there is none"""

    name: str = ""
    """The rule's name in the configuration; a user's is file.py:Name."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Staler updates are dropped."""
    # Left out while it is the default, so that earlier releases read the run.
    cancel_stale: Annotated[bool, Field(exclude_if=lambda cancels: not cancels)] = False
    """Whether a task is given up as soon as its update would be staler."""
    adapt: Annotated[Adapt | None, Field(exclude_if=lambda one: one is None)] = None
    """How the length of a step is adapted; None: it stays as configured."""

    @model_validator(mode="after")
    def _can_adapt(self) -> Self:
        if self.adapt is None:
            return self
        if not self.step_key:
            raise ValueError(f"adapt: {self.name!r} has no rate to scale: leave it out")
        if not self.adapt.least <= self.step_rate <= self.adapt.most:
            raise ValueError(
                f"adapt: {self.step_key} = {self.step_rate:g} is not between least = "
                f"{self.adapt.least:g} and most = {self.adapt.most:g}: set bounds around it"
            )
        return self

    @property
    def references(self) -> Container[int]:
        """The devices whose updates judge others' and go into no version."""
        return ()

    @property
    def step_rate(self) -> float:
        """The value of ``step_key``, the length of a step."""
        return float(getattr(self, self.step_key))

    def bounded(self, scale: float) -> float:
        """The scale nearest to ``scale`` within the bounds of ``adapt``; 1 if it doesn't adapt.

        A run that goes on with another rate or other bounds may have left an earlier scale.
        """
        return 1.0 if self.adapt is None else self.adapt.bounded(self.step_rate, scale)

    def scaled(self, scale: float) -> Self:
        """The rule with steps of ``scale`` times the length, bounded; itself if not adapted."""
        if self.adapt is None:
            return self
        return self.model_copy(update={self.step_key: self.step_rate * self.bounded(scale)})

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return 1

    @property
    def remembered(self) -> int | None:
        """M, if the rule keeps a vector for each of M devices; None if it keeps none, or before
        :meth:`build` sets M."""
        return None

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The names of the vectors in the rule's memory, each of :meth:`span` values."""
        return ()

    def span(self, layout: Layout) -> int:
        """The length of the rule's vectors: by default as many values as parameters."""
        return layout.parameters

    def vectors(self, floats: int) -> DeviceVectors:
        """All vectors that the rule keeps, of ``floats`` elements, as at the run's beginning."""
        return DeviceVectors(self.remembered or 0, floats, names=self.vector_names)

    @property
    def by_steps(self) -> bool:
        """Whether the rule divides by gamma H, and so needs an update's steps."""
        return False

    @property
    def names_suspects(self) -> bool:
        """Whether the rule names suspects; of a user's own rule, it is not asked."""
        return False

    @property
    def rate(self) -> float:
        """The factor by which a single delta moves the model; 1 for models."""
        return 1.0

    @property
    def policy(self) -> str:
        """The text of the policy to which a rule with masked updates keeps."""
        return ""

    def build(self, devices: int = 0) -> Self:
        """The rule for a run with ``devices`` devices; by default, this rule."""
        return self

    def replaced(self, rule: Strategy) -> Strategy:
        """The rule to which another one leads on the updates that this one was sent.

        By default that other rule itself. Raises ConfigError if it can't use these updates.
        """
        return rule

    def taken_over(self, memory: Memory, was: Strategy) -> Memory:
        """The memory with which this rule goes on where another one, ``was``, left ``memory``.

        No rule can use another's sum, nor an optimizer another's vectors.
        """
        alike = (type(self), self.vector_names) == (type(was), was.vector_names)
        return memory if alike else Memory()

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """The weight of an update trained from x_tau that arrives when ``version`` is the newest.

        Its last bits may depend on the machine, so the weight is recorded and used in replays.
        """
        return 1.0

    @abstractmethod
    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Take in one update. The version increases by one if the update completes a version."""

    def end_round(self, state: State) -> State:
        """End the round: make the next version of the arrived updates, if any."""
        return state

    def completes(self, arrived: dict[int, int], device: int) -> bool:
        """Count an arriving update of ``device``, and return whether it completes a version.

        ``arrived``: the count so far, at first empty, by device. For plans, which know no models.
        """
        arrived[device] = arrived.get(device, 0) + 1
        if sum(arrived.values()) < self.batch:
            return False
        arrived.clear()
        return True

    def is_due(self, state: State) -> bool:
        """Whether a batch of masked updates is complete, so that its sum can be opened."""
        return False

    @property
    def sits_out(self) -> int:
        """Opened sums in which a device takes no part after one with an update of it."""
        return 0

    def open(self, state: State, opened: Model) -> State:
        """Open a batch's sum, which may make a version; only for rules whose updates are masked."""
        raise NotImplementedError

    def drop_sum(self, state: State) -> State:
        """Drop a batch whose sum is not opened; only for rules whose updates are masked."""
        raise NotImplementedError

    def drop_round(self, state: State) -> State:
        """End the round and drop its updates; the version stays.

        The vectors of devices stay too.
        """
        return replace(state, memory=Memory(devices=state.memory.devices))

    def forget(self, state: State, _devices: Iterable[int]) -> State:
        """Drop what the rule would use again of devices that are quarantined; by default nothing.

        May write into the memory, as :meth:`receive`.
        """
        return state

    def is_too_stale(self, staleness: int) -> bool:
        """Whether an update of this staleness is dropped."""
        return self.max_staleness is not None and staleness > self.max_staleness

    def weight_of(self, state: State, update: Update) -> float:
        """The update's recorded weight if it is replayed, else by :meth:`weigh`."""
        if update.weight is not None:
            return update.weight
        return self.weigh(state.version, update.tau, update.samples)
