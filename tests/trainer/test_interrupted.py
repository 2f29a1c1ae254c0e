"""Tasks that one trainer begins and another one, or another hour, ends: with the same update."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker import blobs
from fedstream.broker.client import RedisSettings
from fedstream.broker.errors import ConfigError
from fedstream.broker.keys import TRAINERS
from fedstream.broker.layout import Floats, Model, vector_of
from fedstream.broker.messages import Event, GiveUp, Trigger, Upload
from fedstream.broker.records import Commit
from fedstream.broker.streams import Group
from fedstream.runtime.tasks import LeaseSettings
from fedstream.trainer.descent import solve
from fedstream.trainer.devices import DeviceSettings, OnOff
from fedstream.trainer.service import Initiative, Trainer, TrainerSettings
from fedstream.trainer.solvers import DriftCorrected, Sgd, SolverSettings, Work
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of, load, read
from fedstream.trainer.workspace import Workspace
from tests.support import (
    Clock,
    Hand,
    Proxy,
    at_rest,
    context,
    counted,
    full,
    model_of,
    running,
    wait_until,
)

H = 7
HELD = 3  # the step in whose middle the task is interrupted


class Steps(Task):
    """Counts its steps, of which one can be held; dropout and BatchNorm have a state of their own.

    Trainers that are given the same one share its count and its gate.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.hold: int | None = None
        self.gate = threading.Event()

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))

    def device_data(self, device: int) -> Dataset[Any]:
        draw = torch.Generator().manual_seed(device)
        return TensorDataset(
            torch.randn(40, 4, generator=draw), torch.randint(2, (40,), generator=draw)
        )

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.steps += 1
        if self.steps == self.hold:
            assert self.gate.wait(10)
        return super().loss(model, batch)

    def begins(self, hold: int | None = None) -> None:
        """Counts from zero; the step ``hold`` waits for the gate."""
        self.steps, self.hold = 0, hold
        self.gate.clear()

    def held(self) -> bool:
        """Whether it is in the middle of that step."""
        return self.steps == self.hold


SGD = Sgd(lr=0.1, batch_size=10, momentum=0.5)
SCAFFOLD = DriftCorrected(lr=0.1, batch_size=10)
RUNS = pytest.mark.parametrize(
    ("solver", "sends"),
    [(SGD, "model"), (SGD, "delta"), (SCAFFOLD, "delta")],
    ids=["models", "deltas", "scaffold"],
)
Make = Callable[..., Trainer]


@pytest.fixture
def task() -> Steps:
    return Steps()


@pytest.fixture
def make(hand: Hand, redis: RedisSettings, task: Steps) -> Make:
    """Makes a trainer of the task, with these settings."""

    def trainer(name: str = "t1", solver: SolverSettings = SGD, **changes: Any) -> Trainer:
        parts: dict[str, Any] = {
            "settings": TrainerSettings(), "devices": DeviceSettings(),
            "lease": LeaseSettings(seconds=0.8), "redis": redis,
        }  # fmt: skip
        parts |= changes
        return Trainer(
            parts["settings"], solver, parts["devices"], parts["lease"],
            keys=hand.keys, redis=parts["redis"], name=name, load=lambda: task,
        )  # fmt: skip

    return trainer


async def begun(
    hand: Hand, task: Steps, solver: SolverSettings = SGD, sends: Any = "model"
) -> None:
    """The run is there with a version 0; of device 1 something is known, where that matters."""
    scaffold = isinstance(solver, DriftCorrected)
    layout = layout_of(task.model())
    hand.layout = layout.with_controls() if scaffold else layout
    await hand.create(sends=sends, strategy="scaffold" if scaffold else "fedbuff")
    if scaffold:
        await knows(hand, 0.25)


async def knows(hand: Hand, value: float, device: int = 1) -> None:
    """The updater hands out a device's c_i."""
    vector, token = vector_of(control(hand, value)), hand.updater.token
    digest, size = vector.digest(), vector.layout.nbytes
    staged = hand.keys.staged(device, digest)
    ahead = await blobs.prepare(hand.client, staged, vector, expire_s=60)
    assert await hand.ledger.hand_out(token, device, digest, size, ahead=ahead) == "done"


def control(hand: Hand, value: float) -> Floats:
    drawn: Floats = np.linspace(-value, value, hand.layout.parameters, dtype=np.float32)
    return drawn


async def asked(hand: Hand, device: int = 1) -> str:
    """The scheduler wants H steps of a device, always from the same seed: the task."""
    [trigger] = await hand.open(device=device, steps=H, epochs=None)
    await hand.dispatch()
    return trigger.task


async def answers(hand: Hand, count: int = 1) -> list[Upload]:
    """The updates in `uploads`, once there are so many."""

    async def there() -> bool:
        return len(await hand.answered()) >= count

    await wait_until(there, what=f"{count} answers")
    found = await hand.answered()
    assert all(isinstance(one, Upload) for one in found), found
    return [one for one in found if isinstance(one, Upload)]


async def uninterrupted(hand: Hand, make: Make, task: Steps, solver: SolverSettings) -> Upload:
    """The update of a trainer that nobody interrupts, on version 0."""
    task.begins()
    async with running(make("t0", solver), context()):
        await asked(hand)
        [upload] = await answers(hand)
    assert (task.steps, upload.steps, upload.tau) == (H, H, 0)
    return upload


async def newer(hand: Hand) -> None:
    """Meanwhile version 1 is made of something else."""
    version = await hand.publish(1, 0.5)
    commit = Commit(version=version, held=(), mean_staleness=0.0)
    assert (await hand.ledger.commit(hand.updater.token, commit)).what == "done"


async def stopped_midway(hand: Hand, task: Steps, trainer: Trainer) -> str:
    """The trainer is told to stop in the middle of a step, and ends: the task it had."""
    task.begins(hold=HELD)
    live = context()
    async with running(trainer, live) as service:
        name = await asked(hand)
        await wait_until(task.held)
        live.stop.set()
        task.gate.set()
        await asyncio.wait_for(asyncio.shield(service), 60)
    assert task.steps == HELD  # not a step more
    return name


async def saved(hand: Hand, name: str) -> Workspace | None:
    """What is left of a task."""
    data = await hand.client.call("GET", hand.keys.workspace("pool", name))
    return Workspace.decode(data) if data is not None else None


async def content(hand: Hand, upload: Upload) -> Model:
    model = Model(hand.layout)
    await blobs.read(
        hand.client,
        hand.keys.update(upload.blob),
        model,
        digest=upload.digest,
        chunks=upload.chunks,
    )
    return model


# a trainer that is told to stop


@RUNS
async def test_another_trainer_goes_on_from_there_to_the_same_bits(
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


async def test_it_may_be_interrupted_again_and_again(hand: Hand, make: Make, task: Steps) -> None:
    await begun(hand, task)
    wanted = await uninterrupted(hand, make, task, SGD)
    await stopped_midway(hand, task, make("t1"))
    for n in range(HELD + 1, H + 1):
        task.hold = n
        task.gate.clear()
        live = context()
        async with running(make(f"t{n}"), live) as service:
            await wait_until(task.held)
            live.stop.set()
            task.gate.set()
            await asyncio.wait_for(asyncio.shield(service), 60)
    # The last step was done, and so was the task: its trainer ended after it had answered.
    _, upload = await answers(hand, 2)
    assert (task.steps, upload.digest, upload.trainer) == (H, wanted.digest, f"t{H}")


async def test_it_can_be_handed_back_though_its_work_cannot_be_saved(
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


async def test_a_workspace_too_large_is_not_saved_and_the_work_is_done_again(
    hand: Hand, make: Make, task: Steps
) -> None:
    await begun(hand, task)
    small = TrainerSettings(workspace_bytes=1000)
    with capture_logs() as logs:
        name = await stopped_midway(hand, task, make("t1", settings=small))
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "workspace too large to be saved"
    assert warning["bytes"] > 1000
    assert await saved(hand, name) is None
    await newer(hand)
    task.begins()
    async with running(make("t2"), context()):
        [upload] = await answers(hand)
    assert (task.steps, upload.steps, upload.tau) == (H, H, 1)  # from what is new by now


async def test_workspaces_leave_half_of_redis_to_models_and_updates(
    hand: Hand, make: Make, task: Steps
) -> None:
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


async def test_where_redis_is_full_a_workspace_makes_room_for_the_update(
    hand: Hand, make: Make, task: Steps
) -> None:
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
        ("all but a byte", "do not match their checksum"),
        ("no end", "a workspace of more than 67108864 bytes"),
        ("another solver", "the workspace is of other work, its solver is"),
        ("another torch", "the state of a generator is not this torch's"),
        ("another model", "a model of another layout"),
    ],
)
async def test_a_workspace_of_no_use_is_left_and_the_task_begun_anew(
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
        case "all but a byte":
            del data[1:]
        case "no end":
            data.extend(bytes(64 << 20))
        case "another torch":
            data[:] = workspace.model_copy(update={"minibatches": b"junk"}).encode()
        case "another model":
            data[:] = workspace.model_copy(update={"layout": "0" * 64}).encode()
    await hand.client.call("SET", hand.keys.workspace("pool", name), bytes(data))
    await newer(hand)
    task.begins()
    solver = SGD.model_copy(update={"lr": 0.2}) if damage == "another solver" else SGD
    with capture_logs() as logs:
        async with running(make("t2", solver), context()):
            [upload] = await answers(hand)
    [warning] = [line for line in logs if line["event"] == "workspace of no use: begun anew"]
    assert warning["log_level"] == "warning"
    assert said in warning["reason"]
    assert (upload.task, upload.tau, upload.steps, task.steps) == (name, 1, H, H)
    assert await hand.words(Event) == []  # it was not the task's mistake


async def test_a_trainer_that_lost_its_lease_saves_nothing(
    hand: Hand, make: Make, task: Steps
) -> None:
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


# a device that becomes ineligible


class Course:
    """When the device may work: the test says it."""

    def __init__(self) -> None:
        self.eligible = True
        self.asked = 0

    def __call__(self, _settings: object, _device: int, _seed: int, _at_s: float) -> bool:
        self.asked += 1
        return self.eligible


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Course:
    """In place of a drawn one."""
    course = Course()
    monkeypatch.setattr("fedstream.trainer.service.eligible", course)
    monkeypatch.setattr("fedstream.trainer.service._LOOK_S", 0.01)
    return course


BY_TURNS = DeviceSettings(availability=OnOff(mean_on_s=1.0, mean_off_s=1.0))


@RUNS
async def test_a_device_ineligible_midway_waits_and_finishes_to_the_same_bits(
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


async def gone(hand: Hand, name: str) -> bool:
    return await saved(hand, name) is None


async def test_a_workspace_is_saved_though_redis_does_not_say_how_full_it_is(
    hand: Hand, make: Make, task: Steps, redis: RedisSettings, course: Course
) -> None:
    """As to a user whose rights are of an earlier release; and it does not stay."""
    await begun(hand, task)
    await hand.client.call("ACL", "SETUSER", "old", "on", ">pw", "~*", "&*", "+@all", "-info")
    host = redis.url.removeprefix("redis://")
    trainer = make(redis=RedisSettings(url=f"redis://old:pw@{host}"), devices=BY_TURNS)
    task.begins(hold=HELD)
    try:
        with capture_logs() as logs:
            async with running(trainer, context()):
                name = await asked(hand)
                await wait_until(task.held)
                course.eligible = False
                task.gate.set()
                await wait_until(lambda: trainer._saved_for == name)
                assert await saved(hand, name)
                course.eligible = True
                await answers(hand)
                await wait_until(lambda: gone(hand, name))
                await wait_until(lambda: trainer._saved_for == "")
    finally:
        await hand.client.call("ACL", "DELUSER", "old")
    [warning] = [line for line in logs if line["log_level"] == "warning"]
    assert warning["event"] == "workspace saved, room not known"
    assert "refuses" in warning["reason"]


async def test_a_trainer_stopped_while_its_device_is_ineligible_hands_the_task_back(
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


async def test_a_device_that_is_not_there_begins_with_what_is_new_when_it_comes(
    hand: Hand, make: Make, task: Steps, course: Course
) -> None:
    await begun(hand, task)
    course.eligible = False
    trainer = make("t1", devices=BY_TURNS)
    async with running(trainer, context()):
        await asked(hand)
        await wait_until(lambda: trainer._now)
        await newer(hand)
        assert task.steps == 0
        course.eligible = True
        [upload] = await answers(hand)
    assert (upload.tau, upload.steps) == (1, H)


async def test_a_device_that_stays_away_holds_no_trainer_beyond_its_deadline(
    hand: Hand, make: Make, task: Steps, course: Course, clock: Clock
) -> None:
    await begun(hand, task)
    task.begins(hold=HELD)
    trainer = make("t1", devices=BY_TURNS)
    length: dict[str, Any] = {"steps": H, "epochs": None, "version": 0}
    async with running(trainer, context()):
        [trigger] = await hand.open(**length, deadline=clock.time() + 600.0)
        await hand.dispatch()
        await wait_until(task.held)
        course.eligible = False  # midway
        task.gate.set()
        await wait_until(lambda: saved(hand, trigger.task))
        clock.ahead_s = 601.0
        await wait_until(lambda: said(hand, 1))
        await wait_until(lambda: not trainer._now)
        await hand.open(**length, deadline=clock.time() + 600.0)  # or before it
        await hand.dispatch()
        await wait_until(lambda: trainer._now)
        clock.ahead_s = 1202.0
        await wait_until(lambda: said(hand, 2))
        await wait_until(lambda: gone(hand, trigger.task))
    said_so = [answer.reason for answer in await hand.words(GiveUp)]
    assert said_so == ["deadline passed"] * 2
    assert task.steps == HELD


async def said(hand: Hand, n: int) -> bool:
    return len(await hand.answered()) == n


async def test_a_device_that_is_not_there_asks_for_nothing_by_itself(
    hand: Hand, make: Make, task: Steps, course: Course
) -> None:
    await begun(hand, task)
    course.eligible = False
    settings = TrainerSettings(anarchic=Initiative(rate=500.0))
    async with running(make("t1", settings=settings, devices=BY_TURNS), context()):
        await wait_until(lambda: course.asked > 5)
        assert await hand.words(Trigger) == []
        course.eligible = True
        await wait_until(lambda: hand.words(Trigger))


# what a device has to know


async def test_the_control_comes_from_redis_and_its_change_goes_back(
    hand: Hand, make: Make, task: Steps
) -> None:
    await begun(hand, task, SCAFFOLD, "delta")
    async with running(make("t1", SCAFFOLD), context()):
        await asked(hand, device=1)
        await asked(hand, device=2)  # of which nothing is known
        known, unknown = [await content(hand, one) for one in await answers(hand, 2)]
    # c_i+ = c_i - c + (x_tau - x_new) / (H gamma), c being zero here
    for model, before in ((known, control(hand, 0.25)), (unknown, control(hand, 0.0))):
        after = before - model.parameters / (H * SCAFFOLD.lr)
        assert model.controls == pytest.approx(after - before, abs=1e-5)
        assert np.any(model.controls)


async def test_the_server_s_control_comes_with_the_model(
    hand: Hand, make: Make, task: Steps
) -> None:
    await begun(hand, task, SCAFFOLD, "delta")
    await newer(hand)  # all of which is 0.5, c too
    async with running(make("t1", SCAFFOLD), context()):
        await asked(hand)
        [upload] = await answers(hand)
    model = await content(hand, upload)
    # c_i+ - c_i = -c + (x_tau - x_new) / (H gamma)
    change = -0.5 - model.parameters / (H * SCAFFOLD.lr)
    assert model.controls == pytest.approx(change, abs=1e-5)


async def test_a_delta_is_how_far_training_went(hand: Hand, make: Make, task: Steps) -> None:
    await begun(hand, task, SGD, "delta")
    await newer(hand)
    async with running(make("t1"), context()):
        name = await asked(hand)
        [upload] = await answers(hand)
    found = await content(hand, upload)
    x_tau, x_new, module = model_of(hand.layout, 0.5), Model(hand.layout), task.model()
    load(x_tau, module)
    work = Work(
        device=1, task=name, version=1, seed=1, steps=H, epochs=None, solver=SGD,
        cancelled=lambda: False,
    )  # fmt: skip
    solve(task, module, task.device_data(1), work)
    read(module, x_new)
    # Nearly: it was trained by another thread, with as many of torch's own as its settings say.
    assert found.parameters == pytest.approx(x_new.parameters - x_tau.parameters, abs=1e-5)
    assert found.buffers == pytest.approx(x_new.buffers, abs=1e-5)  # which are no difference
    assert found.integers.tolist() == x_new.integers.tolist()


async def test_a_trainer_waits_for_a_control_that_is_being_written(
    hand: Hand, make: Make, task: Steps
) -> None:
    await begun(hand, task, SCAFFOLD, "delta")
    wanted = await uninterrupted(hand, make, task, SCAFFOLD)
    junk = vector_of(control(hand, 9.0)).buffer.tobytes()
    theirs = hand.keys.control("pool", 1)
    await hand.client.call("HSET", theirs, "0", junk)  # not what its digest says
    task.begins()
    live = context()
    async with running(make("t1", SCAFFOLD), live):
        await asked(hand)
        await wait_until(lambda: counted(live, "fedstream_retries_total", loop="tasks") > 1)
        assert task.steps == 0
        await hand.client.call("COPY", hand.keys.device(1), theirs, "REPLACE")
        _, upload = await answers(hand, 2)
    assert upload.digest == wanted.digest


@pytest.mark.parametrize(
    ("strategy", "solver", "said"),
    [
        ("scaffold", SGD, r"solver.kind = 'sgd': run .* strategy 'scaffold'; scaffold takes both"),
        ("fedbuff", SCAFFOLD, "solver.kind = 'scaffold': run .* made with strategy 'fedbuff'"),
    ],
)
async def test_a_solver_that_does_not_suit_the_strategy_ends_the_trainer(
    hand: Hand, make: Make, task: Steps, strategy: str, solver: SolverSettings, said: str
) -> None:
    await begun(hand, task, SCAFFOLD if strategy == "scaffold" else SGD)
    with pytest.raises(ConfigError, match=said):
        await asyncio.wait_for(make("t1", solver).run(context()), 60)
