"""What a trainer does once more, and what it may not: say an answer, use a model it has."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.errors import BlobMissing
from fedstream.broker.layout import Model
from fedstream.broker.messages import Presence, Upload, decode
from fedstream.runtime.backoff import pause
from fedstream.runtime.tasks import LeaseSettings
from fedstream.trainer.devices import DeviceSettings
from fedstream.trainer.service import Trainer, TrainerSettings
from fedstream.trainer.solvers import Sgd, Trained, Work
from fedstream.trainer.task import Task
from fedstream.trainer.vector import layout_of
from tests.support import Hand, Proxy, context, running, wait_until


class Adds(Task):
    """Training adds one to every parameter, once the gate is open."""

    def __init__(self, size: int = 3) -> None:
        self.size, self.seen = size, 0
        self.gate = threading.Event()
        self.gate.set()

    def model(self) -> nn.Module:
        return nn.Linear(self.size, 1)

    def device_data(self, _device: int) -> Dataset[Any]:
        return TensorDataset(torch.zeros(1))

    def train(self, model: nn.Module, _data: Dataset[Any], _work: Work) -> Trained:
        self.seen += 1
        assert self.gate.wait(60)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        return Trained(steps=1, samples=1, loss=0.5)


@pytest.fixture
def task() -> Adds:
    return Adds()


def trainer(hand: Hand, redis: RedisSettings, task: Adds) -> Trainer:
    hand.layout = layout_of(task.model())
    return Trainer(
        TrainerSettings(), Sgd(lr=0.1), DeviceSettings(), LeaseSettings(seconds=60),
        keys=hand.keys, redis=redis, name="t1", load=lambda: task,
    )  # fmt: skip


async def test_an_update_is_not_written_again_though_its_answer_is_said_again(
    hand: Hand, redis: RedisSettings, task: Adds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply was lost: the trainer can't know that it was heard, and the update taken away."""
    admitted: list[tuple[str, str]] = []
    async with Proxy(redis) as proxy:

        async def admits(stop: asyncio.Event, seconds: float) -> bool:
            """Before the trainer tries again, a coordinator hears what it said."""
            if proxy.cut_replies and not admitted:
                heard = [(one, decode(one.data, Upload, Presence)) for one in await hand.heard()]
                [(entry, said)] = [(one, said) for one, said in heard if isinstance(said, Upload)]
                admitted.append(await hand.ledger.admit(entry, said, size_limit=1 << 20))
            return await pause(stop, seconds)

        monkeypatch.setattr("fedstream.trainer.service.pause", admits)
        own = trainer(hand, proxy.settings, task)
        await hand.create()
        async with running(own, context()):
            await hand.open()
            task.gate.clear()
            await hand.dispatch()
            await wait_until(lambda: task.seen)
            proxy.cut_reply_to = lambda data: b"raised" not in data and b"base" in data
            task.gate.set()
            await wait_until(lambda: admitted)
            await hand.open()  # the first answer has been said again when it is at the second
            await hand.dispatch()
            await wait_until(lambda: task.seen == 2)
    assert admitted == [("admitted", "")]
    [(_, upload)] = await hand.queue()
    assert isinstance(upload, Upload)
    assert not await hand.client.call("EXISTS", hand.keys.update(upload.blob))


async def test_from_a_model_that_was_read_in_part_nobody_trains(
    hand: Hand, redis: RedisSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was read over the one before, which is no more, though a version has its bits again."""
    task, read, missing = Adds(size=300_000), blobs.read, []

    async def noted(client: Client, key: str, into: Model, **about: Any) -> None:
        try:
            await read(client, key, into, **about)
        except BlobMissing:
            missing.append(key)
            raise

    monkeypatch.setattr("fedstream.trainer.service.blobs.read", noted)
    own = trainer(hand, redis, task)
    await hand.create()
    async with running(own, context()):
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: answered(hand, 1))
        half = await hand.publish(1, 5.0)
        assert await hand.client.call("HDEL", hand.keys.model(half.blob), 1)
        assert await hand.commit(1, write=False, version=half) == "done"
        await hand.open()
        await hand.dispatch()
        await wait_until(lambda: missing)
        again = await hand.publish(2, 0.0)
        assert await hand.commit(2, write=False, version=again) == "done"
        _, upload = await wait_until(lambda: answered(hand, 2))
    trained = Model(hand.layout)
    await read(
        hand.client,
        hand.keys.update(upload.blob),
        trained,
        digest=upload.digest,
        chunks=upload.chunks,
    )
    assert (upload.tau, set(trained.floats.tolist())) == (2, {1.0})


async def answered(hand: Hand, n: int) -> list[Upload]:
    """The updates that were said, once there are so many."""
    found = await hand.words(Upload)
    return found if len(found) == n else []
