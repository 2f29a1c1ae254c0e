"""The services' tests need one Redis; the contract suite has tried them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from fedstream.broker.client import RedisSettings
from fedstream.core.formats import F32, Format
from fedstream.private.settings import PrivateSettings
from fedstream.runtime.backoff import Backoff
from fedstream.runtime.task_settings import LeaseSettings, ParticipationGroup
from fedstream.trainer.devices import DeviceSettings
from fedstream.trainer.service import Trainer
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.solvers import SolverGroup, SolverSettings
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of
from tests.support import Clock, Hand, Pauses
from tests.trainer.adding import Adds, Make
from tests.trainer.stepping import SGD, Course


@pytest.fixture
def task() -> Iterator[Task]:
    """The trainers' task, unless a test has one of its own."""
    task = Adds()
    yield task
    task.gate.set()  # no thread is left in it


@pytest.fixture
def make(hand: Hand, redis: RedisSettings, task: Task) -> Make:
    """Makes a trainer of the task, with these settings."""
    hand.layout = layout_of(task.model())

    def trainer(
        name: str = "t1",
        solver: SolverSettings = SGD,
        *,
        settings: TrainerSettings | None = None,
        devices: DeviceSettings | None = None,
        lease: LeaseSettings | None = None,
        redis: RedisSettings = redis,
        task: Task = task,
        solvers: Sequence[SolverGroup] = (),
        participation: Sequence[ParticipationGroup] = (),
        rests: Backoff | None = None,
        wire: Format = F32,
        private: PrivateSettings | None = None,
        run_devices: int | None = None,
    ) -> Trainer:
        return Trainer(
            settings or TrainerSettings(),
            solver,
            devices or DeviceSettings(),
            lease or LeaseSettings(seconds=60),
            keys=hand.keys,
            redis=redis,
            name=name,
            load=lambda: task,
            solvers=solvers,
            participation=participation,
            rests=rests,
            wire=wire,
            private=private,
            run_devices=run_devices,
        )

    return trainer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the clock by which tasks are late."""
    return Clock(monkeypatch)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> Pauses:
    """The trainer's between its tasks, of a fiftieth of a second at most."""
    pauses = Pauses(0.02)
    for module in ("failures", "leases", "service"):
        monkeypatch.setattr(f"fedstream.trainer.{module}.pause", pauses)
    return pauses


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> Course:
    """When devices may work, in place of a drawn course."""
    course = Course()
    monkeypatch.setattr("fedstream.trainer.service.eligible", course)
    monkeypatch.setattr("fedstream.trainer.attempt._LOOK_S", 0.01)
    return course
