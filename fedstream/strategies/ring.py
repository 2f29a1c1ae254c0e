"""Ringmaster: asynchronous SGD with a threshold on staleness."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedstream.strategies.batches import Batch
from fedstream.strategies.strategy import InRounds


class RingmasterSettings(Batch):
    """Ringmaster: x_{t+1} = x_t + server_lr (x_new - x_tau) for every arrival with d < R.

    Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity (Maranjyan, Tyurin,
    Richtarik, ICML 2025), algorithm 5, which stops the computations that reach d = R; without
    ``cancel_stale``, algorithm 4, which waits for them and drops the results. The paper's devices
    take one step of SGD; here x_tau - x_new may be of several, and ``server_lr`` times their
    learning rate is the paper's gamma.
    """

    rounds: ClassVar[InRounds] = "never"
    name: Literal["ringmaster"] = "ringmaster"
    buffer_size: Annotated[Literal[1], Field(exclude=True)] = 1
    max_staleness: Annotated[int, Field(ge=0)] = 9
    """R - 1"""
    cancel_stale: bool = True
