"""FedBuff: a buffer of K updates makes a version."""

from __future__ import annotations

from typing import Literal

from fedstream.strategies.batches import Batch
from fedstream.strategies.staleness import Constant, Staleness


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
