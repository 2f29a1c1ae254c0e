"""What is made of a few buckets' means: known answers, and what an outlier moves."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fedstream.core.layout import Floats
from fedstream.strategies import robust
from fedstream.strategies.mixing import BLOCK

RECORDED = {
    BLOCK + 17: {"mean": "2fbc6076", "median": "2cf61aaf", "geometric median": "879e367c"},
    3: {"mean": "e4c9d5d0", "median": "e98ef854", "geometric median": "d639ea71"},
}


def vectors(n: int, size: int = 1000) -> list[Floats]:
    return list(np.random.default_rng(n).random((n, size), np.float32) - np.float32(0.5))


def made(rule: str, among: list[Floats]) -> Floats:
    into = np.empty_like(among[0])
    robust.RULES[rule](among, into)
    return into


@pytest.mark.parametrize("n", [3, 4, 7])
@pytest.mark.parametrize("size", [1, 1000, BLOCK + 17])
def test_mean_and_median_are_numpys(n: int, size: int) -> None:
    among = vectors(n, size)
    np.testing.assert_allclose(made("mean", among), np.mean(among, axis=0), atol=1e-6)
    np.testing.assert_allclose(made("median", among), np.median(among, axis=0), atol=1e-6)


def test_geometric_median_of_a_line_is_its_median() -> None:
    """On a line, it is the point in the middle, however far the others are."""
    line = vectors(1)[0]
    among = [line * np.float32(one) for one in (0.0, 1.0, 1.5, 2.0, 100.0)]
    np.testing.assert_allclose(made("geometric median", among), among[2], atol=1e-5)


def test_geometric_median_has_the_least_sum_of_distances() -> None:
    """By a plain Weiszfeld in double precision, iterated to its end."""
    among = [one + np.float32(place > 4) for place, one in enumerate(vectors(7))]
    z = np.mean(np.array(among, np.float64), axis=0)
    for _ in range(1000):
        shares = 1 / np.linalg.norm(among - z, axis=1)
        z = shares @ np.array(among, np.float64) / shares.sum()
    np.testing.assert_allclose(made("geometric median", among), z, atol=1e-5)


@pytest.mark.parametrize("rule", ["median", "geometric median"])
def test_one_of_three_moves_it_by_no_more_than_the_others_differ(rule: str) -> None:
    """The mean goes wherever the outlier wants."""
    one, two, _ = vectors(3)
    outlier = np.full_like(one, 1e6)
    furthest = 4 * np.linalg.norm(one - two)
    assert np.linalg.norm(made(rule, [one, two, outlier]) - one) < furthest
    assert np.linalg.norm(made("mean", [one, two, outlier]) - one) > 1000 * furthest


@pytest.mark.parametrize("size", [BLOCK + 17, 3])
def test_bits_do_not_depend_on_the_machine(size: int) -> None:
    """Nothing is reduced in an order that a library chooses: recorded once on x86-64."""
    found = {
        rule: hashlib.sha256(made(rule, vectors(5, size)).tobytes()).hexdigest()[:8]
        for rule in robust.RULES
    }
    assert found == RECORDED[size]


def test_equal_vectors_are_their_own_middle() -> None:
    """Where all distances are zero, nothing is divided by them."""
    among = [vectors(1)[0]] * 3
    for rule in robust.RULES:
        np.testing.assert_allclose(made(rule, among), among[0], rtol=1e-6)
