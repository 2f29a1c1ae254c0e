"""Looks follow one another at once, unless so many tasks are open that no trainer waits for one."""

from __future__ import annotations

import asyncio
import time

import pytest

from fedstream.coordinator.cooldowns import Cooldowns
from fedstream.coordinator.intake import Gathering


class Clock:
    """A clock that runs only while somebody sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(asyncio, "sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.now += seconds

    async def waited(self, gathering: Gathering, tasks: int, trainers: int, done: int = 1) -> float:
        began = self.now
        await gathering.more(tasks, trainers, done)
        return self.now - began


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def paced(clock: Clock, each_s: float) -> Gathering:
    """After many tasks, one each so many seconds."""
    gathering = Gathering()
    for _ in range(500):
        clock.now += each_s
        await gathering.more(1, 1, 1)
    return gathering


@pytest.mark.parametrize(
    ("tasks", "trainers", "seconds"),
    [(8, 2, 0.004), (16, 2, 0.008), (7, 2, 0.0), (1, 0, 0.0), (4, 1, 0.002), (1000, 2, 0.02)],
)
async def test_an_eighth_of_ample_tasks_is_gathered(
    clock: Clock, tasks: int, trainers: int, seconds: float
) -> None:
    gathering = await paced(clock, 0.004)
    assert await clock.waited(gathering, tasks, trainers, done=0) == pytest.approx(seconds)


async def test_waits_are_counted_from_the_last_one(clock: Clock) -> None:
    gathering = await paced(clock, 0.004)
    clock.now += 0.003
    assert await clock.waited(gathering, 16, 2, done=0) == pytest.approx(0.005)
    clock.now += 0.5
    assert await clock.waited(gathering, 16, 2, done=0) == 0


async def test_nothing_is_gathered_before_the_pace_is_known(clock: Clock) -> None:
    assert await clock.waited(Gathering(), 16, 2) == 0


async def test_pace_follows_the_newest_tasks(clock: Clock) -> None:
    gathering = await paced(clock, 0.004)
    clock.now += 0.128 / 4  # 64 tasks, four times as fast as it was 0.002
    await gathering.more(1, 1, 64)
    assert await clock.waited(gathering, 16, 2, done=0) == pytest.approx(16 / 8 * 0.0005)


# how long devices rest after a task


def test_rest_lasts_from_one_task_to_the_next() -> None:
    rests = Cooldowns(10.0)
    rests.begin(3, 100.0)
    rests.begin(4, 101.0)
    assert [rests.end(device) for device in (3, 4)] == [110.0, 111.0]
    rests.begin(3, 110.0)
    assert rests.end(3) == 120.0
    assert rests.end(5) < 0, "it had no task"


def test_rests_that_are_over_are_forgotten() -> None:
    rests = Cooldowns(10.0)
    for device in range(100):
        rests.begin(device, float(device))
    assert len(rests._ends) == 10
    assert rests.end(99) == 109.0


def test_without_rests_nobody_is_remembered() -> None:
    rests = Cooldowns(0.0)
    rests.begin(3, 100.0)
    assert not rests


def test_rest_too_short_for_the_clock_is_none() -> None:
    rests = Cooldowns(1e-300)
    rests.begin(3, 100.0)
    assert rests.end(3) < 100.0
