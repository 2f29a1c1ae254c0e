"""A coordinator for the tests, and a run for it. One Redis is enough: the contract suite has tried
them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator.service import Coordinator
from fedstream.coordinator.settings import CoordinatorSettings
from fedstream.runtime.task_settings import LeaseSettings
from tests.support import Clock, Hand


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the scheduler's own."""
    return Clock(monkeypatch)


@pytest.fixture
def make(redis: RedisSettings, keys: Keys) -> Any:
    """A coordinator."""

    def make(
        *,
        name: str = "coordinator-0",
        redis: RedisSettings = redis,
        lease_s: float = 15.0,
        attempts: int = 3,
        anarchic: bool = False,
        lr_of: Callable[[int, int], float] | None = None,
        **settings: Any,
    ) -> Coordinator:
        return Coordinator(
            CoordinatorSettings(**settings),
            LeaseSettings(seconds=lease_s, attempts=attempts),
            keys=keys,
            redis=redis,
            name=name,
            anarchic=anarchic,
            lr_of=lr_of,
        )

    return make


@pytest.fixture
async def created(hand: Hand) -> Hand:
    """A run that was created, and no more."""
    await hand.create()
    return hand


@pytest.fixture
async def run(created: Hand) -> Hand:
    """A run in which others than the coordinator are played by hand."""
    await created.tasks.ensure()
    return created
