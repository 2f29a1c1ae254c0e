"""FedAsync: every update makes a version of its own."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstream.broker.layout import Model
from fedstream.broker.messages import Sends
from fedstream.strategies.mixing import mix
from fedstream.strategies.settings import InRounds, RuleSettings
from fedstream.strategies.staleness import AlphaSchedule, ConstantAlpha, Polynomial, Staleness
from fedstream.strategies.strategy import Decision, State, Update


class FedAsyncSettings(RuleSettings):
    """FedAsync: every arrival makes a version."""

    sends: ClassVar[Sends] = "model"
    has_memory: ClassVar[bool] = False
    rounds: ClassVar[InRounds] = "never"
    name: Literal["fedasync"] = "fedasync"
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.4
    alpha_schedule: AlphaSchedule = ConstantAlpha()
    staleness: Staleness = Polynomial()
    max_staleness: Annotated[int, Field(ge=0)] | None = None

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return 1

    def build(self, _devices: int = 0) -> FedAsync:
        """The strategy."""
        return FedAsync(self)


class FedAsync:
    """x_{t+1} = (1 - a_t) x_t + a_t x_new, a_t = alpha(t + 1) s(t - tau).

    Asynchronous Federated Optimization (Xie, Koyejo, Gupta), algorithm 1.
    """

    sends: Sends = FedAsyncSettings.sends
    controls = False
    per_step = False
    rate = 1.0
    devices: int | None = None

    def __init__(self, settings: FedAsyncSettings) -> None:
        self.max_staleness = settings.max_staleness
        self._settings = settings

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """a_t for an update that makes the next version."""
        rule = self._settings
        return rule.alpha_schedule(rule.alpha, version + 1) * rule.staleness(version - tau)

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Mix the update in, unless it is too stale."""
        d = state.version - update.tau
        if self.max_staleness is not None and d > self.max_staleness:
            return state, Decision("dropped", 0.0, d)
        weight = update.weight
        if weight is None:
            weight = self.weigh(state.version, update.tau, update.samples)
        mix(state.model, update.model, weight, into=spare)
        return State(state.version + 1, spare), Decision("applied", weight, d)

    def end_round(self, state: State) -> State:
        """Return the state unchanged: there are no rounds."""
        return state
