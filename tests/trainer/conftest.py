"""The services' tests need one Redis; the contract suite has tried them all."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from broker.client import RedisSettings


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis."""
    return any_redis


class Clock:
    """The trainer's clock of the wall, which goes on when the test says so.

    Deadlines may be far away then: none passes by itself while a test is still on its way to it.
    """

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the trainer's own."""
    clock = Clock()
    its = SimpleNamespace(time=clock.time, time_ns=time.time_ns, monotonic=time.monotonic)
    monkeypatch.setattr("trainer.service.time", its)
    return clock
