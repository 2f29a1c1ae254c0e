"""The estimate of epsilon from canaries, on sums whose noise is known."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.canaries import (
    LEARNERS,
    Normal,
    Released,
    common_epsilon,
    direction,
    epsilon,
    epsilon_between,
    interval,
    scores,
)
from fedstream.private.accounting import gaussian_epsilon

DELTA, SIZE, K = 1e-5, 4_000, 10


def run(sigma: float, canaries: int, batches: int) -> list[Released]:
    """Means of K canaries with noise; each canary is in one batch of every ``canaries / K``."""
    rng = np.random.default_rng(1)
    devices = LEARNERS + np.arange(canaries)
    found = []
    for batch in range(batches):
        some = np.roll(devices, K * batch)[:K]
        total = sum(direction(device, SIZE) for device in some)
        noisy = total + sigma * rng.standard_normal(SIZE).astype(np.float32)
        found.append(Released(frozenset(map(int, some)), noisy / K))
    return found


@pytest.mark.parametrize("mu", [0.5, 1.0, 2.0, 5.0])
def test_equal_normal_distributions_are_as_far_apart_as_gaussian_noise_makes_them(
    mu: float,
) -> None:
    for pair in ((Normal(3.0, 2.0), Normal(3.0 + 2 * mu, 2.0)), (Normal(mu, 1), Normal(0, 1))):
        assert epsilon_between(*pair, DELTA) == pytest.approx(
            gaussian_epsilon(mu**2 / 2, DELTA), rel=1e-3
        )


def test_a_wider_distribution_is_told_apart_in_both_directions() -> None:
    """With equal means, only the tails differ: the density of the wider one over the other's."""
    wide, narrow = Normal(0.0, 2.0), Normal(0.0, 1.0)
    assert epsilon_between(wide, narrow, DELTA) == epsilon_between(narrow, wide, DELTA) > 5


@pytest.mark.parametrize("sigma", [1.0, 2.0])
def test_the_estimate_is_near_the_epsilon_of_the_noise(sigma: float) -> None:
    canaries, n = 200, 2
    sent, unsent = scores(run(sigma, canaries, n * canaries // K), n)
    assert sent.size == canaries
    known = gaussian_epsilon(n / (2 * sigma**2), DELTA)
    assert common_epsilon(sent, unsent, DELTA) == pytest.approx(known, rel=0.15)
    low, high = interval(common_epsilon, sent, unsent, DELTA)
    assert low < known < high < 2 * low
    assert 0.8 * known < epsilon(sent, unsent, DELTA) < 1.6 * known  # it varies more


def test_without_noise_every_canary_is_found() -> None:
    sent, unsent = scores(run(0.0, 50, 5), 1)
    assert sent.min() > unsent.max()
    assert epsilon(sent, unsent, DELTA) > 100


def test_only_first_batches_of_canaries_with_enough_of_them_are_scored() -> None:
    few = run(0.0, 50, 7)  # twenty canaries are in two batches
    assert scores(few, 2)[0].size == 20
    assert scores(few, 1)[0].tolist() == scores(few[:5], 1)[0].tolist()
