"""The arithmetic: the same bits however it is cut into blocks, and nothing non-finite unseen."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstream.core.layout import Floats, Model
from fedstream.strategies.mixing import BLOCK, distance, mix, norm
from tests.support import layout_of

sizes = st.sampled_from(
    [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 3]
)


def pair(size: int, seed: int) -> tuple[Model, Model]:
    rng = np.random.default_rng(seed)
    layout = layout_of(size, integers=2)
    x, new = Model(layout), Model(layout)
    x.floats[:] = rng.standard_normal(size)
    new.floats[:] = rng.standard_normal(size) * 100
    x.integers[:], new.integers[:] = (1, 2), (3, 4)
    return x, new


def whole(x: Model, new: Model, weight: float) -> Floats:
    """The rule in one go: separate float32 subtract, multiply, add."""
    w = np.float32(weight)
    return x.floats + w * (new.floats - x.floats)


@given(sizes, st.floats(0, 1), st.integers(0, 100))
def test_mixing_in_blocks_gives_the_same_bits(size: int, weight: float, seed: int) -> None:
    x, new = pair(size, seed)
    into = Model(x.layout)
    mix(x, new, weight, into=into)
    assert into.floats.tobytes() == whole(x, new, weight).tobytes()
    assert into.integers.tolist() == [3, 4]


@given(sizes, st.floats(0, 1), st.integers(0, 100))
def test_result_may_overwrite_either_input(size: int, weight: float, seed: int) -> None:
    x, new = pair(size, seed)
    expected = whole(x, new, weight).tobytes()
    over_x, over_new = x.copy(), new.copy()
    mix(over_x, new, weight, into=over_x)
    mix(x, over_new, weight, into=over_new)
    assert over_x.floats.tobytes() == over_new.floats.tobytes() == expected
    assert over_x.integers.tolist() == over_new.integers.tolist() == [3, 4]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, -1])
def test_any_non_finite_element_makes_the_norm_non_finite(bad: float, where: int) -> None:
    vector = np.ones(3 * BLOCK + 5, np.float32)
    assert math.isfinite(norm(vector))
    vector[where] = bad
    assert not math.isfinite(norm(vector))


def test_infinities_of_both_signs_do_not_cancel() -> None:
    assert not math.isfinite(norm(np.array([math.inf, -math.inf], np.float32)))


@pytest.mark.parametrize("value", [1e-3, 1.0, 1e18, 1e19, 1e30, 3e38])
def test_norm_of_a_finite_vector_is_finite_and_accurate(value: float) -> None:
    n = BLOCK + 17
    vector = np.full(n, value, np.float32)
    assert norm(vector) == pytest.approx(value * math.sqrt(n), rel=1e-3)


def test_norm_of_an_empty_vector_is_zero() -> None:
    nothing = np.empty(0, np.float32)
    assert norm(nothing) == distance(nothing, nothing) == 0.0
