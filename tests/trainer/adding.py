"""A task that adds one to a model of a few numbers, and what is said of it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker.keys import TRAINERS
from fedstream.core.messages import GiveUp, Upload
from fedstream.runtime.backoff import Backoff
from fedstream.trainer.service import Trainer
from fedstream.trainer.solvers import Cancelled, Trained, Work
from fedstream.trainer.task import Task
from tests.support import Hand, wait_until

Make = Callable[..., Trainer]


class Point(nn.Module):
    """A model of four numbers."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))


class Adds(Task):
    """Training adds one to every parameter; the test can hold it up."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.seen: list[tuple[int, int]] = []
        self.controls: list[tuple[object, object]] = []  # the server's and the device's
        self.gate = threading.Event()
        self.gate.set()

    def model(self) -> nn.Module:
        return Point(self.size)

    def device_data(self, device: int) -> Dataset[Any]:
        return TensorDataset(torch.tensor([device]))

    def test_data(self) -> Dataset[Any]:
        return TensorDataset(torch.tensor([0]))

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        return {"accuracy": next(model.parameters())[0].item() / 10}

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        self.seen.append((work.device, work.version))
        self.controls.append((work.control, work.device_control))
        while not self.gate.wait(0.005):
            if work.cancelled():
                raise Cancelled
        if work.device >= 9:
            raise ValueError(f"device {work.device} is broken")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        return Trained(steps=1, samples=1, loss=0.5)


class Cooldowns(Backoff):
    """Rests of the test's choice, which note what they are told."""

    def __init__(self, seconds: float) -> None:
        super().__init__(rng=random.Random())
        self.seconds = seconds
        self.told: list[str] = []

    def next(self) -> float:
        self.told.append("raised")
        return self.seconds

    def reset(self) -> None:
        self.told.append("trained")


async def answers(hand: Hand, count: int = 1) -> list[Upload | GiveUp]:
    """The answers in `uploads`, once there are so many."""

    async def there() -> bool:
        return len(await hand.answered()) >= count

    await wait_until(there, what=f"{count} answers")
    return await hand.answered()


async def pending(hand: Hand) -> int:
    return int((await hand.client.call("XPENDING", hand.keys.tasks, TRAINERS))[0])
