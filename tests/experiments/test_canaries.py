"""The estimate of epsilon from canaries, on sums whose noise is known."""

from __future__ import annotations

import numpy as np
import pytest
from torch.nn.utils import parameters_to_vector

from experiments.canaries import (
    LEARNERS,
    Normal,
    Released,
    canaries,
    common_epsilon,
    direction,
    epsilon,
    epsilon_between,
    interval,
    scores,
)
from fedstream.private.accounting import gaussian_epsilon
from fedstream.trainer.solvers import Sgd
from tests.trainer.stepping import work_of

DELTA, SIZE, K = 1e-5, 4_000, 10


def run(sigma: float, number: int, batches: int) -> list[Released]:
    """Means of K canaries with noise; each canary is in one batch of every ``number / K``."""
    rng = np.random.default_rng(1)
    devices = LEARNERS + np.arange(number)
    found = []
    for batch in range(batches):
        some = np.roll(devices, K * batch)[:K]
        total = sum(direction(device, SIZE) for device in some)
        noisy = (total + sigma * rng.standard_normal(SIZE)) / K
        found.append(Released(frozenset(map(int, some)), noisy.astype(np.float32)))
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
    number, n = 200, 2
    sent, unsent = scores(run(sigma, number, n * number // K), n)
    assert sent.size == number
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


def test_a_canary_sends_its_direction_and_other_devices_learn() -> None:
    task = canaries()
    moved = []
    for device in (LEARNERS - 1, LEARNERS + 3):
        model = task.model()
        x = parameters_to_vector(model.parameters()).detach().clone()
        task.train(model, task.device_data(device), work_of(Sgd(lr=0.1), device=device))
        moved.append((parameters_to_vector(model.parameters()) - x).detach().numpy())
    learned, sent = moved
    np.testing.assert_allclose(sent, direction(LEARNERS + 3, sent.size), atol=1e-6)
    assert np.linalg.norm(learned) > 0
    assert abs(learned @ sent) < 0.1 * np.linalg.norm(learned)
