"""How often each of many may do something."""

from __future__ import annotations

import pytest

from fedstream.runtime.limits import TokenBuckets


def test_events_at_once_and_later_ones_at_a_steady_rate() -> None:
    buckets = TokenBuckets(0.1, at_once=3, remembered=10)
    for now in (0.0, 0.0, 0.0):
        assert buckets.wait_s("a", now) == 0.0
        buckets.charge("a", now)
    assert buckets.wait_s("a", 2.0) == pytest.approx(8.0)
    assert buckets.wait_s("b", 2.0) == 0.0
    assert buckets.wait_s("a", 10.0) == 0.0
    buckets.charge("a", 10.0)
    assert buckets.wait_s("a", 10.0) == pytest.approx(10.0)
    assert buckets.wait_s("a", 1000.0) == 0.0


def test_what_does_not_fit_is_counted_if_it_happened() -> None:
    buckets = TokenBuckets(1.0, at_once=1, remembered=10)
    for _ in range(3):
        buckets.charge("a", 0.0)
    assert buckets.wait_s("a", 0.0) == pytest.approx(3.0)


def test_whoever_was_charged_longest_ago_begins_anew() -> None:
    buckets = TokenBuckets(1.0, at_once=1, remembered=2)
    for who in "aba":
        buckets.charge(who, 0.0)
    buckets.charge("c", 0.0)
    assert [buckets.wait_s(who, 0.0) > 0 for who in "abc"] == [True, False, True]


@pytest.mark.parametrize("now", [0.0, 0.1, 12345.678901, 1.7e9 + 1 / 3])
@pytest.mark.parametrize("per_s", [1 / 6, 0.3, 7.7, 500.0])
def test_rounding_keeps_nobody_out(now: float, per_s: float) -> None:
    """All that fit at once do, and one more after exactly the wait that was told."""
    buckets = TokenBuckets(per_s, at_once=10, remembered=1)
    for _ in range(10):
        assert buckets.wait_s("a", now) == 0.0
        buckets.charge("a", now)
    wait_s = buckets.wait_s("a", now)
    assert wait_s == pytest.approx(1 / per_s)
    if now < 1e6:  # later, the sum itself is less exact than that
        assert buckets.wait_s("a", now + wait_s) == 0.0


def test_a_clock_that_goes_back_fills_no_bucket() -> None:
    buckets = TokenBuckets(1.0, at_once=2, remembered=1)
    buckets.charge("a", 100.0)
    assert buckets.wait_s("a", 50.0) == 0.0
