"""A device that becomes ineligible: its task waits, or another trainer ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedstream.core.messages import GiveUp
from fedstream.trainer.solvers import SolverSettings
from tests.support import Clock, Hand, context, counted, running, wait_until
from tests.trainer.adding import Make
from tests.trainer.stepping import (
    BY_TURNS,
    HELD,
    RUNS,
    SGD,
    Course,
    H,
    Steps,
    answers,
    asked,
    begun,
    gone,
    newer,
    said,
    saved,
    uninterrupted,
)


@pytest.fixture
def task() -> Steps:
    return Steps()


@RUNS
async def test_device_ineligible_midway_resumes_to_the_same_bits(
    hand: Hand, make: Make, task: Steps, course: Course, solver: SolverSettings, sends: str
) -> None:
    await begun(hand, task, solver, sends)
    wanted = await uninterrupted(hand, make, task, solver)
    task.begins(hold=HELD)
    async with running(make("t1", solver, devices=BY_TURNS), context()):
        name = await asked(hand)
        await wait_until(task.held)
        course.eligible = False
        task.gate.set()
        await wait_until(lambda: saved(hand, name))
        await newer(hand)
        assert task.steps == HELD
        assert len(await hand.answered()) == 1
        course.eligible = True
        _, upload = await answers(hand, 2)
        await wait_until(lambda: gone(hand, name))
    assert (task.steps, upload.steps, upload.tau, upload.trainer) == (H, H, 0, "t1")
    assert (upload.digest, upload.loss) == (wanted.digest, wanted.loss)


async def test_trainer_stopped_during_ineligibility_hands_back_the_task(
    hand: Hand, make: Make, task: Steps, course: Course
) -> None:
    await begun(hand, task)
    wanted = await uninterrupted(hand, make, task, SGD)
    task.begins(hold=HELD)
    live = context()
    async with running(make("t1", devices=BY_TURNS), live) as service:
        name = await asked(hand)
        await wait_until(task.held)
        course.eligible = False
        task.gate.set()
        await wait_until(lambda: saved(hand, name))
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    assert counted(live, "fedstream_trainer_tasks_total", end="handed back") == 1
    course.eligible = True
    async with running(make("t2", devices=BY_TURNS), context()):
        _, upload = await answers(hand, 2)
    assert (task.steps, upload.digest, upload.trainer) == (H, wanted.digest, "t2")


async def test_absent_device_starts_from_the_newest_version_on_return(
    hand: Hand, make: Make, task: Steps, course: Course
) -> None:
    await begun(hand, task)
    course.eligible = False
    async with running(make("t1", devices=BY_TURNS), context()):
        await asked(hand)
        await wait_until(lambda: course.asked)
        await newer(hand)
        assert task.steps == 0
        course.eligible = True
        [upload] = await answers(hand)
    assert (upload.tau, upload.steps) == (1, H)


async def test_absent_device_holds_a_trainer_only_until_its_deadline(
    hand: Hand, make: Make, task: Steps, course: Course, clock: Clock
) -> None:
    await begun(hand, task)
    task.begins(hold=HELD)
    length: dict[str, Any] = {"steps": H, "epochs": None, "version": 0}
    async with running(make("t1", devices=BY_TURNS), context()):
        [trigger] = await hand.open(**length, deadline=clock.time() + 600.0)
        await wait_until(task.held)
        course.eligible = False  # midway
        task.gate.set()
        await wait_until(lambda: saved(hand, trigger.task))
        clock.ahead_s = 601.0
        await wait_until(lambda: said(hand, 1))
        before = course.asked
        await hand.open(**length, deadline=clock.time() + 600.0)  # or before it
        await wait_until(lambda: course.asked > before)
        clock.ahead_s = 1202.0
        await wait_until(lambda: said(hand, 2))
        await wait_until(lambda: gone(hand, trigger.task))
    said_so = [answer.reason for answer in await hand.words(GiveUp)]
    assert said_so == ["deadline passed"] * 2
    assert task.steps == HELD
