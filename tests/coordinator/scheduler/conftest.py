"""A scheduler for the tests, and a run that it finds without one."""

from __future__ import annotations

from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.policies import Policy
from fedstream.coordinator.rounds import Rounds
from fedstream.coordinator.scheduler import Scheduler, SchedulerSettings
from tests.support import Hand


@pytest.fixture
def make(redis: RedisSettings, keys: Keys) -> Any:
    """A scheduler."""

    def make(
        policy: Policy | Rounds,
        *,
        name: str = "scheduler-0",
        redis: RedisSettings = redis,
        **settings: Any,
    ) -> Scheduler:
        return Scheduler(
            SchedulerSettings(**settings), policy, keys=keys, redis=redis, name=name, seed=7
        )

    return make


@pytest.fixture
async def run(created: Hand) -> Hand:
    """A run, whose scheduler is still to come."""
    await created.scheduler.release()
    return created


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler waits for news longer than any test: what it does then, news have it do."""
    monkeypatch.setattr("fedstream.coordinator.scheduler.BLOCK_MS", 3_600_000)
