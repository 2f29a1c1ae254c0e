"""Anarchic Federated Averaging: devices choose when they train, and for how many steps.

Anarchic Federated Learning (Yang, Zhang, Khanduri, Liu), algorithms 1 to 3. A device's answer is
G = (x_tau - x_new) / (gamma H), the mean gradient over its own number of steps. ``server_lr`` is
eta eta_L: the paper's algorithm box has eta G, but its proofs and tables need eta eta_L G.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedstream.strategies.batches import Batch
from fedstream.strategies.caches import Caching
from fedstream.strategies.strategy import Update


class AfaCdSettings(Batch):
    """AFA-CD: x_{t+1} = x_t - server_lr mean(G) over m arrivals (algorithm 2).

    For devices that take part alike (cross-device).
    """

    name: Literal["afa-cd"] = "afa-cd"
    buffer_size: Annotated[int, Field(ge=1)] = 5
    """m"""
    server_lr: Annotated[float, Field(gt=0)] = 0.1
    """eta eta_L"""

    @property
    def by_steps(self) -> bool:
        """True, because G is a mean over steps."""
        return True

    def weigh(self, version: int, tau: int, samples: int) -> float:
        """Weigh every update equally."""
        return 1.0

    def factor(self, update: Update, weight: float) -> float:
        """1 / (gamma H): a device's mean gradient."""
        return 1.0 / (update.lr * update.steps)


class AfaCsSettings(AfaCdSettings, Caching):
    """AFA-CS: x_{t+1} = x_t - (server_lr / M) sum_i G_i over all M devices, every m arrivals.

    Algorithm 3, for devices of which some come often and some seldom (cross-silo). The sum is over
    every device's last G (zero until it is heard). With m = 1, it is ACE (arXiv 2511.19066).
    """

    name: Literal["afa-cs"] = "afa-cs"  # type: ignore[assignment]
