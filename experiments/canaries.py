"""Canaries: an estimate of a private run's epsilon from one run of it (arXiv 2302.03098).

Andrew et al., "One-shot Empirical Privacy Estimation for Federated Learning". Beside the devices
that learn, the task has canary devices: each sends a random direction c of norm S whenever it takes
part. The auditor reads what the server gets, the released versions and which devices each batch
had. A canary's score is the cosine

    g = <c, R> / (|c| |R|),    R: the sum of the released steps of its first n batches

and for comparison that of directions that nobody sent, with the same R. Normal distributions are
fitted to the scores of both kinds, N(mu_1, s_1) and N(mu_0, s_0), and the estimate is the least
epsilon with

    delta_epsilon(P, Q) = integral of max(0, p - exp(epsilon) q) <= delta

for (P, Q) = (N(mu_1, s_1), N(mu_0, s_0)), and the reverse. With Gaussian noise of sigma S in each
sum, mu_1 / s_0 tends to sqrt(n) / sigma as the number of parameters grows, so the estimate tends to
the mechanism's own epsilon. It is an estimate, not a bound: the other updates in a sum hide a
canary, too. And at a small delta the tails decide, so an error of a few percent in s_1 or s_0 makes
the estimate a quarter too large; with a common deviation (:func:`common_epsilon`) it varies less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedstream.core.layout import Floats
from fedstream.journal.replay import Replayer
from fedstream.private.accounting import gaussian_epsilon
from fedstream.trainer.in_memory import InMemory
from fedstream.trainer.solvers import Trained
from fedstream.trainer.task import TaskSettings

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.trainer.solvers import Work

NORM = 1.0  # S
LEARNERS, CANARIES = 20, 480
UNSENT = 5  # directions for each canary that nobody sends
_DRAWS = 200  # of a bootstrap
_POINTS = np.linspace(-12.0, 12.0, 4001)  # of an integral, in standard deviations

Scores = npt.NDArray[np.float64]


class Normal(NamedTuple):
    """A normal distribution."""

    mean: float
    deviation: float

    @classmethod
    def fitted(cls, scores: Scores) -> Normal:
        """The distribution with the scores' mean and deviation."""
        return cls(float(scores.mean()), float(scores.std(ddof=1)))

    def log_density(self, x: Scores) -> Scores:
        """The logarithm of the density, without the constant of all normal distributions."""
        return -np.square((x - self.mean) / self.deviation) / 2 - math.log(self.deviation)


class Released(NamedTuple):
    """What a version released: the mean of its batch's updates, with noise."""

    devices: frozenset[int]
    step: Floats


class Canaries(InMemory):
    """The digits, with devices behind those that learn which send their directions."""

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        if work.device < LEARNERS:
            return super().train(model, data, work)
        import torch
        from torch.nn.utils import parameters_to_vector, vector_to_parameters

        with torch.no_grad():
            x = parameters_to_vector(model.parameters())
            sent = torch.from_numpy(direction(work.device, x.numel()))
            vector_to_parameters(x + sent, model.parameters())
        return Trained(steps=1, samples=1, loss=None)


def canaries() -> Canaries:
    """The task of an audit."""
    from fedstream.trainer.images import digits

    task = digits(TaskSettings(name="digits", devices=LEARNERS))
    shares = [task.device_data(device) for device in range(LEARNERS)]
    return Canaries(task.model, shares + shares[:1] * CANARIES, task.test_data())


def direction(number: int, size: int) -> Floats:
    """The direction of a canary device, of norm S."""
    drawn = np.random.default_rng([2302_03098, number]).standard_normal(size)
    return (drawn * (NORM / np.linalg.norm(drawn))).astype(np.float32)


def released(journal: Path) -> list[Released]:
    """The steps between the versions that a journal holds, and the devices of each batch."""
    found: list[Released] = []
    before: Floats | None = None
    with Replayer(journal) as replayer:
        for moment in replayer:
            if before is None or moment.step.made is not None:
                after = moment.model.parameters.copy()
                if before is not None and moment.step.made is not None:
                    devices = frozenset(one.device for one in moment.step.made)
                    found.append(Released(devices, after - before))
                before = after
    return found


def scores(run: list[Released], n: int) -> tuple[Scores, Scores]:
    """The cosines of canaries that took part n times or more, and of directions that none sent."""
    steps: dict[int, list[Floats]] = defaultdict(list)
    for one in run:
        for device in one.devices:
            steps[device].append(one.step)
    sent, unsent = [], []
    for device, all_steps in sorted(steps.items()):
        if device < LEARNERS or len(all_steps) < n:
            continue
        total = np.sum(all_steps[:n], axis=0, dtype=np.float64)
        total /= np.linalg.norm(total)
        sent.append(total @ direction(device, total.size) / NORM)
        first = LEARNERS + CANARIES + UNSENT * device
        others = (direction(number, total.size) for number in range(first, first + UNSENT))
        unsent += [total @ other / NORM for other in others]
    return np.array(sent), np.array(unsent)


def epsilon(sent: Scores, unsent: Scores, delta: float) -> float:
    """The paper's estimate of epsilon at ``delta``."""
    return epsilon_between(Normal.fitted(sent), Normal.fitted(unsent), delta)


def common_epsilon(sent: Scores, unsent: Scores, delta: float) -> float:
    """The same with a common deviation, since both kinds of scores have the same noise."""
    squares = sent.var(ddof=1) * (sent.size - 1) + unsent.var(ddof=1) * (unsent.size - 1)
    apart = (sent.mean() - unsent.mean()) / np.sqrt(squares / (sent.size + unsent.size - 2))
    return gaussian_epsilon(float(apart) ** 2 / 2, delta)


def epsilon_between(one: Normal, other: Normal, delta: float) -> float:
    """The least epsilon at which two normal distributions are (epsilon, delta)-close."""
    pairs = [_compared(one, other), _compared(other, one)]
    low, high = 0.0, 1.0
    while _excess(pairs, high) > delta:
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _excess(pairs, middle) > delta else (low, middle)
    return high


def interval(
    estimate: Callable[[Scores, Scores, float], float], sent: Scores, unsent: Scores, delta: float
) -> tuple[float, float]:
    """The bootstrap interval of an estimate, of 95%."""
    rng = np.random.default_rng(0)
    draws = [
        estimate(rng.choice(sent, sent.size), rng.choice(unsent, unsent.size), delta)
        for _ in range(_DRAWS)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(low), float(high)


def _compared(p: Normal, q: Normal) -> tuple[Scores, Scores]:
    """At points of the real line: the probability of p, and log p / q."""
    x = p.mean + p.deviation * _POINTS
    probability = np.exp(-(_POINTS**2) / 2)
    return probability / probability.sum(), p.log_density(x) - q.log_density(x)


def _excess(pairs: list[tuple[Scores, Scores]], epsilon: float) -> float:
    """The larger delta_epsilon of both directions."""
    return max(float(p @ -np.expm1(np.minimum(0.0, epsilon - log_ratio))) for p, log_ratio in pairs)
