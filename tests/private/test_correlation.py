"""Correlated noise: exact, of a sensitivity that no pattern exceeds, and less in all."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from fedstream.private.accounting import epsilon, rho
from fedstream.private.correlation import MOST_BANDS, correlation
from fedstream.private.noise import draw
from tests.private.enrolled import policy_of

BANDS = range(2, MOST_BANDS + 1)


def matrix(bands: int, sums: int) -> NDArray[np.int64]:
    """C, in steps: column t is what an update in sum t changes."""
    found = np.zeros((sums, sums), np.int64)
    for i, one in enumerate(correlation(bands).coefficients):
        found += one * np.eye(sums, k=-i, dtype=np.int64)
    return found


def patterns(sums: int, bands: int) -> list[tuple[int, ...]]:
    """All sums in which a device may be, 0 or 1 for each."""
    return [
        one
        for one in itertools.product((0, 1), repeat=sums)
        if all(sum(one[begin : begin + bands]) <= 1 for begin in range(sums))
    ]


def played(bands: int, drawn: NDArray[np.int64]) -> NDArray[np.int64]:
    """The noise of a run's sums, row by row, from what was drawn for them."""
    rows: list[NDArray[np.int64]] = []
    for one in drawn:
        rows.append(correlation(bands).noise(one.copy(), rows[:-bands:-1]))
    return np.array(rows)


def test_coefficients_are_those_of_the_square_root_of_summing_up() -> None:
    assert correlation(1).coefficients == (1,)
    assert correlation(6).coefficients == (256, 128, 96, 80, 70, 63)
    series = np.array(correlation(MOST_BANDS).coefficients) / 256
    np.testing.assert_allclose(np.convolve(series, series)[:MOST_BANDS], 1, atol=0.02)


@pytest.mark.parametrize("bands", BANDS)
def test_coefficients_fall_so_that_noise_dies_away(bands: int) -> None:
    """Then all zeros of the polynomial are outside the unit circle (Enestrom and Kakeya)."""
    found = correlation(bands).coefficients
    assert all(one > other > 0 for one, other in itertools.pairwise(found))
    assert max(map(abs, correlation(bands)._answers[-bands:])) < 2**-52


@pytest.mark.parametrize("bands", [1, 2, 5, 16])
def test_what_the_server_sees_follows_from_the_mechanism_alone(bands: int) -> None:
    """The proof's step in code: x + n, computed from C x + z without x, is the same integers."""
    rng, bits = np.random.default_rng(bands), correlation(bands).bits
    sums = rng.integers(-(1 << 30), 1 << 30, (40, 20))
    drawn = rng.integers(-(1 << 24), 1 << 24, (40, 20))
    released = matrix(bands, 40) @ sums + drawn  # a discrete Gaussian mechanism
    seen: list[NDArray[np.int64]] = []
    for row in released:
        before = sum(
            (c * one for c, one in zip(correlation(bands).coefficients[1:], seen[::-1])),  # noqa: B905
            np.zeros(20, np.int64),
        )
        half = (1 << bits) // 2
        seen.append((row - before + half) // (1 << bits))
    np.testing.assert_array_equal(np.array(seen), sums + played(bands, drawn))


@pytest.mark.parametrize(("bands", "sums"), [(1, 5), (2, 8), (3, 10), (4, 11)])
def test_no_pattern_changes_more_than_its_participations(bands: int, sums: int) -> None:
    """By search: each pattern, each sign and weight; and one sum too soon would exceed it."""
    c, norm = matrix(bands, sums), correlation(bands).norm
    for pattern in patterns(sums, bands):
        times = np.flatnonzero(pattern)
        for weights in itertools.product((-3, 1, 3), repeat=min(times.size, 3)):
            update = np.zeros(sums, np.int64)
            update[times[: len(weights)]] = weights
            changed = int(((c @ update) ** 2).sum())
            assert changed <= sum(w**2 for w in weights) * norm**2 * (1 + 1e-12)
    one = c[:, 0]
    assert int((one**2).sum()) == pytest.approx(norm**2)  # and the bound is attained
    if bands > 1:
        soon = one + c[:, bands - 1]
        assert int((soon**2).sum()) > 2 * norm**2 * (1 + 1e-12)


@pytest.mark.parametrize("bands", [1, 4, 16])
def test_the_noise_of_a_sum_has_the_deviation_that_the_policy_says(bands: int) -> None:
    policy = policy_of(bands=bands, sigma=0.7)
    drawn = draw(bytes(32), 300 * 200, policy.noise_sigma).reshape(300, 200)
    noise = played(bands, drawn)
    assert noise[100:].std() == pytest.approx(policy.sum_sigma, rel=0.02)


@pytest.mark.parametrize(("bands", "less"), [(2, 1.33), (4, 1.76), (8, 2.29), (16, 2.87)])
def test_less_noise_adds_up_at_the_same_epsilon(bands: int, less: float) -> None:
    """Over a hundred versions, against independent noise; the figures of docs/privacy.md."""
    policy, plain = policy_of(bands=bands, scale_bits=12), policy_of(scale_bits=12)
    assert rho(policy, 5) == rho(plain, 5)
    assert epsilon(policy, 5, 5, 1e-5) == pytest.approx(epsilon(plain, 5, 5, 1e-5))
    drawn = draw(bytes(32), 100 * 4000, policy.noise_sigma).reshape(100, 4000)
    added_up = played(bands, drawn).sum(axis=0)
    found = math.sqrt(100) * plain.sum_sigma / math.sqrt((added_up**2).mean())
    assert found == pytest.approx(less, rel=0.04)


def test_noise_that_is_gone_is_not_taken_back() -> None:
    drawn = np.array([1000, -3])
    np.testing.assert_array_equal(correlation(4).noise(drawn.copy(), []), [4, 0])
    last = [np.array([2, -2])]
    np.testing.assert_array_equal(correlation(4).noise(drawn.copy(), last), [3, 1])


def test_a_policy_without_correlation_is_as_before() -> None:
    """Its text, so that its digest and all signatures hold; and its noise."""
    policy = policy_of(sigma=1.0, scale_bits=10)
    assert b"bands" not in policy.text
    assert policy.sum_sigma == policy.noise_sigma == policy.sigma * policy.norm_bound
    assert b'"bands":4' in policy_of(bands=4).text


def test_the_steps_of_the_grid_are_in_sigma() -> None:
    """256 steps a unit, and the norm of (1, 1/2)."""
    policy = policy_of(bands=2, scale_bits=10)
    assert policy.noise_sigma == pytest.approx(policy.norm_bound * 256 * math.sqrt(1.25))
    assert policy.noise_sigma >= policy.norm_bound * math.sqrt(256**2 + 128**2)


def test_what_cannot_be_correlated_is_refused() -> None:
    with pytest.raises(ValidationError, match="bands = 2 needs noise: set sigma"):
        policy_of(bands=2, sigma=0.0)
    with pytest.raises(ValidationError, match="less than or equal to 16"):
        policy_of(bands=17)


def test_the_noises_distance_counts_for_every_sum_that_hides_a_device() -> None:
    wide, plain = (policy_of(sigma=4.0, parameters=10**6, bands=bands) for bands in (16, 1))
    assert epsilon(wide, 10, 10, 1e-9) > epsilon(plain, 10, 10, 1e-9)
