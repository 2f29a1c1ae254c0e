"""A user's training that does not come back, whatever it is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.core.messages import Withdraw
from fedstream.runtime.task_settings import LeaseSettings
from fedstream.trainer.failures import Guard
from fedstream.trainer.settings import TrainerSettings
from fedstream.trainer.solvers import Trained, Work
from fedstream.trainer.task import Task
from tests.support import Hand, context, counted, running, wait_until
from tests.trainer.adding import Make


class Hangs(Task):
    """Training waits for the gate, and asks nobody whether it is to stop."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()

    def model(self) -> nn.Module:
        return nn.Linear(2, 2)

    def device_data(self, _device: int) -> Dataset[Any]:
        return TensorDataset(torch.zeros(1, 2), torch.zeros(1))

    def train(self, _model: nn.Module, _data: Dataset[Any], _work: Work) -> Trained:
        self.begun.set()
        self.gate.wait()
        return Trained(steps=1, samples=1, loss=0.5)


@pytest.fixture
def task() -> Iterator[Hangs]:
    task = Hangs()
    yield task
    task.gate.set()  # no thread is left in it


async def test_hanging_training_is_reported_and_ends_the_trainer(
    hand: Hand, make: Make, task: Hangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstream.trainer.failures._HANGING_S", 0.01)
    trainer = make(settings=TrainerSettings(drain_s=0.1), lease=LeaseSettings(seconds=0.2))
    await hand.create()
    live = context()
    async with running(trainer, live) as service:
        [trigger] = await hand.open()
        await asyncio.to_thread(task.begun.wait)
        assert not live.stop.is_set()
        await hand.ledger.ask(Withdraw(tasks=(trigger.task,), why="timed out"))
        assert await hand.dispatch() == ["withdrawn"]
        await asyncio.wait_for(live.stop.wait(), 60)
        assert not service.done(), "it waits for its thread, and is ended by the runtime"
        task.gate.set()
        await wait_until(service.done)
    assert counted(live, "fedstream_trainer_tasks_total", end="lease lost") == 1
    assert (await hand.ledger.look()).reasons("given_up") == {"timed out": 1}
    await hand.balanced()


async def test_slow_training_is_not_taken_for_hanging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstream.trainer.failures._HANGING_S", 0.001)
    training: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    told = iter([False, True, False, False, True])  # told, taken back, told again

    def cancelled() -> bool:
        try:
            return next(told)
        except StopIteration:
            if not training.done():
                training.set_result(None)
            return True

    hanging = asyncio.Event()
    with Guard(cancelled, hanging.set, patience_s=3600.0):
        await training
    with Guard(lambda: True, hanging.set, patience_s=0.01):
        await asyncio.sleep(0)  # comes back before anybody looks
    assert not hanging.is_set()
    times: list[float] = []
    with Guard(lambda: True, lambda: times.append(time.monotonic()), patience_s=0.02):
        began = time.monotonic()
        await wait_until(lambda: times)
        await asyncio.sleep(0.02)
    assert [at - began >= 0.02 for at in times] == [True]


@pytest.mark.process
def test_process_with_a_hanging_thread_exits() -> None:
    """As the runtime ends it: at a normal exit Python would wait for the thread."""
    program = """
import asyncio, sys, threading
from concurrent.futures import ThreadPoolExecutor
from fedstream.runtime.http import HttpSettings
from fedstream.runtime.logging import LogSettings
from fedstream.runtime.service import serve

class Stuck:
    role = "trainer"
    def routes(self):
        return ()
    async def run(self, context):
        hangs = asyncio.get_running_loop().run_in_executor(
            ThreadPoolExecutor(1), threading.Event().wait
        )
        context.stop.set()
        await hangs

sys.exit(serve(
    Stuck(), http=HttpSettings(port=0), log=LogSettings(), run="r", name="t", drain_s=0.2
))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, capture_output=True, check=False
    )
    assert done.returncode == 1
    assert b"the drain took too long" in done.stderr
