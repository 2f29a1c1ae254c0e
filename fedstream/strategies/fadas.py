"""FADAS: AMSGrad on the server, with a smaller step where a batch has stale updates."""

from __future__ import annotations

from math import sqrt
from typing import Annotated, Literal

from pydantic import Field

from fedstream.core.layout import Model
from fedstream.strategies.batches import Batch
from fedstream.strategies.optimizers import Amsgrad
from fedstream.strategies.strategy import State
from fedstream.strategies.vectors import DeviceVectors


class FadasSettings(Batch):
    """FADAS: x_{t+1} = x_t + eta_t m / (sqrt(v-hat) + eps), AMSGrad on the mean of K deltas.

    FADAS: Towards Federated Adaptive Asynchronous Optimization (Wang, Wang, Lu, Chen; ICML 2024),
    algorithm 1. eta_t is ``server_lr`` while tau_max, the largest staleness in the batch, is at
    most ``tau_c``; beyond it, ``delay_adaptive`` decides. Nothing corrects the bias of m and v,
    except in the edition "code", which is the authors' program (https://github.com/yujiaw98/FADAS,
    g_delay_adaptive.py with --optimizer=fedams).
    """

    name: Literal["fadas"] = "fadas"
    buffer_size: Annotated[int, Field(ge=1)] = 5
    """K (the paper's M), the updates in a version"""
    server_lr: Annotated[float, Field(gt=0)] = 0.001
    """eta"""
    server: Amsgrad = Amsgrad()
    """the optimizer that takes the step"""
    delay_adaptive: Literal["none", "paper", "code"] = "none"
    """eta_t beyond tau_c: "paper" min(eta, 1 / tau_max); "code" eta / tau_max, and Adam's bias
    corrections in every version; "none" eta."""
    tau_c: Annotated[int, Field(ge=0)] = 1
    """the staleness up to which eta_t is eta"""

    def move(self, state: State, n: int, into: Model) -> DeviceVectors:
        """Let AMSGrad step with the batch's eta_t."""
        x, total = state.model.parameters, self.total(state).parameters
        vectors = state.memory.devices or self.vectors(x.size)
        server, eta, late = self.server, self.server_lr, state.memory.stalest > self.tau_c
        if self.delay_adaptive == "paper" and late:
            eta = min(eta, 1.0 / state.memory.stalest)
        elif self.delay_adaptive == "code":
            eta /= state.memory.stalest if late else 1
            betas = server.beta1, server.beta2
            first, second = (1.0 - _power(beta, state.version + 1) for beta in betas)
            # m / first over sqrt(v-hat / second) + eps, as one step of the plain optimizer
            eta *= sqrt(second) / first
            server = server.model_copy(update={"eps": server.eps * sqrt(second)})
        server.step(x, total, n, eta, vectors, into=into.parameters)
        return vectors


def _power(base: float, exponent: int) -> float:
    """base ** exponent by multiplications, whose bits are the same on every machine."""
    result = 1.0
    while exponent:
        if exponent % 2:
            result *= base
        base, exponent = base * base, exponent // 2
    return result
