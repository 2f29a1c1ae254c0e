"""Accounting: known answers, and what a device may spend under a policy."""

from __future__ import annotations

import math

import pytest

from fedstream.private.accounting import epsilon, epsilon_of_rho, gaussian_epsilon, rho
from tests.private.enrolled import policy_of


@pytest.mark.parametrize(
    ("sigma", "batches", "delta", "by_loss", "by_orders"),
    [  # dp-accounting 0.6.0: PLDAccountant at a discretisation of 1e-4, and RdpAccountant
        (4.0, 10, 1e-5, 3.341409, 3.617100),
        (1.0, 3, 1e-6, 9.254266, 9.848401),
        (0.7, 20, 1e-5, 46.891523, 49.495570),
    ],
)
def test_googles_accountant_gives_the_same(
    sigma: float, batches: int, delta: float, by_loss: float, by_orders: float
) -> None:
    """Its orders are a short list, so that its Renyi figure is a little larger."""
    spent = rho(policy_of(sigma=sigma), batches)
    assert gaussian_epsilon(spent, delta) == pytest.approx(by_loss, abs=1e-5)
    assert by_orders * 0.999 < epsilon_of_rho(spent, delta) <= by_orders


def test_ten_batches_at_sigma_four() -> None:
    policy = policy_of(sigma=4.0, participations=10)
    assert rho(policy, policy.allowance) == 10 / 32
    assert epsilon(policy, 10, 10, 1e-5) == pytest.approx(3.617, abs=5e-4)


@pytest.mark.parametrize(
    ("spent", "delta"), [(1e-6, 1e-5), (0.01, 1e-9), (0.5, 1e-6), (20.0, 1e-5), (1e4, 1e-12)]
)
def test_the_conversion_is_between_the_exact_one_and_the_simple_one(
    spent: float, delta: float
) -> None:
    simple = spent + 2 * math.sqrt(spent * math.log(1 / delta))  # Bun and Steinke 2016
    found = epsilon_of_rho(spent, delta)
    if spent < 100:  # where the exact one is within floats
        assert gaussian_epsilon(spent, delta) <= found
    assert found <= simple


def test_full_weights_spend_the_same_whatever_their_unit() -> None:
    flat, table = policy_of(sigma=2.0), policy_of(sigma=2.0, weights=(15, 5, 1))
    assert rho(flat, flat.allowance) == rho(table, table.allowance) == 5 / (2 * 4)
    assert rho(table, 1) == rho(flat, 1) / 225


def test_no_noise_is_no_guarantee_and_no_participation_no_loss() -> None:
    assert epsilon(policy_of(sigma=0.0), 1, 1, 1e-5) == math.inf
    assert epsilon(policy_of(), 0, 0, 1e-5) == 0


def test_the_noises_distance_counts() -> None:
    """And a delta below it has no epsilon."""
    policy = policy_of(sigma=4.0, parameters=1_000_000)
    assert epsilon_of_rho(10 / 32, 1e-9) < epsilon(policy, 10, 10, 1e-9) < math.inf
    assert epsilon(policy, 10, 10, 1e-13) == math.inf


def test_hardly_any_noise_has_a_large_epsilon() -> None:
    """Beyond what an exponential can be as a float."""
    assert 1500 < gaussian_epsilon(1500.0, 1e-5) < epsilon_of_rho(1500.0, 1e-5)
