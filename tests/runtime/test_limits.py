"""Limits: connections in all and from one address, rates, and floods of log lines."""

from __future__ import annotations

import logging

import pytest
import structlog

from fedstream.runtime.limits import ConnectionLimit, LogLimiter, TokenBuckets
from fedstream.runtime.logging import LogSettings, configure
from tests.runtime.test_logging import lines, logging_restored


def test_places_are_few_and_become_free_again() -> None:
    crowd = ConnectionLimit(2)
    assert [crowd.enter(who, "192.0.2.1", 0.0) for who in ("a", "b", "c")] == [None, None, "busy"]
    crowd.leave("c")  # was never inside
    assert len(crowd) == 2
    crowd.leave("a")
    crowd.leave("a")
    assert crowd.enter("c", "192.0.2.1", 0.0) is None
    assert len(crowd) == 2


def test_one_address_takes_no_more_than_its_share() -> None:
    crowd = ConnectionLimit(10, of_address=2)
    assert crowd.enter("a", "2001:db8::1", 0.0) is None
    assert crowd.enter("b", "2001:db8::2", 0.0) is None
    assert crowd.enter("c", "2001:db8::3", 0.0) == "address"  # the same network
    assert crowd.enter("d", "2001:db8:1::1", 0.0) is None
    crowd.leave("a")
    assert crowd.enter("c", "2001:db8::3", 0.0) is None
    assert len(crowd) == 3


def test_new_ones_from_an_address_come_no_faster_than_they_may() -> None:
    """But all of its devices at once, as after a cut."""
    crowd = ConnectionLimit(100, of_address=4, arrivals=2.0)
    for turn in range(2):
        found = [crowd.enter((turn, n), "192.0.2.1", 10.0) for n in range(4)]
        for n in range(4):
            crowd.leave((turn, n))
        assert found == [None if turn == 0 else "arrivals"] * 4
    assert crowd.enter("other", "192.0.2.2", 10.0) is None
    assert len(crowd) == 1
    found = [crowd.enter(n, "192.0.2.1", 11.0) for n in range(4)]
    assert found == [None, None, "arrivals", "arrivals"]


# rates


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


@pytest.mark.parametrize("now", [0.1, 1.7e9 + 1 / 3])
@pytest.mark.parametrize("per_s", [1 / 6, 7.7])
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


# floods of log lines

__all__ = ["lines", "logging_restored"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_burst_passes_then_a_steady_rate() -> None:
    clock = Clock()
    flood = LogLimiter(burst=3, per_s=0.5, clock=clock)
    assert [flood.passes("a") for _ in range(5)] == [0, 0, 0, None, None]
    clock.now = 1.9
    assert flood.passes("a") is None
    clock.now = 2.0
    assert flood.passes("a") == 3  # left out since the last one
    assert flood.passes("a") is None
    clock.now = 1000.0
    assert [flood.passes("a") for _ in range(4)] == [1, 0, 0, None]


def test_kinds_are_limited_independently() -> None:
    flood = LogLimiter(burst=1, clock=Clock())
    assert [flood.passes(kind) for kind in "aabba"] == [0, None, 0, None, None]


def test_unlimited_kinds_use_bounded_memory() -> None:
    """The oldest kinds are forgotten, with their counts of dropped lines."""
    flood = LogLimiter(burst=1, clock=Clock())
    for kind in range(300):
        assert [flood.passes(kind) for _ in range(2)] == [0, None]
    assert [flood.passes(kind) for kind in (0, 299)] == [0, None]


def test_flood_of_warnings_is_limited_and_hides_nothing_else(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure(LogSettings(format="json"))
    log = structlog.get_logger()
    for n in range(4000):
        log.warning("bad request", n=n)
        logging.getLogger("theirs").error("flood %s" % n)  # noqa: UP031
        logging.getLogger("another").warning("drizzle")
    log.warning("something else")
    for _ in range(50):
        log.info("a task's step")
    told = [line["event"].partition(" ")[0] for line in lines(capsys)]
    assert 20 <= told.count("bad") < 100
    assert 20 <= told.count("flood") < 100
    assert 20 <= told.count("drizzle") < 100
    assert told.count("something") == 1
    assert told.count("a") == 50
