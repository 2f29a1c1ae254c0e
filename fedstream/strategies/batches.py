"""FedBuff, and the base of rules that step along the mean of a batch (AFA-CD, SCAFFOLD).

Devices send deltas x_new - x_tau. With f_i the factor that a rule gives update i, K arrivals make

    x_{t+1} = x_t + (server_lr / K) sum_i f_i (x_new_i - x_tau_i)

unless another optimizer takes the step (:mod:`fedstream.strategies.optimizers`).
Floating-point buffers become the mean of the batch's own values, never an extrapolation (a running
variance would turn negative); integers take the newest value, counters the largest. A batch that
ends early because its round timed out is the mean of as many updates as arrived.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstream.core.layout import Model
from fedstream.strategies.mixing import add, count, toward
from fedstream.strategies.optimizers import Optimizer, ServerSgd
from fedstream.strategies.staleness import Constant, Staleness
from fedstream.strategies.strategy import Decision, Memory, State, Strategy, Update
from fedstream.strategies.vectors import DeviceVectors


class Batch(Strategy):
    """A rule that makes a version of K updates.

    A subclass defines an update's weight by ``weigh``, or by ``factor`` if the weight needs more
    than versions and samples.
    """

    step_key: ClassVar[str] = "server_lr"

    buffer_size: Annotated[int, Field(ge=1)] = 10
    """K, the updates in a version"""
    server_lr: Annotated[float, Field(gt=0)] = 1.0
    """the step along the batch's mean"""
    # Left out while it is the default, so that earlier releases read the run.
    server: Annotated[Optimizer, Field(exclude_if=lambda one: one == ServerSgd())] = ServerSgd()
    """the optimizer that takes the step"""

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return self.buffer_size

    @property
    def vector_names(self) -> tuple[str, ...]:
        """The names of the vectors that the server's optimizer keeps between versions."""
        return self.server.vectors

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
        weight = self.weight_of(state, update)
        memory = self._grown(state.memory, update, self.factor(update, weight), spare)
        grown = State(state.version, state.model, memory)
        if memory.arrivals < self.buffer_size:
            return grown, Decision("buffered", weight, d)
        return self.step(grown, None if memory.model is spare else spare), Decision(
            "applied", weight, d
        )

    def end_round(self, state: State) -> State:
        """Step along the mean of the updates that arrived, if any."""
        return self.step(state, None) if state.memory.arrivals else state

    def _grown(self, memory: Memory, update: Update, factor: float, spare: Model) -> Memory:
        """The memory with one more update in its sum."""
        total, new, arrivals = memory.model, update.model, memory.arrivals + 1
        if total is None:
            total = spare
            self.begin(total, memory.devices)
        vectors = self.add(update, factor, total, memory.devices)
        toward(total.buffers, new.buffers, 1.0 / arrivals, into=total.buffers)
        count(total, new, into=total)
        return Memory(total, arrivals, devices=vectors)

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


class FedBuffSettings(Batch):
    """FedBuff: x_{t+1} = x_t - (server_lr / K) sum s(d) (x_tau - x_new), every K arrivals.

    Unbounded Gradients in Federated Learning with Buffered Asynchronous Aggregation (Toghani,
    Uribe), algorithm 2; its devices' part is algorithm 1, and its beta is server_lr / K. K = 1 is
    plain asynchronous federated learning.
    """

    name: Literal["fedbuff"] = "fedbuff"
    staleness: Staleness = Constant()
    """Not in this paper; the original FedBuff has 1 / sqrt(1 + d)."""

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """s(d)."""
        return self.staleness(version - tau)
