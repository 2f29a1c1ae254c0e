"""The services' tests need one Redis; the contract suite has tried them all."""

from __future__ import annotations

import pytest

from fedstream.broker.client import RedisSettings
from tests.support import Clock


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis."""
    return any_redis


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the trainer's own."""
    return Clock(monkeypatch, "fedstream.trainer.service")
