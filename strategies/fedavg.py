"""FedAvg: synchronous rounds, the baseline."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstream.broker.layout import Model
from fedstream.broker.messages import Sends
from fedstream.strategies.mixing import count, mix
from fedstream.strategies.settings import InRounds, RuleSettings
from fedstream.strategies.strategy import Decision, Memory, State, Update


class FedAvgSettings(RuleSettings):
    """FedAvg: rounds of k devices. ``weighting`` by samples is McMahan's, uniform the paper's."""

    sends: ClassVar[Sends] = "model"
    rounds: ClassVar[InRounds] = "always"
    batch_key: ClassVar[str] = "clients_per_round"
    max_staleness: ClassVar[int | None] = 0
    name: Literal["fedavg"] = "fedavg"
    clients_per_round: Annotated[int, Field(ge=1)] = 10
    weighting: Literal["uniform", "samples"] = "uniform"

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return self.clients_per_round

    def build(self, _devices: int = 0) -> FedAvg:
        """The strategy."""
        return FedAvg(self)


class FedAvg:
    """x_{t+1} = the mean of k devices' models, all trained from x_t; late ones are dropped.

    The mean is updated incrementally, m <- m + (n / N) (x_new - m), where N is the sum of the
    weights so far: the same arithmetic as mixing, and no sum that could overflow float32.
    """

    sends: Sends = FedAvgSettings.sends
    controls = False
    max_staleness: int | None = 0
    per_step = False
    rate = 1.0
    devices: int | None = None

    def __init__(self, settings: FedAvgSettings) -> None:
        self._k = settings.clients_per_round
        self._by_samples = settings.weighting == "samples"

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """The update's n in the mean."""
        return float(samples) if self._by_samples else 1.0

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Average the update in; the k-th makes the version."""
        d = state.version - update.tau
        if d > 0:
            return state, Decision("dropped", 0.0, d)
        weight = update.weight
        if weight is None:
            weight = self.weigh(state.version, update.tau, update.samples)
        memory = state.memory
        total = memory.weight + weight
        if memory.model is None:
            mean = spare
            mean.buffer[:] = update.model.buffer
        else:
            mean = memory.model
            mix(mean, update.model, weight / total if total else 0.0, into=mean)
        grown = Memory(mean, memory.arrivals + 1, total)
        if grown.arrivals < self._k:
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
