"""A task of several steps that can be interrupted, and what is left of it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker import blobs
from fedstream.core.layout import Floats, Model, vector_of
from fedstream.core.messages import Upload
from fedstream.core.records import Commit
from fedstream.trainer.devices import DeviceSettings, OnOff
from fedstream.trainer.service import Trainer
from fedstream.trainer.solvers import DriftCorrected, Sgd, SolverSettings, Work
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of
from fedstream.trainer.workspace import Workspace
from tests.support import Hand, context, running, wait_until
from tests.trainer.adding import Make

H = 7
HELD = 3  # the step in whose middle the task is interrupted
SGD = Sgd(lr=0.1, batch_size=10, momentum=0.5)
SCAFFOLD = DriftCorrected(lr=0.1, batch_size=10)
RUNS = pytest.mark.parametrize(
    ("solver", "sends"),
    [(SGD, "model"), (SGD, "delta"), (SCAFFOLD, "delta")],
    ids=["models", "deltas", "scaffold"],
)
BY_TURNS = DeviceSettings(availability=OnOff(mean_on_s=1.0, mean_off_s=1.0))


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


class Plain(Steps):
    """The same without buffers and dropout: ten parameters."""

    def model(self) -> nn.Module:
        return nn.Linear(4, 2)


class Adapted(Steps):
    """The same with a frozen first layer, of which every process draws another one."""

    def model(self) -> nn.Module:
        model = super().model()
        model.get_submodule("0").requires_grad_(requires_grad=False)
        return model


def work_of(solver: SolverSettings, **more: Any) -> Work:
    """One step of device 3, unless ``more`` asks for another piece of work."""
    asked: dict[str, Any] = {
        "device": 3,
        "task": "t",
        "version": 0,
        "seed": 5,
        "steps": 1,
        "epochs": None,
        "solver": solver,
        "cancelled": lambda: False,
    }
    return Work(**asked | more)


class Course:
    """When the device may work: the test says it."""

    def __init__(self) -> None:
        self.eligible = True
        self.asked = 0

    def __call__(self, _settings: object, _device: int, _seed: int, _at_s: float) -> bool:
        self.asked += 1
        return self.eligible


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
    commit = Commit(versions=[version], held=(), mean_staleness=0.0)
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


async def gone(hand: Hand, name: str) -> bool:
    return await saved(hand, name) is None


async def said(hand: Hand, n: int) -> bool:
    return len(await hand.answered()) == n


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
