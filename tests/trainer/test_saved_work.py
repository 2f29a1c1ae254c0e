"""A task that one trainer begins and another one ends: with the same update."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import TRAINERS
from fedstream.broker.streams import Group
from fedstream.core.messages import Event
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.solvers import DriftCorrected, SolverSettings
from tests.support import Hand, Proxy, at_rest, context, counted, full, running, wait_until
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
    knows,
    newer,
    saved,
    stopped_midway,
    uninterrupted,
)


@pytest.fixture
def task() -> Steps:
    return Steps()


@RUNS
async def test_another_trainer_resumes_to_the_same_bits(
    hand: Hand, make: Make, task: Steps, solver: SolverSettings, sends: str
) -> None:
    await begun(hand, task, solver, sends)
    wanted = await uninterrupted(hand, make, task, solver)
    name = await stopped_midway(hand, task, make("t1", solver))
    workspace = await saved(hand, name)
    assert workspace is not None
    assert (workspace.step, workspace.steps, workspace.version) == (HELD, H, 0)
    assert await hand.client.call("PTTL", hand.keys.workspace("pool", name)) > 0
    await newer(hand)
    if isinstance(solver, DriftCorrected):
        await knows(hand, 0.75)  # what it began with is in the workspace
    async with running(make("t2", solver), context()):
        _, upload = await answers(hand, 2)
        await wait_until(lambda: gone(hand, name))  # nobody needs it any more
    assert task.steps == H  # over both
    assert (upload.task, upload.trainer, upload.tau, upload.base) == (name, "t2", 0, wanted.base)
    assert (upload.steps, upload.samples, upload.loss) == (H, wanted.samples, wanted.loss)
    assert (upload.digest, upload.sends, upload.layout) == (wanted.digest, sends, wanted.layout)


async def test_task_is_handed_back_even_if_its_work_cannot_be_saved(
    hand: Hand, make: Make, task: Steps, redis: RedisSettings
) -> None:
    await begun(hand, task)
    wanted = await uninterrupted(hand, make, task, SGD)
    async with Proxy(redis) as proxy:
        proxy.refuse = lambda data: b"SET\r\n" in data and b":workspace:" in data
        slow = LeaseSettings(seconds=60)
        name = await stopped_midway(hand, task, make("t1", redis=proxy.settings, lease=slow))
    assert await saved(hand, name) is None
    taken, _ = await Group(hand.client, hand.keys.tasks, TRAINERS, "t2").claim(
        idle_ms=60_000, most=9, count=1
    )
    assert len(taken) == 1  # at once, and not when the lease is over
    task.begins()
    async with running(make("t2"), context()):
        _, upload = await answers(hand, 2)
    assert (task.steps, upload.digest) == (H, wanted.digest)


async def test_oversized_workspace_is_not_saved_and_training_restarts(
    hand: Hand, make: Make, task: Steps
) -> None:
    await begun(hand, task)
    small = TrainerSettings(workspace_bytes=1000)
    with capture_logs() as logs:
        name = await stopped_midway(hand, task, make("t1", settings=small))
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "workspace too large to save"
    assert warning["bytes"] > 1000
    assert await saved(hand, name) is None
    await newer(hand)
    task.begins()
    async with running(make("t2"), context()):
        [upload] = await answers(hand)
    assert (task.steps, upload.steps, upload.tau) == (H, H, 1)  # from what is new by now


async def test_workspaces_use_at_most_half_of_redis(hand: Hand, make: Make, task: Steps) -> None:
    await begun(hand, task)
    await hand.client.call("CONFIG", "SET", "maxmemory", await at_rest(hand) * 3 // 2)
    try:
        with capture_logs() as logs:
            name = await stopped_midway(hand, task, make("t1"))
    finally:
        await hand.client.call("CONFIG", "SET", "maxmemory", 0)
    assert "no room for a workspace" in [line["event"] for line in logs]
    assert await saved(hand, name) is None
    task.begins()
    async with running(make("t2"), context()):
        [upload] = await answers(hand)
    assert (task.steps, upload.task) == (H, name)


async def test_workspace_is_deleted_if_redis_is_full(hand: Hand, make: Make, task: Steps) -> None:
    """It is of no use any more, and would be there for an hour if nobody could write."""
    await begun(hand, task)
    name = await stopped_midway(hand, task, make("t1"))
    assert await saved(hand, name)
    task.hold = H
    task.gate.clear()
    async with running(make("t2"), context()):
        await wait_until(task.held)
        async with full(hand.client):
            task.gate.set()
            await wait_until(lambda: gone(hand, name))
            assert len(await hand.answered()) == 0
        [upload] = await answers(hand)
    assert (upload.task, upload.steps) == (name, H)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("a bit", "do not match their checksum"),
        ("no end", "a workspace of more than 67108864 bytes"),
        ("another model", "a model of a different layout"),
    ],
)
async def test_unusable_workspace_is_discarded_and_training_restarts(
    hand: Hand, make: Make, task: Steps, damage: str, said: str
) -> None:
    await begun(hand, task)
    name = await stopped_midway(hand, task, make("t1"))
    workspace = await saved(hand, name)
    assert workspace is not None
    data = bytearray(workspace.encode())
    match damage:
        case "a bit":
            data[-1] ^= 1
        case "no end":
            data.extend(bytes(64 << 20))
        case "another model":
            data[:] = workspace.model_copy(update={"layout": "0" * 64}).encode()
    await hand.client.call("SET", hand.keys.workspace("pool", name), bytes(data))
    await newer(hand)
    task.begins()
    with capture_logs() as logs:
        async with running(make("t2"), context()):
            [upload] = await answers(hand)
    [warning] = [line for line in logs if line["event"] == "discarding unusable workspace"]
    assert warning["log_level"] == "warning"
    assert said in warning["reason"]
    assert (upload.task, upload.tau, upload.steps, task.steps) == (name, 1, H, H)
    assert await hand.words(Event) == []  # it was not the task's mistake


async def test_trainer_without_its_lease_saves_nothing(hand: Hand, make: Make, task: Steps) -> None:
    """Whoever has it now may be further."""
    await begun(hand, task)
    task.begins(hold=HELD)
    live = context()
    other = Group(hand.client, hand.keys.tasks, TRAINERS, "t2")
    with capture_logs() as logs:
        async with running(make("t1", lease=LeaseSettings(seconds=0.2)), live):
            name = await asked(hand)
            await wait_until(task.held)
            [entry], _ = await other.claim(idle_ms=0, most=9)
            # And is done with it: the first one may not have it back when the lease is over.
            await hand.client.call("XACK", hand.keys.tasks, TRAINERS, entry.id)
            await wait_until(lambda: any(line["event"] == "lease lost" for line in logs))
            task.gate.set()
            end = {"end": "lease lost"}
            await wait_until(lambda: counted(live, "fedstream_trainer_tasks_total", **end))
    assert await saved(hand, name) is None
    assert len(await hand.answered()) == 0


async def test_workspace_is_saved_even_if_free_memory_is_unknown(
    hand: Hand, make: Make, task: Steps, redis: RedisSettings, course: Course
) -> None:
    """As to a user whose rights are of an earlier release; and it does not stay."""
    await begun(hand, task)
    await hand.client.call("ACL", "SETUSER", "old", "on", ">pw", "~*", "&*", "+@all", "-info")
    host = redis.url.removeprefix("redis://")
    trainer = make(redis=RedisSettings(url=f"redis://old:pw@{host}"), devices=BY_TURNS)
    task.begins(hold=HELD)
    live = context()
    try:
        with capture_logs() as logs:
            async with running(trainer, live):
                name = await asked(hand)
                await wait_until(task.held)
                course.eligible = False
                task.gate.set()
                note = "workspace saved, room not known"
                await wait_until(lambda: note in [line["event"] for line in logs])
                assert await saved(hand, name)
                course.eligible = True
                await answers(hand)
                await wait_until(lambda: gone(hand, name))
                end = {"end": "upload"}
                await wait_until(lambda: counted(live, "fedstream_trainer_tasks_total", **end))
    finally:
        await hand.client.call("ACL", "DELUSER", "old")
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == note
    assert "refuses" in warning["reason"]
