"""FedAvg: synchronous rounds, the baseline."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstream.core.layout import Model
from fedstream.core.messages import Sends
from fedstream.strategies.mixing import count, mix
from fedstream.strategies.strategy import Decision, InRounds, Memory, State, Strategy, Update


class FedAvgSettings(Strategy):
    """FedAvg: x_{t+1} = the mean of k devices' models, all trained from x_t; late ones are dropped.

    ``weighting`` by samples is McMahan's, ``uniform`` that of FedAsync's paper. The mean is updated
    incrementally, m <- m + (n / N) (x_new - m), where N is the sum of the weights so far: the same
    arithmetic as mixing, and no sum that could overflow float32.
    """

    sends: ClassVar[Sends] = "model"
    rounds: ClassVar[InRounds] = "always"
    batch_key: ClassVar[str] = "clients_per_round"
    name: Literal["fedavg"] = "fedavg"
    max_staleness: Annotated[Literal[0], Field(exclude=True)] = 0
    clients_per_round: Annotated[int, Field(ge=1)] = 10
    """k"""
    weighting: Literal["uniform", "samples"] = "uniform"

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return self.clients_per_round

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """The update's n in the mean."""
        return float(samples) if self.weighting == "samples" else 1.0

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Average the update in; the k-th makes the version."""
        d = state.version - update.tau
        if self.is_too_stale(d):
            return state, Decision("dropped", 0.0, d)
        weight = self.weight_of(state, update)
        memory = state.memory
        total = memory.weight + weight
        if memory.model is None:
            mean = spare
            mean.buffer[:] = update.model.buffer
        else:
            mean = memory.model
            mix(mean, update.model, weight / total if total else 0.0, into=mean)
        grown = Memory(mean, memory.arrivals + 1, total)
        if grown.arrivals < self.clients_per_round:
            return State(state.version, state.model, grown), Decision("buffered", weight, d)
        return self._made(state, mean), Decision("applied", weight, d)

    def end_round(self, state: State) -> State:
        """Make a version of the mean of the models that arrived, if any."""
        if state.memory.model is None:
            return state
        return self._made(state, state.memory.model)

    @staticmethod
    def _made(state: State, mean: Model) -> State:
        count(state.model, mean, into=mean)
        return State(state.version + 1, mean)
