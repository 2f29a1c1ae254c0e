"""Local tensors: each device trains from its own, and only accepted answers change them."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedstream.broker import blobs, workspaces
from fedstream.core.errors import ConfigError
from fedstream.core.layout import Model
from fedstream.core.messages import POOL, GiveUp, Upload
from fedstream.core.records import head_of
from fedstream.trainer.learner import Learned, Learner
from fedstream.trainer.service import Trainer
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.solvers import Cancelled, DriftCorrected, Trained, Work
from fedstream.trainer.task import Task, initial, untrained
from fedstream.trainer.vector import layout_of
from fedstream.trainer.workspace import Start, Workspace
from tests.support import Hand, context, running
from tests.trainer.adding import Adds, Make, answers
from tests.trainer.stepping import Steps, work_of


class Personal(Adds):
    """Adds one to a shared and to a local parameter; notes what each device's local one was."""

    local = ("head",)

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[int, float]] = []

    def model(self) -> nn.Module:
        model = super().model()
        model.register_parameter("head", nn.Parameter(torch.full((2,), 7.0)))
        return model

    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        self.begun.append((work.device, model.get_parameter("head")[0].item()))
        return super().train(model, data, work)


class Normed(Steps):
    """A BatchNorm of each device's own, and dropout."""

    local = ("1.*",)


# what is local


def test_local_tensors_are_in_the_layout_but_not_shared() -> None:
    layout = layout_of(untrained(Normed()))
    assert [tensor.name for tensor in layout.tensors] == [
        "0.weight",
        "0.bias",
        "3.weight",
        "3.bias",
    ]
    assert layout.unshared is not None
    assert layout.unshared.local == (
        "1.weight",
        "1.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    )
    assert layout.unshared.frozen.tensors == ()


@pytest.mark.parametrize(
    ("local", "said"),
    [
        ("1.*", r"Task.local = '1\.\*': must be a tuple of patterns"),
        (("1.*", "bn*"), "Task.local: 'bn\\*' fits no tensor of model\\(\\), whose first is '0.w"),
        (("*",), "all 9 parameters are frozen or local, such as 0.weight: leave some"),
    ],
)
def test_unfit_patterns_are_refused(local: Any, said: str) -> None:
    task = Normed()
    task.local = local
    with pytest.raises(ConfigError, match=said):
        untrained(task)


# training


def learned(task: Task, start: Start, work: Work) -> tuple[Learned, Model]:
    """The result of one task, in a process of its own, and the update."""
    into = Model(start.model.layout)
    return Learner(lambda: task, 1, "cpu").train(start, work, into, "model"), into


def test_training_begins_with_the_devices_values_and_returns_new_ones() -> None:
    task = Personal()
    x = initial(task, 0)
    start = Start(0, x.digest(), x)
    first, update = learned(task, start, work_of(DriftCorrected()))
    assert update.parameters.tolist() == [1.0] * 4
    assert first.local is not None
    assert first.local.floats.tolist() == [8.0, 8.0]
    second, _ = learned(task, replace(start, local=first.local), work_of(DriftCorrected()))
    assert second.local is not None
    assert second.local.floats.tolist() == [9.0, 9.0]
    assert [value for _, value in task.begun] == [7.0, 8.0]


def test_values_that_are_not_finite_are_not_kept() -> None:
    task = Personal()
    x = initial(task, 0)
    local = Model(x.layout.unshared.of_devices)  # type: ignore[union-attr]
    local.floats[:] = [1.0, np.inf]
    result, _ = learned(task, Start(0, x.digest(), x, local=local), work_of(DriftCorrected()))
    assert result.local is None


def next_is(asked: Iterator[int], number: int) -> bool:
    return next(asked) == number


def test_interrupted_training_goes_on_with_the_same_local_bits() -> None:
    task = Normed()
    x = initial(task, 0)
    piece = replace(work_of(DriftCorrected(batch_size=8, lr=0.1)), steps=6)
    start = Start(0, x.digest(), x)
    whole, update = learned(task, start, piece)
    assert whole.local is not None
    for after in range(1, 6):
        asked = count(1)
        stops = replace(piece, cancelled=partial(next_is, asked, after + 1))
        with pytest.raises(Cancelled) as stopped:
            learned(task, start, stops)
        assert stopped.value.workspace is not None
        saved = Workspace.decode(stopped.value.workspace.encode())
        again = Start.resumed(saved, x.layout)
        resumed, its = learned(task, again, replace(piece, resume=saved))
        assert its.digest() == update.digest()
        assert resumed.local is not None
        assert resumed.local.digest() == whole.local.digest()


class Phased(Steps):
    """Descends twice: by all parameters, then by the shared ones alone."""

    local = ("3.*",)

    def train(self, model: nn.Module, data: Any, work: Work) -> Trained:
        model.requires_grad_(requires_grad=True)
        self.descend(model, data, work)
        model.get_submodule("3").requires_grad_(requires_grad=False)
        return self.descend(model, data, work)


@pytest.mark.parametrize("after", [2, 5])
def test_interrupted_training_of_two_descents_gives_the_same_bits(after: int) -> None:
    """A workspace is of the first descent: the second one must not continue it."""
    task = Phased()
    x = initial(task, 0)
    piece = replace(work_of(DriftCorrected(batch_size=8, lr=0.1)), steps=3)
    start = Start(0, x.digest(), x)
    whole, update = learned(task, start, piece)
    stops = replace(piece, cancelled=partial(next_is, count(1), after))
    with pytest.raises(Cancelled) as stopped:
        learned(task, start, stops)
    resumed, its = learned(task, start, replace(piece, resume=stopped.value.workspace))
    assert its.digest() == update.digest()
    assert resumed.local is not None
    assert whole.local is not None
    assert resumed.local.digest() == whole.local.digest()


def test_controls_are_of_the_shared_parameters_alone() -> None:
    """SCAFFOLD corrects no local parameter."""
    task = Normed()
    module = untrained(task)
    parameters = layout_of(module).parameters
    control = np.ones(parameters, np.float32)
    data = task.device_data(3)
    trained = task.train(module, data, work_of(DriftCorrected(batch_size=8), control=control))
    assert trained.control is not None
    assert trained.control.shape == (parameters,)


# trainers


@pytest.fixture
def task() -> Personal:
    return Personal()


async def served(hand: Hand, task: Personal, trainer: Trainer) -> Trainer:
    """The run is there, with its local tensors' values of version 0."""
    x = initial(task, 0)
    hand.layout, unshared = x.layout, x.layout.unshared
    assert unshared is not None
    await hand.create()
    head = head_of(unshared)
    key = hand.keys.model(head.blob)
    await blobs.write(hand.client, key, unshared.model(), expire_s=60, encoded=head.encoded)
    return trainer


async def asks(hand: Hand, *devices: int, before: int = 0) -> list[Upload | GiveUp]:
    for n, device in enumerate(devices, before + 1):
        await hand.open(device=device)
        await answers(hand, n)
    return await hand.answered()


async def test_each_device_goes_on_from_its_own_values(
    hand: Hand, make: Make, task: Personal
) -> None:
    """Whichever trainer of the pool it gets."""
    async with running(await served(hand, task, make("t1")), context()):
        [first, *_] = await asks(hand, 3, 4, 3)
    async with running(make("t2"), context()):
        await asks(hand, 3, 5, before=3)
    assert task.begun == [(3, 7.0), (4, 7.0), (3, 8.0), (3, 9.0), (5, 7.0)]
    assert isinstance(first, Upload)
    assert first.size == 16  # the shared four
    names = await hand.client.call("KEYS", hand.keys.workspace(POOL, "*"))
    kept = sorted(name.decode().rpartition("/")[2] for name in names)
    assert kept == ["local.3", "local.4", "local.5"]  # nothing staged is left
    expiry = await hand.client.call("PTTL", hand.keys.workspace(POOL, "local.3"))
    assert 0 < expiry <= 24 * 3_600_000


async def test_task_that_is_given_up_changes_nothing(
    hand: Hand, make: Make, task: Personal
) -> None:
    async with running(await served(hand, task, make()), context()):
        (*_, last) = await asks(hand, 9, 9)  # raises, after it has begun
    assert isinstance(last, GiveUp)
    assert task.begun == [(9, 7.0), (9, 7.0)]


async def test_answer_after_a_lost_lease_changes_nothing(
    hand: Hand, make: Make, task: Personal
) -> None:
    await served(hand, task, make())
    values = b"\0" * 8
    staged, key = (hand.keys.workspace(POOL, f"local.3{end}") for end in (".attempt", ""))
    await workspaces.write(hand.client, staged, values, expire_s=60)
    await hand.open(device=3)
    [(entry, assigned)] = await hand.take()
    upload = await hand.trained(assigned)
    await hand.client.call("XACK", hand.keys.tasks, "trainers", entry.id)
    said = await hand.outbox.answer(hand.keys.tasks, entry, upload, renamed=(staged, key))
    assert said == "over"
    assert await hand.client.call("EXISTS", staged, key) == 0


async def test_unsound_values_count_as_missing(hand: Hand, make: Make, task: Personal) -> None:
    """Any trainer of the site may write there."""
    await served(hand, task, make())
    bad = np.array([np.nan, 1.0], "<f4").tobytes()
    for device, junk in ((3, b"short"), (4, bad), (5, b"x" * 100)):
        key = hand.keys.workspace(POOL, f"local.{device}")
        await workspaces.write(hand.client, key, junk, expire_s=60)
    async with running(make(), context()):
        await asks(hand, 3, 4, 5)
    assert task.begun == [(3, 7.0), (4, 7.0), (5, 7.0)]


async def test_run_that_is_begun_anew_is_not_trained_with_the_earlier_ones_values(
    hand: Hand, make: Make, task: Personal
) -> None:
    trainer = await served(hand, task, make())
    async with running(trainer, context(), may_fail=True) as ends:
        await asks(hand, 3)
        await hand.client.call("HSET", hand.keys.run, "lineage", "another")
        await hand.open(device=3)
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(ends, 10)
    said = r"was begun anew, and this trainer has joined the earlier run"
    assert ended.group_contains(ConfigError, match=said)
    assert task.begun == [(3, 7.0)]


async def test_values_may_lie_on_the_trainers_disk(
    hand: Hand, make: Make, task: Personal, tmp_path: Path
) -> None:
    settings = TrainerSettings(local_dir=str(tmp_path / "local"))
    async with running(await served(hand, task, make(settings=settings)), context()):
        await asks(hand, 3, 3)
    async with running(make(settings=settings), context()):
        await asks(hand, 3, before=2)
    assert task.begun == [(3, 7.0), (3, 8.0), (3, 9.0)]
    assert await hand.client.call("KEYS", hand.keys.workspace(POOL, "*")) == []
    [file] = kept(tmp_path / "local")
    assert np.frombuffer(file.read_bytes(), "<f4").tolist() == [10.0, 10.0]
    assert file.stat().st_mode & 0o077 == 0


async def test_folder_that_cannot_be_made_is_named_at_the_start(
    hand: Hand, make: Make, task: Personal, tmp_path: Path
) -> None:
    (file := tmp_path / "local").touch()
    trainer = await served(hand, task, make(settings=TrainerSettings(local_dir=str(file))))
    with pytest.raises(ConfigError, match=rf"trainer.local_dir: {file}/.*: Not a directory"):
        await asyncio.wait_for(trainer.run(context()), 10)


async def test_full_disk_keeps_the_earlier_values(
    hand: Hand,
    make: Make,
    task: Personal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = TrainerSettings(local_dir=str(tmp_path / "local"))
    async with running(await served(hand, task, make(settings=settings)), context()):
        await asks(hand, 3, 3)
        monkeypatch.setattr(os, "fsync", full)
        await asks(hand, 3, 3, before=2)
    assert task.begun == [(3, 7.0), (3, 8.0), (3, 9.0), (3, 9.0)]
    assert [file.name for file in kept(tmp_path / "local")] == ["3"]


def kept(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file()]


async def test_more_bytes_than_allowed_are_refused_at_the_start(
    hand: Hand, make: Make, task: Personal
) -> None:
    trainer = make(settings=TrainerSettings(local_bytes=79))
    await served(hand, task, trainer)
    said = r"trainer.local_bytes = 79: the local tensors of 10 devices have 80 bytes"
    with pytest.raises(ConfigError, match=said):
        await trainer.run(context())
