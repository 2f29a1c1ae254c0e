"""The coordinator: the front door, the queue's keeper, and the boundary of rights.

Triggers become tasks; answers are admitted to the queue by their metadata; trainers that fell
silent are struck off; a task that crashes its trainers goes to `dead`. All state is in Redis and
every change is one script, so any number of replicas share the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Annotated

from aiohttp import web
from prometheus_client import Counter, Gauge
from pydantic import Field

from broker.client import Client, RedisSettings
from broker.errors import BadMessage, NoRun
from broker.keys import COORDINATORS, TRAINERS, Keys
from broker.ledger import Ledger
from broker.messages import CloseRound, GiveUp, Task, Trigger, Upload, decode
from broker.streams import Entry, Group
from coordinator.app import App
from runtime.backoff import pause
from runtime.config import Section
from runtime.service import Context, repeat
from runtime.tasks import LeaseSettings

_SWEEP_S = 1.0


class CoordinatorSettings(Section):
    """What is admitted, and when something or somebody counts as lost."""

    max_update_bytes: Annotated[int, Field(gt=0)] = 4 << 30
    open_limit: Annotated[int, Field(ge=1)] = 10_000  # tasks that devices may open by themselves
    device_rate: Annotated[int, Field(ge=1)] = 100  # triggers a second and trainer, anarchic
    trainer_silence_s: Annotated[float, Field(gt=0)] = 10.0  # then it is struck off
    redeliver_s: Annotated[float, Field(gt=0)] = 15.0  # entries of a coordinator that crashed
    drain_s: Annotated[float, Field(gt=0)] = 10.0


class Coordinator:
    """The service. Replicas differ in ``name`` alone."""

    role = "coordinator"

    def __init__(
        self,
        settings: CoordinatorSettings,
        lease: LeaseSettings,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
    ) -> None:
        self._settings = settings
        self._lease = lease
        self._keys = keys
        self._client = Client(redis, name)
        self._ledger = Ledger(self._client, keys, name)
        self._app = App(self._client, self._ledger, keys)
        self._triggers = Group(self._client, keys.triggers, COORDINATORS, name)
        self._uploads = Group(self._client, keys.uploads, COORDINATORS, name)
        # Groups in which we may hold entries that we don't know of, and why: a crash before this
        # start counts as a delivery, trouble with Redis since then does not.
        self._unsure = {self._triggers: "crash", self._uploads: "crash"}

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """Status and models, over HTTP."""
        return self._app.routes()

    async def run(self, context: Context) -> None:
        """Works until stop."""
        self._context = context
        self._answers = Counter(
            "fedstream_answers", "Answers of trainers by verdict.", ["verdict", "reason"],
            registry=context.registry,
        )  # fmt: skip
        self._dispatched = Counter(
            "fedstream_tasks_dispatched", "Triggers by what became of them.", ["verdict"],
            registry=context.registry,
        )  # fmt: skip
        self._alive = Gauge(
            "fedstream_trainers_alive", "Trainers on the register.", registry=context.registry
        )
        self._queue = Gauge("fedstream_queue", "Entries of the queue.", registry=context.registry)
        try:
            async with asyncio.TaskGroup() as group:
                for name, stream, handle in (
                    ("triggers", self._triggers, self._trigger),
                    ("uploads", self._uploads, self._answer),
                ):
                    group.create_task(repeat(context, name, self._serving(stream, handle)))
                group.create_task(repeat(context, "sweep", self._sweep))
        finally:
            await self._client.close()

    def _serving(
        self, group: Group, handle: Callable[[Entry], Awaitable[None]]
    ) -> Callable[[], Awaitable[None]]:
        """A step: entries that are new, or that were given to us and never done, one by one."""

        async def step() -> None:
            why = self._unsure.get(group)
            self._unsure[group] = "trouble"  # unless this step comes to its end
            if why is None:
                entries = await group.read(count=64)
            else:
                await group.ensure()
                entries, poison = await group.claim(
                    idle_ms=0, most=self._lease.attempts, own=True, quiet=why == "trouble", count=64
                )
                await self._bury_all(group, poison)
            for entry in entries:
                await self._handled(group, entry, handle)
            if why is None or not entries:
                del self._unsure[group]

        return step

    async def _handled(
        self, group: Group, entry: Entry, handle: Callable[[Entry], Awaitable[None]]
    ) -> None:
        try:
            await handle(entry)
        except BadMessage as error:
            await self._bury(group, entry, str(error))

    async def _bury_all(self, group: Group, poison: list[tuple[Entry, int]]) -> None:
        for entry, deliveries in poison:
            await self._bury(group, entry, "crashed its coordinators", deliveries)

    async def _bury(self, group: Group, entry: Entry, reason: str, deliveries: int = 1) -> None:
        """Moves an entry to ``dead``; the task that it is about ends, if it says which."""
        task: Task | Trigger | Upload | GiveUp | None = None
        for kind in (Task, Trigger, Upload, GiveUp):
            with suppress(BadMessage):
                task = kind.decode(entry.data)
        self._context.log.error(
            "dead letter", stream=group.stream, entry=entry.id, reason=reason,
            task=task and task.task, deliveries=deliveries,
        )  # fmt: skip
        await self._ledger.bury(
            group.stream, group.group, entry, reason, task=task, deliveries=deliveries
        )

    async def _trigger(self, entry: Entry) -> None:
        """A trigger becomes a task, or a round is closed."""
        message = decode(entry.data, Trigger, CloseRound)
        if isinstance(message, CloseRound):
            verdict = await self._ledger.close_round(entry, message)
        else:
            verdict = await self._ledger.dispatch(
                entry, message, rate=self._settings.device_rate, limit=self._settings.open_limit
            )
        self._dispatched.labels(verdict).inc()

    async def _answer(self, entry: Entry) -> None:
        """A trainer's answer is admitted, or not."""
        message = decode(entry.data, Upload, GiveUp)
        verdict, reason = await self._ledger.admit(
            entry, message, size_limit=self._settings.max_update_bytes
        )
        self._answers.labels(verdict, reason).inc()
        if verdict in ("refused", "stray"):
            self._context.log.warning(
                "answer not admitted", task=message.task, device=message.device,
                trainer=message.trainer, verdict=verdict, reason=reason,
            )  # fmt: skip

    async def _sweep(self) -> None:
        """What nobody does who is alive: for silent trainers, poison, crashed coordinators."""
        for name in await self._ledger.silent(self._settings.trainer_silence_s):
            await self._strike_off(name)
        owners = set((await self._ledger.owners()).values())
        for stream in (self._keys.tasks, *(self._keys.tasks_of(owner) for owner in owners)):
            await self._bury_poison(Group(self._client, stream, TRAINERS, ""))
        for group, handle in (
            (self._triggers, self._trigger), (self._uploads, self._answer)
        ):  # fmt: skip
            entries, poison = await group.claim(
                idle_ms=round(self._settings.redeliver_s * 1000), most=self._lease.attempts
            )
            await self._bury_all(group, poison)
            for entry in entries:
                await self._handled(group, entry, handle)
        gone_ms = round(self._settings.trainer_silence_s * 1000)
        for group in (
            self._triggers,
            self._uploads,
            Group(self._client, self._keys.tasks, TRAINERS, ""),
        ):
            await group.reap(idle_ms=gone_ms)
        try:
            view = await self._ledger.look()
        except NoRun:
            pass  # there will be one when the updater is there
        else:
            self._alive.set(view.trainers)
            self._queue.set(view.queue)
        await pause(self._context.stop, _SWEEP_S)

    async def _strike_off(self, name: str) -> None:
        """A trainer that fell silent: if it owned devices, its tasks are given up."""
        given_up = await self._ledger.leave(name, silent_s=self._settings.trainer_silence_s)
        if given_up is not None:
            self._context.log.warning("trainer lost", trainer=name, tasks_given_up=given_up)

    async def _bury_poison(self, group: Group) -> None:
        """Tasks whose lease ran out for the last time."""
        _, poison = await group.claim(
            idle_ms=round(self._lease.seconds * 1000), most=self._lease.attempts
        )
        for entry, deliveries in poison:
            await self._bury(group, entry, "crashed its trainers", deliveries)
