"""The scheduler: triggers training tasks, and thereby controls staleness and the updater's load.

It holds no state that matters: whatever it needs it reads, whenever an event says that something
changed; `plan` decides; one script opens the tasks. One scheduler leads, by lease.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from aiohttp import web
from prometheus_client import Counter, Gauge
from pydantic import Field

from broker.client import Client, RedisSettings
from broker.errors import NoRun
from broker.keys import Keys
from broker.lease import Lease
from broker.ledger import Ledger, View
from broker.messages import CloseRound
from broker.streams import BLOCK_MS, Reader
from coordinator.scheduling import HoldBack, Policy, Situation, plan
from runtime.backoff import pause
from runtime.config import Section
from runtime.leading import lead
from runtime.service import Context, repeat
from runtime.steps import FixedSteps, Steps

_MEMORY_SHARE = 0.8  # of Redis's own limit, where no budget is given


class SchedulerSettings(Section):
    """When tasks are triggered, how long they are, and what holds them back."""

    policy: Policy | None = None  # None: the one that suits the strategy
    steps: Steps = FixedSteps()
    max_queue: Annotated[int, Field(ge=1)] = 64  # entries
    target_staleness: Annotated[float, Field(gt=0)] | None = None  # mean, in versions
    memory_budget: Annotated[int, Field(gt=0)] | None = None  # bytes; None: 0.8 of maxmemory
    lease_s: Annotated[float, Field(gt=0)] = 5.0
    drain_s: Annotated[float, Field(gt=0)] = 10.0


class Scheduler:
    """The service."""

    role = "scheduler"

    def __init__(
        self,
        settings: SchedulerSettings,
        policy: Policy,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        seed: int,
    ) -> None:
        self._settings = settings
        self._policy = policy
        self._seed = seed
        self._keys = keys
        self._client = Client(redis, name)
        self._ledger = Ledger(self._client, keys, name)
        self._lease = Lease(self._client, keys, self.role, name, seconds=settings.lease_s)
        # Versions too: the end of a round may make one that ends no task.
        self._news = Reader(self._client, {keys.events: "0", keys.models: "0"})
        self._budget = settings.memory_budget
        self._last = 0.0
        self._round = (-1, 0.0)  # version, since when
        self._asked: tuple[int, tuple[str, ...]] = (-1, ())  # to close
        self._held = ""
        self._wake_at: float | None = None
        self._wait_ms = 0  # for news, before the next look

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """None of its own."""
        return ()

    async def run(self, context: Context) -> None:
        """Leads, and triggers until stop."""
        self._context = context
        self._triggered = Counter(
            "fedstream_tasks_triggered", "Tasks opened.", registry=context.registry
        )
        self._open = Gauge("fedstream_tasks_open", "Tasks open.", registry=context.registry)
        self._limit = Gauge(
            "fedstream_tasks_limit", "Tasks that may be open now.", registry=context.registry
        )
        try:
            await lead(context, self._lease, self._work)
        finally:
            await self._client.close()

    async def _work(self) -> None:
        self._last = time.time()
        await repeat(self._context, "schedule", self._step)

    async def _step(self) -> None:
        """Waits for news, or for the time it has to look again; then looks, decides, triggers.

        What happens between a look and the next wait ends that wait at once.
        """
        wait_ms, self._wait_ms = self._wait_ms, 0
        try:
            if wait_ms:
                view = await self._ledger.look_after(self._news, block_ms=wait_ms)
            else:
                view = await self._ledger.look()
        except NoRun:
            await pause(self._context.stop, 0.2)
            return
        self._open.set(len(view.open))
        if view.run.state == "finished":
            await pause(self._context.stop, 0.5)
            return
        if self._budget is None:
            self._budget = await self._redis_budget()
        if await self._decide(view):
            self._wait_ms = BLOCK_MS
            if self._wake_at is not None:
                due_ms = int((self._wake_at - time.time()) * 1000)
                self._wait_ms = min(BLOCK_MS, max(1, due_ms))

    async def _decide(self, view: View) -> bool:
        """Does what the plan says; False if it has to be made anew, on another view."""
        seen = self._situation(view)
        todo = plan(self._policy, self._settings.steps, self._hold, self._seed, seen)
        self._wake_at = todo.wake_at
        self._limit.set(todo.limit)
        if todo.held != self._held:
            self._held = todo.held
            self._context.log.info("held back" if todo.held else "not held back", by=todo.held)
        if todo.close is not None:
            await self._close(*todo.close)
        if todo.triggers:
            opened = await self._ledger.trigger(
                self._lease.token, todo.limit, view.issued, todo.triggers
            )
            self._triggered.inc(opened)
            if opened:
                self._last = time.time()
            else:
                await pause(self._context.stop, 0.02)  # others were quicker, or the lease is lost
            return opened == len(todo.triggers)
        return True

    @property
    def _hold(self) -> HoldBack:
        return HoldBack(
            max_queue=self._settings.max_queue,
            target_staleness=self._settings.target_staleness,
            memory_budget=self._budget or None,
        )

    async def _close(self, version: int, tasks: tuple[str, ...]) -> None:
        """Asks the coordinator to end a round, once; a round without arrivals begins anew."""
        if (version, tasks) != self._asked:
            await self._ledger.ask(CloseRound(version=version, tasks=tasks, why="round over"))
            self._asked = (version, tasks)
        if version == self._round[0]:
            self._round = (version, time.time())

    def _situation(self, view: View) -> Situation:
        now = time.time()
        version, buffered = view.head.version, view.head.buffered
        begun = buffered or any(trigger.version == version for trigger in view.open)
        if self._round[0] != version or not begun:
            self._round = (version, now)
        return Situation(
            now=now,
            issued=view.issued,
            version=version,
            open=view.open,
            queue=view.queue,
            kept=view.kept,
            buffered=buffered,
            # Of what is in the queue, the rest is the ends of rounds.
            round_ending=self._asked[0] == version and view.queue > view.admitted + buffered,
            mean_staleness=view.head.mean_staleness,
            trainers=view.trainers,
            model_bytes=view.run.layout.nbytes,
            devices=view.owned or tuple(range(view.run.devices)),
            last=self._last,
            round_since=self._round[1],
        )

    async def _redis_budget(self) -> int:
        """Bytes that the run may take in Redis; 0: no limit is known."""
        info = await self._client.call("INFO", "memory")
        found = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
        return int(int(found.get(b"maxmemory", 0)) * _MEMORY_SHARE)
