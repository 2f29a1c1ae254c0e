"""Looks follow one another at once, unless so many tasks are open that no trainer waits for one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.coordinator import scheduler as module
from fedstream.coordinator.policies import InFlight
from fedstream.coordinator.scheduler import Scheduler, SchedulerSettings


@pytest.mark.parametrize(
    ("tasks", "trainers", "waits"),
    [(8, 2, True), (7, 2, False), (1, 0, False), (4, 1, True), (0, 1, False)],
)
async def test_looks_gather_only_while_tasks_are_ample(
    monkeypatch: pytest.MonkeyPatch, tasks: int, trainers: int, waits: bool
) -> None:
    pauses: list[float] = []

    async def pause(_: asyncio.Event, seconds: float) -> bool:
        pauses.append(seconds)
        return False

    monkeypatch.setattr(module, "pause", pause)
    scheduler = Scheduler(
        SchedulerSettings(), InFlight(n=4), keys=Keys("gathering"), redis=RedisSettings(),
        name="scheduler-0", seed=7,
    )  # fmt: skip
    scheduler._context = SimpleNamespace(stop=asyncio.Event())  # type: ignore[assignment]
    seen: Any = SimpleNamespace(tasks=tasks, trainers=trainers)
    await scheduler._gather(seen)
    assert pauses == []  # it has rested
    await scheduler._gather(seen)
    assert bool(pauses) == waits
    assert all(0 < seconds <= module._GATHER_S for seconds in pauses)
