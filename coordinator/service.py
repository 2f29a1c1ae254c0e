"""The coordinator: the front door, the queue's keeper, and the boundary of rights.

Triggers become tasks; answers are admitted to the queue by their metadata; trainers that fell
silent are struck off; a task that crashes its trainers goes to `dead`. All state is in Redis and
every change is one script, so any number of replicas share the work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Annotated, Any

from aiohttp import web
from prometheus_client import Counter
from pydantic import Field

from broker.client import Client, RedisSettings
from broker.errors import BadMessage, BrokerError, FedstreamError, NoRun, NoScript
from broker.keys import COORDINATORS, TRAINERS, Keys
from broker.ledger import Decision, Ledger
from broker.messages import CloseRound, Dead, GiveUp, Task, Trigger, Upload, Withdraw, decode
from broker.streams import BLOCK_MS, Entry, Group, given, lost, reading
from coordinator.app import App
from coordinator.metrics import RunMetrics, Seen
from runtime.backoff import pause
from runtime.config import Section
from runtime.service import Context, repeat
from runtime.tasks import LeaseSettings

_SWEEP_S = 1.0
_SWEPT_WITHIN_S = 120.0  # a dozen exchanges: a Redis that is slow must not get us restarted
_DEAF_S = 3.0  # without a sweep: meanwhile trainers may not have been heard

Given = tuple[Group, Entry]


class CoordinatorSettings(Section):
    """What is admitted, and when something or somebody counts as lost."""

    max_update_bytes: Annotated[int, Field(gt=0)] = 4 << 30
    open_limit: Annotated[int, Field(ge=1)] = 10_000  # tasks that devices may open by themselves
    device_rate: Annotated[int, Field(ge=1)] = 100  # triggers a second and trainer, anarchic
    trainer_silence_s: Annotated[float, Field(gt=0)] = 10.0  # then it is struck off
    redeliver_s: Annotated[float, Field(gt=0)] = 15.0  # entries of a coordinator that crashed
    downloads: Annotated[int, Field(ge=1)] = 16  # of models over HTTP, at a time
    drain_s: Annotated[float, Field(gt=0)] = 15.0  # beyond redis.timeout_s


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
        self._app = App(self._client, self._ledger, keys, settings.downloads)
        self._triggers = Group(self._client, keys.triggers, COORDINATORS, name)
        self._uploads = Group(self._client, keys.uploads, COORDINATORS, name)
        self._groups = (self._triggers, self._uploads)
        # Groups in which we may hold entries that we don't know of, and why: a crash before this
        # start counts as a delivery, trouble with Redis since then does not.
        self._unsure = dict.fromkeys(self._groups, "crash")
        self._read: list[Given] = []  # and not decided on yet
        self._swept = 0.0  # the last time
        self._hears_since = 0.0

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
        self._lost = Counter(
            "fedstream_trainers_lost", "Trainers struck off because they were silent.",
            registry=context.registry,
        )  # fmt: skip
        self._run_metrics = RunMetrics(context.registry)
        context.watch(self._client)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(repeat(context, "entries", self._step))
                group.create_task(repeat(context, "sweep", self._sweep, within_s=_SWEPT_WITHIN_S))
        finally:
            await self._client.close()

    async def _step(self) -> None:
        """Decides on what was read last and reads on, or finds out what was given to us before."""
        if self._unsure:
            await self._recover()
            return
        with self._unless_lost(*self._groups):
            read, self._read = self._read, []
            self._read = await self._decided(read)
            if self._context.stop.is_set():
                await self._one_by_one(self._read)

    async def _recover(self) -> None:
        """Handles what was given to us and never done.

        After a crash one entry at a time is claimed: if it crashes us again, it takes no other
        with it.
        """
        await self._ledger.prepare()
        for group, why in tuple(self._unsure.items()):
            del self._unsure[group]
            with self._unless_lost(group):
                await group.ensure()
                entries, poison = await group.claim(
                    idle_ms=0, most=self._lease.attempts, own=True, quiet=why == "trouble",
                    count=1 if why == "crash" else 64,
                )  # fmt: skip
                await self._bury_all(group, poison)
                await self._one_by_one([(group, entry) for entry in entries])
            if entries:
                self._unsure[group] = why  # there may be more

    @contextmanager
    def _unless_lost(self, *groups: Group) -> Iterator[None]:
        """Where entries are given to us: after trouble we may hold some that we don't know of."""
        try:
            yield
        except FedstreamError:
            self._unsure |= dict.fromkeys(groups, "trouble")
            raise

    async def _decided(self, read: list[Given]) -> list[Given]:
        """Decides on entries and reads on, in one exchange: what was read.

        Redis makes the decisions before it waits for more; what came of them is told when the wait
        is over.
        """
        decisions = await self._decisions(read)
        try:
            *replies, news = await self._client.pipeline(
                [
                    *(decision.command for decision, _ in decisions),
                    reading(self._groups, count=64, block_ms=BLOCK_MS),
                ],
                wait_s=BLOCK_MS / 1000,
            )
        except BrokerError as error:
            if not isinstance(error, NoScript) and not lost(error):
                raise
            self._unsure |= dict.fromkeys(self._groups, "trouble")
            return []
        for (decision, tell), reply in zip(decisions, replies, strict=True):
            tell(decision.parsed(reply))
        return given(self._groups, news)

    async def _one_by_one(self, read: list[Given]) -> None:
        for each in read:
            for decision, tell in await self._decisions([each]):
                tell(await decision)

    async def _decisions(
        self, read: list[Given]
    ) -> list[tuple[Decision[Any], Callable[[Any], None]]]:
        """What to do about entries, and how to tell what came of it; junk goes to ``dead``."""
        decisions: list[tuple[Decision[Any], Callable[[Any], None]]] = []
        for group, entry in read:
            try:
                if group is self._triggers:
                    decisions.append(self._on_trigger(entry))
                    continue
                answer = decode(entry.data, Upload, GiveUp, Dead)
                if isinstance(answer, Dead):
                    await self._bury(group, entry, answer.reason, answer.deliveries, answer)
                elif isinstance(answer, Upload | GiveUp):
                    decision = self._ledger.admit(
                        entry, answer, size_limit=self._settings.max_update_bytes
                    )
                    tell = partial(self._tell_answered, answer, time.time())
                    decisions.append((decision, tell))
            except BadMessage as error:
                await self._bury(group, entry, str(error))
        return decisions

    def _on_trigger(self, entry: Entry) -> tuple[Decision[Any], Callable[[Any], None]]:
        """A trigger becomes a task, a round is closed, or overdue tasks are given up."""
        message = decode(entry.data, Trigger, CloseRound, Withdraw)
        tell = partial(self._tell_dispatched, message, time.time())
        if isinstance(message, Withdraw):
            return self._ledger.withdraw(entry, message), tell
        if isinstance(message, CloseRound):
            return self._ledger.close_round(entry, message), tell
        decision = self._ledger.dispatch(
            entry, message, rate=self._settings.device_rate, limit=self._settings.open_limit
        )
        return decision, tell

    def _tell_dispatched(
        self, message: Trigger | CloseRound | Withdraw, at: float, verdict: str
    ) -> None:
        """``at``: when it was decided, in seconds since 1970; a wait came between."""
        self._dispatched.labels(verdict).inc()
        if isinstance(message, Trigger):
            what = "dispatched" if verdict == "sent" else "not dispatched"
            self._context.trace(
                what, at=at, task=message.task, device=message.device, verdict=verdict
            )

    def _tell_answered(self, answer: Upload | GiveUp, at: float, decided: tuple[str, str]) -> None:
        verdict, reason = decided
        self._answers.labels(verdict, reason).inc()
        if verdict in ("admitted", "given_up"):
            self._context.trace(
                verdict.replace("_", " "), at=at, task=answer.task, device=answer.device,
                trainer=answer.trainer, **({"reason": reason} if reason else {}),
            )  # fmt: skip
        if verdict in ("refused", "stray"):
            self._context.log.warning(
                "answer not admitted", task=answer.task, device=answer.device,
                trainer=answer.trainer, verdict=verdict, reason=reason,
            )  # fmt: skip

    async def _bury_all(self, group: Group, poison: list[tuple[Entry, int]]) -> None:
        for entry, deliveries in poison:
            await self._bury(group, entry, f"crashed its {group.group}", deliveries)

    async def _bury(
        self,
        group: Group,
        entry: Entry,
        reason: str,
        deliveries: int = 1,
        found: Dead | None = None,
    ) -> None:
        """Moves an entry to ``dead``; the task that it is about ends, if it says which.

        ``found``: what a trainer could not read, and says so by this entry.
        """
        task: Task | Trigger | Upload | GiveUp | None = None
        for kind in (Task, Trigger, Upload, GiveUp):
            with suppress(BadMessage):
                task = kind.decode(found.data if found else entry.data)
        self._context.log.error(
            "dead letter", stream=found.stream if found else group.stream, entry=entry.id,
            reason=reason, task=task and task.task, deliveries=deliveries,
        )  # fmt: skip
        await self._ledger.bury(
            group.stream, group.group, entry, reason, task=task, deliveries=deliveries, found=found
        )

    async def _sweep(self) -> None:
        """What nobody does who is alive: for silent trainers, poison, crashed coordinators."""
        await self._strike_off_the_silent()
        lease_ms = round(self._lease.seconds * 1000)
        if owners := set((await self._ledger.owners()).values()):
            await self._ledger.settle_unserved(lease_ms)
        for stream in (self._keys.tasks, *(self._keys.tasks_of(owner) for owner in owners)):
            tasks = Group(self._client, stream, TRAINERS, "")
            _, poison = await tasks.claim(idle_ms=lease_ms, most=self._lease.attempts)
            await self._bury_all(tasks, poison)
        for group in self._groups:
            if group in self._unsure:
                continue  # what is ours comes first: it must not meet what is claimed here
            with self._unless_lost(group):
                entries, poison = await group.claim(
                    idle_ms=round(self._settings.redeliver_s * 1000), most=self._lease.attempts
                )
                await self._bury_all(group, poison)
                await self._one_by_one([(group, entry) for entry in entries])
        pool = Group(self._client, self._keys.tasks, TRAINERS, "")
        for group in (*self._groups, pool):
            await group.reap(idle_ms=round(self._settings.trainer_silence_s * 1000))
        self._run_metrics.saw(await self._seen(lease_ms))
        self._swept = time.time()
        await pause(self._context.stop, _SWEEP_S)

    async def _seen(self, lease_ms: int) -> Seen:
        """The run as it is, for whoever scrapes."""
        memory, limit = await self._ledger.memory()
        try:
            view = await self._ledger.look()
        except NoRun:  # there will be one when the updater is there
            return Seen(time.time(), memory, limit)
        event_ms = view.told[self._keys.events].partition("-")[0]
        training = await self._ledger.training(lease_ms)
        return Seen(time.time(), memory, limit, view, training, int(event_ms) / 1000)

    async def _strike_off_the_silent(self) -> None:
        """Strikes off trainers that said good-bye, or were silent while they could be heard."""
        for name in await self._ledger.left():
            await self._ledger.leave(name, silent_s=self._settings.trainer_silence_s)
        now, silence_s = time.time(), self._settings.trainer_silence_s
        if now - self._swept > _DEAF_S:  # by the clock of the wall: a machine may have slept
            self._hears_since = now
        if now - self._hears_since < silence_s:
            return
        for name in await self._ledger.silent(silence_s):
            given_up = await self._ledger.leave(name, silent_s=silence_s)
            if given_up is not None:
                self._lost.inc()
                shown = name.decode(errors="replace")
                self._context.log.warning("trainer lost", trainer=shown, tasks_given_up=given_up)
