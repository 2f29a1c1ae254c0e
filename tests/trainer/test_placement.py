"""`device` and `threads` of trainer and evaluator: where models and data lie, who computes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream import Task
from fedstream.broker.client import RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import ConfigError
from fedstream.core.messages import Upload
from fedstream.runtime.service import Service
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.settings import config
from fedstream.trainer.data import placed
from fedstream.trainer.descent import solve
from fedstream.trainer.devices import DeviceSettings
from fedstream.trainer.evaluator import Evaluator, EvaluatorSettings
from fedstream.trainer.service import Trainer
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.solvers import Sgd
from fedstream.trainer.vector import layout_of, load, read
from tests.support import Hand, context, model_of, running, wait_until
from tests.trainer.stepping import content, work_of

Place = Literal["cpu", "cuda"]


class Lines(Task):
    """Two classes, linearly apart."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def device_data(self, device: int) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(device)
        x = torch.randn(40, 3, generator=generator)
        return TensorDataset(x, (x.sum(1) > 0).long())

    def test_data(self) -> Dataset[Any]:
        return self.device_data(99)


def trainer(place: Place, redis: RedisSettings, keys: Keys) -> Trainer:
    return Trainer(
        TrainerSettings(device=place),
        Sgd(lr=0.1, batch_size=8),
        DeviceSettings(),
        LeaseSettings(),
        keys=keys,
        redis=redis,
        name="t1",
        load=Lines,
    )


def evaluator(place: Place, redis: RedisSettings, keys: Keys) -> Evaluator:
    return Evaluator(
        EvaluatorSettings(device=place), keys=keys, redis=redis, name="e1", load=Lines, stop=None
    )


@pytest.mark.parametrize("make", [trainer, evaluator])
async def test_missing_cuda_is_an_error(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    service: Service = make("cuda", RedisSettings(), Keys("nowhere"))
    said = f"{service.role}.device = 'cuda': torch finds no CUDA device here; use 'cpu', or"
    with pytest.raises(ConfigError, match=said):
        await service.run(context())


@pytest.mark.parametrize("service", ["trainer", "evaluator"])
def test_absurd_thread_count_is_rejected(service: str) -> None:
    said = rf"^{service}\.threads = 100000000000 .*less than or equal to 1024$"
    with pytest.raises(ConfigError, match=said):
        config.read(None, [f"{service}.threads=100_000_000_000"])


def test_only_tensors_are_moved_to_the_device() -> None:
    class Drawn(TensorDataset):
        """Its items are not its rows."""

    plain, drawn = TensorDataset(torch.ones(2)), Drawn(torch.ones(2))
    assert placed(plain, "cpu") is plain
    elsewhere: Any = "meta"  # a device that every torch has
    moved = placed(plain, elsewhere)
    assert isinstance(moved, TensorDataset)
    assert moved.tensors[0].device.type == "meta"
    assert placed(drawn, elsewhere) is drawn


CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
)


@pytest.mark.parametrize("place", ["cpu", CUDA])
async def test_result_of_a_device_comes_back_as_the_runs_vector(
    place: Place, hand: Hand, redis: RedisSettings
) -> None:
    task, solver = Lines(), Sgd(lr=0.1, batch_size=8)
    hand.layout = layout_of(task.model())
    await hand.create()  # version 0 is all zeros
    async with running(trainer(place, redis, hand.keys), context()):
        [trigger] = await hand.open(seed=7)

        async def answered() -> Any:
            return await hand.words(Upload)

        [upload] = await wait_until(answered)
    update = await content(hand, upload)

    module, here = task.model(), model_of(hand.layout, 0.0)
    load(here, module)
    work = work_of(solver, device=trigger.device, seed=7, steps=None, epochs=1)
    solve(task, module, task.device_data(trigger.device), work)
    read(module, here)
    assert np.abs(here.floats).max() > 0.01
    assert np.allclose(update.floats, here.floats, atol=1e-6)
