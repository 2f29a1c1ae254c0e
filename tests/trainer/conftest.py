"""The services' tests need one Redis; the contract suite has tried them all."""

from __future__ import annotations

import pytest

from broker.client import RedisSettings


@pytest.fixture
def redis(any_redis: RedisSettings) -> RedisSettings:
    """One Redis."""
    return any_redis
