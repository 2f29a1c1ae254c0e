"""FedBuff, and the base of rules that step along the mean of a batch (AFA-CD, SCAFFOLD).

Devices send deltas x_new - x_tau. With f_i the factor that a rule gives update i, K arrivals make

    x_{t+1} = x_t + (server_lr / K) sum_i f_i (x_new_i - x_tau_i)

unless another optimizer takes the step (:mod:`fedstream.strategies.optimizers`).
Floating-point buffers become the mean of the batch's own values, never an extrapolation (a running
variance would turn negative); integers take the newest value, counters the largest. A batch that
ends early because its round timed out is the mean of as many updates as arrived.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from fedstream.core.layout import Floats, Layout, Model
from fedstream.strategies import robust
from fedstream.strategies.mixing import add, count, toward
from fedstream.strategies.optimizers import Optimizer, ServerSgd
from fedstream.strategies.staleness import Constant, Staleness
from fedstream.strategies.strategy import Decision, Memory, State, Strategy, Update
from fedstream.strategies.vectors import DeviceVectors

Middle: TypeAlias = Literal["mean", "median", "geometric median"]


class Stepping(Strategy):
    """A rule that steps along a mean of deltas.

    A subclass defines an update's weight by ``weigh``, or by ``factor`` if the weight needs more
    than versions and samples; and by ``is_complete`` when a version is made.
    """

    step_key: ClassVar[str] = "server_lr"

    server_lr: Annotated[float, Field(gt=0)] = 1.0
    """the step along the batch's mean"""
    # Left out while it is the default, so that earlier releases read the run.
    server: Annotated[Optimizer, Field(exclude_if=lambda one: one == ServerSgd())] = ServerSgd()
    """the optimizer that takes the step"""
    clip: Annotated[
        Annotated[float, Field(gt=0)] | None, Field(exclude_if=lambda one: one is None)
    ] = None
    """S, the length to which a longer x_new - x_tau is shortened"""

    @abstractmethod
    def is_complete(self, memory: Memory, device: int) -> bool:
        """Whether the memory makes a version, now that it has an update of ``device``."""

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The names of the vectors that the server's optimizer keeps between versions."""
        return self.server.vectors

    @property
    def names_suspects(self) -> bool:
        """Whether deltas are shortened, those of suspects by much."""
        return self.clip is not None

    @property
    def rate(self) -> float:
        """The server's learning rate, the factor of the mean delta."""
        return self.server_lr

    def factor(self, update: Update, weight: float) -> float:
        """f for an update of this weight: by default, the weight."""
        return weight

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Add the update to the batch; the K-th makes the version."""
        d = state.version - update.tau
        if self.is_too_stale(d):
            return state, Decision("dropped", 0.0, d)
        weight, kept = self.weight_of(state, update), self._kept(update)
        memory = self._grown(state.memory, update, kept * self.factor(update, weight), spare)
        if d > memory.stalest:
            memory = replace(memory, stalest=d)
        grown = State(state.version, state.model, memory)
        suspects = {memory.arrivals - 1} if kept * robust.STANDS_OUT < 1 else set[int]()
        if not self.is_complete(memory, update.device):
            return grown, Decision("buffered", weight, d, suspects=tuple(suspects))
        suspects.update(self.combine(grown))
        after = self.step(grown, None if memory.model is spare else spare)
        return after, Decision("applied", weight, d, suspects=tuple(sorted(suspects)))

    def end_round(self, state: State) -> State:
        """Step along the mean of the updates that arrived, if any."""
        if not state.memory.arrivals:
            return state
        self.combine(state)
        return self.step(state, None)

    def combine(self, state: State) -> tuple[int, ...]:
        """Complete the sum over the batch; return the places of the updates that stand out.

        By default nothing is left to do, because each update was added when it arrived.
        """
        return ()

    def _kept(self, update: Update) -> float:
        """The share of a delta's length that clipping keeps: 1, or S / |x_new - x_tau|."""
        length = robust.norm(update.model.parameters) if self.clip is not None else 0.0
        return 1.0 if self.clip is None or length <= self.clip else self.clip / length

    def _grown(self, memory: Memory, update: Update, factor: float, spare: Model) -> Memory:
        """The memory with one more update in its sum."""
        total, new, arrivals = memory.model, update.model, memory.arrivals + 1
        if total is None:
            total = spare
            self.begin(total, memory.devices)
        vectors = self.add(update, factor, total, memory.devices)
        toward(total.buffers, new.buffers, 1.0 / arrivals, into=total.buffers)
        count(total, new, into=total)
        return Memory(total, arrivals, devices=vectors, stalest=memory.stalest)

    def begin(self, total: Model, _vectors: DeviceVectors | None) -> None:
        """Begin a sum with zero."""
        total.floats[:] = 0.0
        total.integers[:] = 0

    def add(
        self, update: Update, factor: float, total: Model, vectors: DeviceVectors | None
    ) -> DeviceVectors | None:
        """Add f (x_new - x_tau) to the sum; return the devices' vectors."""
        add(total.parameters, update.model.parameters, factor, into=total.parameters)
        return vectors

    def step(self, state: State, spare: Model | None) -> State:
        """Make the batch's version; here the version's model overwrites the sum."""
        made = self.total(state)
        vectors = self.move(state, state.memory.arrivals, into=made)
        count(state.model, made, into=made)
        return State(state.version + 1, made, Memory(devices=vectors))

    def move(self, state: State, n: int, into: Model) -> DeviceVectors | None:
        """Let the server's optimizer move the parameters along the sum / n; return its vectors.

        ``into`` gets the parameters; it may be the sum.
        """
        x, total = state.model.parameters, self.total(state).parameters
        vectors = state.memory.devices
        if isinstance(self.server, ServerSgd):
            add(x, total, self.rate / n, into=into.parameters)
            return vectors
        if vectors is None:
            vectors = self.vectors(x.size)
        self.server.step(x, total, n, self.rate, vectors, into=into.parameters)
        return vectors

    @staticmethod
    def total(state: State) -> Model:
        """The sum over the batch."""
        if state.memory.model is None:
            raise RuntimeError("a batch without updates")
        return state.memory.model


class Batch(Stepping):
    """A rule that makes a version of K updates."""

    buffer_size: Annotated[int, Field(ge=1)] = 10
    """K, the updates in a version"""

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return self.buffer_size

    def is_complete(self, memory: Memory, device: int) -> bool:
        """Whether K updates have arrived."""
        return memory.arrivals >= self.buffer_size


class FedBuffSettings(Batch):
    """FedBuff: x_{t+1} = x_t - (server_lr / K) sum s(d) (x_tau - x_new), every K arrivals.

    Unbounded Gradients in Federated Learning with Buffered Asynchronous Aggregation (Toghani,
    Uribe; 2022), algorithm 2; its devices' part is algorithm 1, and its beta is server_lr / K.
    K = 1 is plain asynchronous federated learning.
    """

    name: Literal["fedbuff"] = "fedbuff"
    staleness: Staleness = Constant()
    """Not in this paper; the original FedBuff (Nguyen et al., AISTATS 2022) has 1 / sqrt(1 + d)."""
    aggregate: Annotated[Middle, Field(exclude_if=lambda one: one == "mean")] = "mean"
    """what is made of the batch: its mean, or a middle that outliers can't move far
    (:mod:`fedstream.strategies.robust`), for which the K updates are kept"""

    @model_validator(mode="after")
    def _has_a_middle(self) -> Self:
        if self.aggregate != "mean" and self.buffer_size < 3:
            raise ValueError(
                f"aggregate = {self.aggregate!r} resists nobody with buffer_size = "
                f"{self.buffer_size}: set a buffer_size of 3 or more, or leave out aggregate"
            )
        return self

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The optimizer's vectors, and those of the batch's updates if they are kept."""
        kept = 0 if self.aggregate == "mean" else self.buffer_size
        return (*super().vector_names, *map(_name, range(kept)))

    @property
    def names_suspects(self) -> bool:
        """Whether deltas are shortened, or compared with the middle."""
        return super().names_suspects or self.aggregate != "mean"

    def span(self, layout: Layout) -> int:
        """The parameters; and the buffers, if updates are kept."""
        return super().span(layout) if self.aggregate == "mean" else layout.floats

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """s(d)."""
        return self.staleness(version - tau)

    def _grown(self, memory: Memory, update: Update, factor: float, spare: Model) -> Memory:
        """The memory with one more update, which is also kept if the mean is not enough."""
        grown = super()._grown(memory, update, factor, spare)
        if self.aggregate == "mean":
            return grown
        vectors = grown.devices or self.vectors(self.span(update.model.layout))
        weighted(update.model, factor, into=vectors.write(_name(grown.arrivals - 1)))
        return replace(grown, devices=vectors)

    def combine(self, state: State) -> tuple[int, ...]:
        """Put n times the batch's middle in place of its sum."""
        vectors, n = state.memory.devices, state.memory.arrivals
        if self.aggregate == "mean" or vectors is None:
            return ()
        kept = [vectors[_name(place)] for place in range(n)]
        return middle(self.aggregate, kept, n, into=self.total(state))


def _name(place: int) -> str:
    """The name of the vector of the batch's update at a place, from 0."""
    return f"update {place + 1}"


def weighted(model: Model, factor: float, into: Floats) -> None:
    """Write f (x_new - x_tau) into a vector, followed by the update's floating-point buffers."""
    into[:] = model.floats
    parameters = into[: model.layout.parameters]
    np.multiply(parameters, np.float32(factor), out=parameters)


def middle(how: Middle, kept: Sequence[Floats], n: int, into: Model) -> tuple[int, ...]:
    """Make the middle of vectors as :func:`weighted` writes them, with n times the parameters.

    Returns the places of the vectors whose parameters are far from the middle.
    """
    size, rule = into.layout.parameters, robust.RULES[how]
    rule([vector[size:] for vector in kept], into.buffers)
    mine = [vector[:size] for vector in kept]
    rule(mine, into.parameters)
    outliers = robust.far_from(into.parameters, mine)
    np.multiply(into.parameters, np.float32(n), out=into.parameters)
    return outliers
