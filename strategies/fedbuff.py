"""FedBuff: a buffer of K updates makes a version."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstream.strategies.batches import Batch
from fedstream.strategies.settings import RuleSettings
from fedstream.strategies.staleness import Constant, Staleness
from fedstream.strategies.strategy import Update


class FedBuffSettings(RuleSettings):
    """FedBuff. K = 1 is plain asynchronous federated learning."""

    name: Literal["fedbuff"] = "fedbuff"
    buffer_size: Annotated[int, Field(ge=1)] = 10
    """K"""
    server_lr: Annotated[float, Field(gt=0)] = 1.0
    """The paper's beta is server_lr / K."""
    staleness: Staleness = Constant()
    """Not in this paper; the original FedBuff has 1 / sqrt(1 + d)."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None

    @property
    def batch(self) -> int:
        """The number of updates in a version."""
        return self.buffer_size

    def build(self, _devices: int = 0) -> FedBuff:
        """The strategy."""
        return FedBuff(self)


class FedBuff(Batch):
    """x_{t+1} = x_t - (server_lr / K) sum s(d) (x_tau - x_new), every K arrivals.

    Unbounded Gradients in Federated Learning with Buffered Asynchronous Aggregation (Toghani,
    Uribe), algorithm 2; its devices' part is algorithm 1.
    """

    def __init__(self, settings: FedBuffSettings) -> None:
        super().__init__(settings.buffer_size, settings.server_lr, settings.max_staleness)
        self._staleness = settings.staleness

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """s(d)."""
        return self._staleness(version - tau)

    def factor(self, update: Update, weight: float) -> float:
        """s(d)."""
        return weight
