"""Noise: the discrete Gaussian by exact tables, and the same key gives the same noise."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, getcontext
from fractions import Fraction

import numpy as np
import pytest

from fedstream.private import noise
from fedstream.private.noise import DISTANCE, SMOOTH, convolution, draw, noise_key, probabilities

KEY = bytes(range(32))


def gaussian(sigma: float, reach: int, k: int = 0) -> list[Fraction]:
    """The discrete Gaussian of sigma sqrt(1 + k^2), by its definition, to 60 digits.

    At -reach, ..., reach - 1.
    """
    getcontext().prec = 60
    two = 2 * Decimal(sigma) ** 2 * (1 + k * k)
    mass = [Fraction((-Decimal(x * x) / two).exp()) for x in range(-reach, reach)]
    total = sum(mass)
    return [one / total for one in mass]


def distance(first: list[Fraction], second: list[Fraction]) -> Fraction:
    return sum((abs(a - b) for a, b in zip(first, second, strict=True)), Fraction()) / 2


@pytest.mark.parametrize("s", [0.3, 1.0, 3.2, 17.5])
def test_a_table_is_within_its_distance_of_the_discrete_gaussian(s: float) -> None:
    table = probabilities(s)
    whole = len(table) << 64
    assert sum(table) == whole
    found = [Fraction(one, whole) for one in table]
    assert distance(found, gaussian(s, len(table) // 2)) < Fraction(1, 2**63)


def test_the_alias_table_has_the_probabilities_exactly() -> None:
    table = noise._table(3.2)
    size, found = table.alias.size, [0] * table.alias.size
    for column in range(size):
        below, alias = int(table.threshold[column]), int(table.alias[column])
        found[column] += below
        found[alias] += (1 << 64) - below
    assert found == probabilities(3.2)


@pytest.mark.parametrize("sigma", [5.0, 24.3])
def test_the_convolution_is_within_its_distance_of_the_discrete_gaussian(sigma: float) -> None:
    """All probabilities, in exact arithmetic."""
    k, s = convolution(sigma)
    assert k > 0
    assert s / math.hypot(1, k) >= SMOOTH
    assert (
        Fraction(sigma) ** 2 <= Fraction(s) ** 2 * (1 + k * k) < Fraction(sigma * (1 + 2**-49)) ** 2
    )
    table = probabilities(s)
    half = len(table) // 2
    reach = half * (1 + k)
    found = [0] * (2 * reach)
    for y2, p2 in enumerate(table):
        if p2:
            for y1, p1 in enumerate(table):
                found[reach + (y1 - half) + k * (y2 - half)] += p1 * p2
    whole = (len(table) << 64) ** 2
    exact = gaussian(s, reach, k)
    assert distance([Fraction(one, whole) for one in found], exact) < Fraction(DISTANCE)


@pytest.mark.parametrize("sigma", [0.7, 40.0, 4096.5, 2.0**21])
def test_draws_have_the_distribution(sigma: float) -> None:
    """By chi-square, within four of its standard deviations; and the mean is 0."""
    count = 200_000
    found = draw(KEY, count, sigma)
    assert found.mean() == pytest.approx(0, abs=4 * sigma / math.sqrt(count))
    half = min(1 << 16, 40 * max(int(sigma), 2))
    if sigma > 100:
        edges = np.array([-math.inf, *np.linspace(-2.5, 2.5, 15) * sigma, math.inf])
        cdf = [0.5 * (1 + math.erf(edge / sigma / math.sqrt(2))) for edge in edges]
        expected = np.diff(cdf) * count
        seen, _ = np.histogram(found, edges)
    else:
        mass = np.array([float(one) for one in gaussian(sigma, half)])
        keep = mass * count > 50
        values = np.arange(-half, half)[keep]
        expected = mass[keep] * count
        seen = np.array([(found == value).sum() for value in values])
    chi = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected)
    assert chi < freedom + 4 * math.sqrt(2 * freedom)


def test_values_are_independent_of_their_neighbours() -> None:
    found = draw(KEY, 100_000, 1000.0).astype(np.float64) / 1000
    for lag in (1, 2, 1 << 14):
        assert abs((found[lag:] * found[:-lag]).mean()) < 4 / math.sqrt(100_000)


def test_the_same_intent_gets_the_same_noise_and_any_other_another() -> None:
    keys = [noise_key(b"epoch", "ab"), noise_key(b"epoch", "ac"), noise_key(b"other", "ab")]
    drawn = [draw(key, 1000, 50.0) for key in keys]
    np.testing.assert_array_equal(drawn[0], draw(noise_key(b"epoch", "ab"), 1000, 50.0))
    assert len({one.tobytes() for one in drawn}) == 3
    # Known since the first release: a change would make replayed answers differ.
    assert draw(KEY, 8, 50.0).tolist() == [-22, 63, -64, 8, -57, 5, -33, -39]


def test_noise_is_the_same_in_every_release() -> None:
    """An intent that is asked for again after an upgrade gets the same bytes."""
    key = noise_key(KEY, "00" * 32)
    drawn = [draw(key, 20_000, sigma).astype("<i8").tobytes() for sigma in (2.0, 5e5)]
    assert [hashlib.sha256(one).hexdigest()[:16] for one in drawn] == [
        "b83fa897c9ef5eef",
        "ece58835aba75d79",
    ]
