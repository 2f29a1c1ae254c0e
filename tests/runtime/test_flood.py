"""Lines that the outside can cause: some of each kind are let through, and the rest are counted."""

from __future__ import annotations

import logging

import pytest
import structlog

from fedstream.runtime.limits import LogLimiter
from fedstream.runtime.logging import LogSettings, configure
from tests.runtime.test_logging import lines, logging_restored

__all__ = ["lines", "logging_restored"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_burst_passes_then_a_steady_rate() -> None:
    clock = Clock()
    limiter = LogLimiter(burst=3, per_s=0.5, clock=clock)
    assert [limiter.passes("a") for _ in range(5)] == [0, 0, 0, None, None]
    clock.now = 1.9
    assert limiter.passes("a") is None
    clock.now = 2.0
    assert limiter.passes("a") == 3  # left out since the last one
    assert limiter.passes("a") is None
    clock.now = 1000.0
    assert [limiter.passes("a") for _ in range(4)] == [1, 0, 0, None]


def test_kinds_are_limited_independently() -> None:
    limiter = LogLimiter(burst=1, clock=Clock())
    assert [limiter.passes(kind) for kind in "aabba"] == [0, None, 0, None, None]


def test_unlimited_kinds_use_bounded_memory() -> None:
    limiter = LogLimiter(clock=Clock())
    for kind in range(10_000):
        limiter.passes(kind)
    assert len(limiter._kinds) <= 256


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
