"""Server optimizers: the steps that a batch rule takes along the mean of its batch.

Adaptive Federated Optimization (Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan;
ICLR 2021), algorithm 2, with D the batch's mean delta, eta ``strategy.server_lr``, and everything
element by element. As in the paper, nothing corrects the bias of the first versions, and v starts
at tau^2.
``momentum`` is FedAvgM (Hsu, Qi, Brown; 2019, arXiv 1909.06335), which accumulates D itself.

All arithmetic is separate float32 operations that IEEE 754 rounds correctly, the square root and
the division too: a replay gets the same bits on every machine.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedstream.core.layout import Floats
from fedstream.runtime.config import Section
from fedstream.strategies.mixing import BLOCK
from fedstream.strategies.vectors import DeviceVectors

Beta = Annotated[float, Field(ge=0, lt=1)]

_LARGEST = np.finfo(np.float32).max


class ServerSgd(Section):
    """x <- x + eta D."""

    kind: Literal["sgd"] = "sgd"

    vectors: ClassVar[tuple[str, ...]] = ()
    """the names of the vectors that it keeps between versions"""


class _Stateful(Section):
    """An optimizer that keeps vectors: :meth:`direction` updates them block by block."""

    kind: str

    moments: ClassVar[tuple[str, ...]]

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the optimizer's vectors; no other optimizer uses these names."""
        return tuple(f"{self.kind} {one}" for one in self.moments)

    def step(
        self,
        x: Floats,
        total: Floats,
        n: int,
        rate: float,
        vectors: DeviceVectors,
        into: Floats,
    ) -> None:
        """Write the next parameters into ``into``: D = total / n, eta = rate.

        All have the same shape, but the vectors may be longer; ``into`` may be ``total``.
        """
        is_new = self.vectors[-1] not in vectors
        own = [vectors.write(name) for name in self.vectors]
        if is_new:
            own[-1][:] = np.float32(self.start)
        share, eta = np.float32(1.0 / n), np.float32(rate)
        with np.errstate(over="ignore"):  # squares above float32's range count as its largest
            for begin in range(0, x.size, BLOCK):
                part = slice(begin, min(begin + BLOCK, x.size))
                way = self.direction(total[part] * share, *(vector[part] for vector in own))
                np.multiply(way, eta, out=way)
                np.add(x[part], way, out=into[part])

    @property
    def start(self) -> float:
        """The first value of the last vector's elements; the other vectors start with zero."""
        return 0.0

    @abstractmethod
    def direction(self, mean: Floats, *own: Floats) -> Floats:
        """The step, in an array of its own, before it is multiplied by eta. Updates ``own``."""


class Momentum(_Stateful):
    """m <- beta m + D; x <- x + eta m."""

    kind: Literal["momentum"] = "momentum"
    beta: Beta = 0.9

    moments: ClassVar[tuple[str, ...]] = ("m",)

    def direction(self, mean: Floats, *own: Floats) -> Floats:
        """m."""
        [m] = own
        np.multiply(m, np.float32(self.beta), out=m)
        np.add(m, mean, out=m)
        return m.copy()


class Nesterov(Momentum):
    """m <- beta m + D; x <- x + eta (D + beta m): Nesterov's momentum as torch.optim.SGD has it."""

    kind: Literal["nesterov"] = "nesterov"  # type: ignore[assignment]

    def direction(self, mean: Floats, *own: Floats) -> Floats:
        """D + beta m."""
        m = super().direction(mean, *own)
        np.multiply(m, np.float32(self.beta), out=m)
        return np.add(mean, m, out=m)


class Adagrad(_Stateful):
    """m <- beta1 m + (1 - beta1) D; v <- v + D^2; x <- x + eta m / (sqrt(v) + tau)."""

    kind: Literal["adagrad"] = "adagrad"
    beta1: Beta = 0.0
    tau: Annotated[float, Field(ge=1e-30)] = 1e-3

    moments: ClassVar[tuple[str, ...]] = ("m", "v")

    @property
    def start(self) -> float:
        """v begins with tau^2."""
        return self.tau**2

    def direction(self, mean: Floats, *own: Floats) -> Floats:
        """m / (sqrt(v) + tau)."""
        m, v = own
        _decay(m, mean, self.beta1)
        squares = np.multiply(mean, mean)
        self.second(v, np.minimum(squares, _LARGEST, out=squares))
        np.minimum(v, _LARGEST, out=v)
        root = np.sqrt(v)
        np.add(root, np.float32(self.tau), out=root)
        return np.divide(m, root, out=root)

    def second(self, v: Floats, squares: Floats) -> None:
        """Update v by D^2."""
        np.add(v, squares, out=v)


class Adam(Adagrad):
    """As ``adagrad``, but v <- beta2 v + (1 - beta2) D^2."""

    kind: Literal["adam"] = "adam"  # type: ignore[assignment]
    beta1: Beta = 0.9
    beta2: Beta = 0.99

    def second(self, v: Floats, squares: Floats) -> None:
        """Update v by D^2."""
        _decay(v, squares, self.beta2)


class Yogi(Adam):
    """As ``adagrad``, but v <- v - (1 - beta2) D^2 sign(v - D^2)."""

    kind: Literal["yogi"] = "yogi"  # type: ignore[assignment]

    def second(self, v: Floats, squares: Floats) -> None:
        """Update v by D^2."""
        signs = np.sign(np.subtract(v, squares))
        np.multiply(squares, np.float32(1.0 - self.beta2), out=squares)
        np.subtract(v, np.multiply(squares, signs, out=squares), out=v)


class Amsgrad(_Stateful):
    """As ``adam``, but v starts at 0, and v-hat <- max(v-hat, v); x <- x + eta m / (sqrt(v-hat) +
    eps).

    On the Convergence of Adam and Beyond (Reddi, Kale, Kumar; ICLR 2018), algorithm 2.
    """

    kind: Literal["amsgrad"] = "amsgrad"
    beta1: Beta = 0.9
    beta2: Beta = 0.99
    eps: Annotated[float, Field(ge=1e-30)] = 1e-8

    moments: ClassVar[tuple[str, ...]] = ("m", "v", "v-hat")

    def direction(self, mean: Floats, *own: Floats) -> Floats:
        """m / (sqrt(v-hat) + eps)."""
        m, v, most = own
        _decay(m, mean, self.beta1)
        squares = np.multiply(mean, mean)
        _decay(v, np.minimum(squares, _LARGEST, out=squares), self.beta2)
        np.maximum(most, v, out=most)
        root = np.sqrt(most)
        np.add(root, np.float32(self.eps), out=root)
        return np.divide(m, root, out=root)


def _decay(mean: Floats, new: Floats, beta: float) -> None:
    """mean <- beta mean + (1 - beta) new."""
    np.multiply(mean, np.float32(beta), out=mean)
    np.add(mean, new * np.float32(1.0 - beta), out=mean)


Optimizer = Annotated[
    ServerSgd | Momentum | Nesterov | Adagrad | Adam | Yogi | Amsgrad, Field(discriminator="kind")
]
