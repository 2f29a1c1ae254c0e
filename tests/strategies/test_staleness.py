"""Staleness functions and schedules, by the formulas of the paper (FedAsync 2019, section 4)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedstream.strategies.staleness import (
    Constant,
    ConstantAlpha,
    Exponential,
    Hinge,
    InverseSqrtAlpha,
    Linear,
    Polynomial,
    StepAlpha,
)

slopes = st.floats(0.01, 20)
delays = st.integers(0, 1000)


@given(slopes, st.integers(0, 20))
def test_fresh_update_has_full_weight(a: float, b: int) -> None:
    for rule in (Constant(), Linear(a=a), Polynomial(a=a), Exponential(a=a), Hinge(a=a, b=b)):
        assert rule(0) == 1.0


@given(slopes, st.integers(0, 20), delays)
def test_weight_never_grows_with_staleness(a: float, b: int, d: int) -> None:
    for rule in (Constant(), Linear(a=a), Polynomial(a=a), Exponential(a=a), Hinge(a=a, b=b)):
        assert 0 <= rule(d + 1) <= rule(d) <= 1


@given(slopes, delays)
def test_linear_polynomial_and_exponential(a: float, d: int) -> None:
    assert Linear(a=a)(d) == pytest.approx(1 / (a * d + 1))
    assert Polynomial(a=a)(d) == pytest.approx((d + 1) ** -a)
    assert Exponential(a=a)(d) == pytest.approx(math.exp(-a * d))
    assert Constant()(d) == 1


def test_hinge_is_one_up_to_b_and_continuous() -> None:
    """The mistake to avoid is 1 / (a (d - b + 1)), which jumps to 1/(2a) behind the hinge."""
    hinge = Hinge(a=10, b=4)
    assert [hinge(d) for d in (0, 4, 5, 6)] == pytest.approx([1, 1, 1 / 11, 1 / 21])
    assert hinge(5) != pytest.approx(1 / 20)
    gentle = Hinge(a=0.5, b=4)
    assert gentle(5) == pytest.approx(1 / 1.5)
    assert gentle(5) <= 1  # the mistaken form would be 1 here, and above it for smaller a


def test_step_schedule_changes_after_the_named_version() -> None:
    step = StepAlpha(at=800, factor=0.5)
    assert [step(0.6, version) for version in (1, 800, 801, 2000)] == [0.6, 0.6, 0.3, 0.3]


def test_inverse_sqrt_starts_at_alpha_for_version_1() -> None:
    rule = InverseSqrtAlpha()
    assert [rule(0.9, version) for version in (1, 4, 9)] == pytest.approx([0.9, 0.45, 0.3])


@given(st.floats(0.01, 1), st.integers(1, 10**6))
def test_constant_alpha_is_constant(alpha: float, version: int) -> None:
    assert ConstantAlpha()(alpha, version) == alpha


@pytest.mark.parametrize("kind", [Linear, Polynomial, Exponential, Hinge])
@pytest.mark.parametrize("a", [0, -1, math.inf, math.nan])
def test_slope_must_be_positive_and_finite(kind: type[Linear], a: float) -> None:
    with pytest.raises(ValidationError, match="a\n"):
        kind(a=a)
