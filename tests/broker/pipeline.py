"""A small run that is whole: every service in this process, each with the Redis it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.core.errors import Unavailable
from fedstream.core.records import View
from fedstream.runtime.config import load
from fedstream.runtime.service import Context
from fedstream.settings import services
from fedstream.settings.config import Settings
from fedstream.trainer.task import Task
from tests.support import EveryRole, context, running, wait_until

ROLES = ("updater", "coordinator", "scheduler", "evaluator")


class Lines(Task):
    """Six devices, two classes, and a gate in which a step can be held."""

    devices = 6
    gate = threading.Event()
    held = threading.Event()

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def device_data(self, device: int) -> Dataset[Any]:
        draw = torch.Generator().manual_seed(device)
        y = torch.arange(40) % 2
        return TensorDataset(torch.randn(40, 3, generator=draw) + 2 * y[:, None], y)

    def test_data(self) -> Dataset[Any]:
        return self.device_data(0)

    def device_test_data(self, device: int) -> Dataset[Any]:
        return self.device_data(device)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if not self.gate.is_set():
            self.held.set()
            assert self.gate.wait(60)
        return super().loss(model, batch)


lines = Lines()


class Wide(Lines):
    """A model of 256 KiB: beside it, what else Redis has of a run is little."""

    def model(self) -> nn.Module:
        return nn.Linear(3, 1 << 14)


wide = Wide()


class Pipeline:
    """The services by name. ``redis`` says what a role is told."""

    def __init__(
        self,
        keys: Keys,
        redis: Callable[[str], RedisSettings],
        folder: Path,
        stack: AsyncExitStack,
        *sets: str,
    ) -> None:
        self.keys = keys
        self._redis = redis
        self._stack = stack
        self.sets = [
            f"run.name={keys.name}",
            f"journal.dir={folder / 'journal'}",
            "task.name=tests.broker.pipeline:lines",
            "scheduler.steps.n=2",
            "lease.seconds=2.0",
            *sets,
        ]
        self._running: dict[str, tuple[Context, asyncio.Task[None]]] = {}

    async def start(self, role: str, name: str = "", *sets: str, user: str = "") -> None:
        """Starts a service in the role, as the user of that name if it is another."""
        settings = load(Settings, path=None, environ={}, sets=[*self.sets, *sets])
        settings = settings.model_copy(update={"redis": self._redis(user or role)})
        service, _ = services._BUILDERS[role](settings, self.keys, name or role)
        live = context()
        task = await self._stack.enter_async_context(running(service, live))
        self._running[name or role] = live, task

    def retries(self, name: str) -> float:
        """Steps of a service that had to be tried again."""
        registry = self._running[name][0].registry
        found = (sample for metric in registry.collect() for sample in metric.samples)
        return sum(one.value for one in found if one.name == "fedstream_retries_total")

    def waiting(self) -> list[str]:
        """Services that are not ready."""
        return [name for name, (live, _) in self._running.items() if live.health.not_ready()]

    def ended(self) -> list[str]:
        """Services that should be there and are not."""
        return [name for name, (_, task) in self._running.items() if task.done()]

    async def stop(self, name: str) -> None:
        """As SIGTERM would: it must end in time, and cleanly."""
        live, task = self._running.pop(name)
        live.stop.set()
        await asyncio.wait_for(asyncio.shield(task), 60)

    async def stop_all(self) -> None:
        """All that run."""
        for name in list(self._running):
            await self.stop(name)


@asynccontextmanager
async def pipeline(
    keys: Keys, redis: Callable[[str], RedisSettings], folder: Path, *sets: str
) -> AsyncIterator[Pipeline]:
    """Coordinator, scheduler, updater and evaluator; trainers are for the test to start."""
    lines.gate.set()
    lines.held.clear()
    async with AsyncExitStack() as stack:
        made = Pipeline(keys, redis, folder, stack, *sets)
        for role in ROLES:
            await made.start(role)
        yield made
        await made.stop_all()


async def reached(client: Client, keys: Keys, version: int) -> None:
    """Waits for a version."""
    ledger = EveryRole(client, keys, "test")

    async def there() -> bool:
        head = await ledger.head()
        return head is not None and head.version >= version

    await wait_until(there, what=f"version {version}")


async def finished(client: Client, keys: Keys, within_s: float = 60.0) -> View:
    """Waits for the run's end, at which the counts add up."""
    ledger = EveryRole(client, keys, "test")

    async def over() -> View | None:
        if not await client.call("EXISTS", keys.run):
            return None
        view = await ledger.look()
        return view if view.run.state == "finished" else None

    view: View = await wait_until(over, within_s, "the run's end")
    assert view.issued == sum(view.outcomes.values()) + len(view.open), view.counts
    return view


async def another_master(client: Client) -> None:
    """Waits until the client has found the one that took over."""

    async def again() -> bool:
        try:
            return bool(await client.call("PING") == b"PONG")
        except Unavailable:
            return False

    await wait_until(again, what="another master")
