"""FedAsync, and the base of rules like it: every update makes a version of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from fedstream.core.layout import Model
from fedstream.core.messages import Sends
from fedstream.strategies.adapt import Adapt
from fedstream.strategies.mixing import mix
from fedstream.strategies.staleness import AlphaSchedule, ConstantAlpha, Polynomial, Staleness
from fedstream.strategies.strategy import Decision, InRounds, State, Strategy, Update


class Mixing(Strategy):
    """x_{t+1} = (1 - w) x_t + w x_new for every arrival. A subclass defines w by ``weigh``."""

    sends: ClassVar[Sends] = "model"
    has_memory: ClassVar[bool] = False
    rounds: ClassVar[InRounds] = "never"

    @abstractmethod
    def weigh(self, version: int, tau: int, samples: int) -> float:
        """w for an update trained from x_tau that arrives when ``version`` is the newest."""

    def receive(self, state: State, update: Update, spare: Model) -> tuple[State, Decision]:
        """Mix the update in, unless it is too stale."""
        d = state.version - update.tau
        if self.is_too_stale(d):
            return state, Decision("dropped", 0.0, d)
        weight = self.weight_of(state, update)
        mix(state.model, update.model, weight, into=spare)
        return State(state.version + 1, spare), Decision("applied", weight, d)


class FedAsyncSettings(Mixing):
    """FedAsync: x_{t+1} = (1 - a_t) x_t + a_t x_new, a_t = alpha(t + 1) s(t - tau).

    Asynchronous Federated Optimization (Xie, Koyejo, Gupta), algorithm 1.
    """

    step_key: ClassVar[str] = "alpha"

    name: Literal["fedasync"] = "fedasync"
    alpha: Annotated[float, Field(gt=0, le=1)] = 0.4
    alpha_schedule: AlphaSchedule = ConstantAlpha()
    staleness: Staleness = Polynomial()

    @field_validator("adapt")
    @classmethod
    def _within_alpha(cls, adapt: Adapt | None) -> Adapt | None:
        if adapt is not None and adapt.most > 1:
            raise ValueError(f"most = {adapt.most:g}: alpha is at most 1, the device's model alone")
        return adapt

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """a_t for an update that makes the next version."""
        return self.alpha_schedule(self.alpha, version + 1) * self.staleness(version - tau)
