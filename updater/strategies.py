"""Strategies: what an arriving update does to the global model.

A strategy is a pure function of its state and an update: no I/O, no clock, no randomness. The live
updater, replay and simulation run the same classes. Vectors are large, so ownership replaces
copying: ``receive`` may write into ``spare``, and keep it, and into the models of its memory; it
never writes into ``state.model`` or the update's, and keeps neither. Models that the new state does
not hold are free for reuse.

Adding a strategy: a settings class with ``build``, a class like the two below, an entry in
``StrategySettings``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field, TypeAdapter, ValidationError

from broker.errors import ConfigError
from broker.layout import Model
from runtime.config import Section
from updater.mixing import mix
from updater.rules import AlphaSchedule, ConstantAlpha, Polynomial, Staleness

__all__ = [
    "Decision",
    "FedAsync",
    "FedAsyncSettings",
    "FedAvg",
    "FedAvgSettings",
    "Memory",
    "State",
    "Strategy",
    "StrategySettings",
    "Update",
    "strategy_of",
]


@dataclass(frozen=True, slots=True)
class Update:
    """A model x_new that a device trained from version tau."""

    model: Model
    tau: int
    device: int
    samples: int
    steps: int  # H
    lr: float  # gamma


@dataclass(frozen=True, slots=True)
class Memory:
    """What a strategy keeps between versions: a model that grows, and what went into it."""

    model: Model | None = None
    arrivals: int = 0
    weight: float = 0.0  # summed


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


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of an update, and the weight that it was given (0 if dropped)."""

    outcome: Literal["applied", "buffered", "dropped"]
    weight: float
    staleness: int


class Strategy(Protocol):
    """The server's rule."""

    max_staleness: int | None  # an older update is dropped

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Takes one update in. A version more means that a model was made."""

    def end_round(self, state: State) -> State:
        """Nothing more will come for this version: makes the model of what has arrived."""


class FedAsyncSettings(Section):
    """FedAsync: every arrival makes a version."""

    has_memory: ClassVar[bool] = False
    name: Literal["fedasync"] = "fedasync"
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.4
    alpha_schedule: AlphaSchedule = ConstantAlpha()
    staleness: Staleness = Polynomial()
    max_staleness: Annotated[int, Field(ge=0)] | None = None

    def build(self) -> FedAsync:
        """The strategy."""
        return FedAsync(self)


class FedAsync:
    """x_{t+1} = (1 - a_t) x_t + a_t x_new, a_t = alpha(t + 1) s(t - tau).

    Asynchronous Federated Optimization (Xie, Koyejo, Gupta), algorithm 1.
    """

    def __init__(self, settings: FedAsyncSettings) -> None:
        self.max_staleness = settings.max_staleness
        self._settings = settings

    def weight(self, version: int, staleness: int) -> float:
        """a_t for an update that makes ``version``."""
        rule = self._settings
        return rule.alpha_schedule(rule.alpha, version) * rule.staleness(staleness)

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Mixes the update in, unless it is too stale."""
        d = state.version - update.tau
        if self.max_staleness is not None and d > self.max_staleness:
            return state, Decision("dropped", 0.0, d)
        weight = self.weight(state.version + 1, d)
        mix(state.model, update.model, weight, into=spare)
        return State(state.version + 1, spare), Decision("applied", weight, d)

    def end_round(self, state: State) -> State:
        """There are no rounds."""
        return state


class FedAvgSettings(Section):
    """FedAvg: rounds of k devices. ``weighting`` by samples is McMahan's, uniform the paper's."""

    has_memory: ClassVar[bool] = True
    name: Literal["fedavg"] = "fedavg"
    clients_per_round: Annotated[int, Field(ge=1)] = 10
    weighting: Literal["uniform", "samples"] = "uniform"

    def build(self) -> FedAvg:
        """The strategy."""
        return FedAvg(self)


class FedAvg:
    """x_{t+1} = the mean of k devices' models, all trained from x_t; late ones are dropped.

    The mean is kept as it grows, m <- m + (n / N) (x_new - m), N the weights' sum so far: the same
    arithmetic as mixing, and no sum that outgrows float32.
    """

    max_staleness: int | None = 0

    def __init__(self, settings: FedAvgSettings) -> None:
        self._k = settings.clients_per_round
        self._by_samples = settings.weighting == "samples"

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Averages the update in; the k-th makes the version."""
        d = state.version - update.tau
        if d > 0:
            return state, Decision("dropped", 0.0, d)
        weight = float(update.samples) if self._by_samples else 1.0
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
        return State(state.version + 1, mean), Decision("applied", weight, d)

    def end_round(self, state: State) -> State:
        """The mean of those that came, if any did."""
        if state.memory.model is None:
            return state
        return State(state.version + 1, state.memory.model)


StrategySettings = Annotated[FedAsyncSettings | FedAvgSettings, Field(discriminator="name")]


def strategy_of(recorded: Mapping[str, Any]) -> Strategy:
    """The strategy that a journal names, with its parameters. Raises ConfigError."""
    try:
        settings: FedAsyncSettings | FedAvgSettings = TypeAdapter(StrategySettings).validate_python(
            dict(recorded), strict=False
        )
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"strategy.{where}: {first['msg']}") from error
    return settings.build()
