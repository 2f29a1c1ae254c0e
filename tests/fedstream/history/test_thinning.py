"""Fewer points, and all extremes."""

from __future__ import annotations

from math import nan

import numpy as np
import pytest

from fedstream.history.charts import thinned


@pytest.mark.parametrize("length", [0, 1, 2, 99, 100])
def test_few_are_all_shown(length: int) -> None:
    assert thinned([0.5] * length, most=100) == list(range(length))


@pytest.mark.parametrize("length", [101, 1000, 99_991])
def test_each_extreme_is_shown_and_both_ends(length: int) -> None:
    values = np.sin(np.arange(length) / 50)
    values[length // 2], values[length // 3] = 9.0, -9.0
    values[1] = nan
    places = thinned(values, most=100)
    assert places == sorted(set(places))
    assert len(places) <= 102
    assert {0, length // 3, length // 2, length - 1} <= set(places)


def test_extremes_of_every_curve() -> None:
    first, second = np.zeros(10_000), np.zeros(10_000)
    first[1234], second[7654] = 1.0, -1.0
    assert {1234, 7654} <= set(thinned(first, second, most=100))


def test_what_is_not_known_anywhere() -> None:
    places = thinned([nan] * 1000, most=10)
    assert {0, 999} <= set(places) <= set(range(1000))
