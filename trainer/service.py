"""The trainer: takes a task and the newest model, trains off the event loop, and answers.

In the pool, any replica serves any device's partition; a trainer that owns devices serves only
its own. A trainer renews its lease while a task runs. A trainer that loses the lease stops at the
next batch; a trainer that is told to stop hands the task back. If a trainer dies, the task is
redelivered, and the first answer counts.
"""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web
from structlog.contextvars import bind_contextvars, reset_contextvars

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS, Keys, member
from fedstream.broker.ledger.trainer import Outbox, TrainerLedger
from fedstream.broker.published import with_unshared
from fedstream.broker.streams import Group
from fedstream.core.errors import BadMessage, ConfigError, FedstreamError, NoRun
from fedstream.core.formats import F32
from fedstream.core.layout import Model
from fedstream.core.messages import (
    Assignment,
    Evaluation,
    GiveUp,
    Trigger,
    Upload,
    decode,
    task_id,
)
from fedstream.core.records import Run
from fedstream.private import importing
from fedstream.private.settings import PrivateSettings
from fedstream.runtime.backoff import Backoff, pause
from fedstream.runtime.service import Context, Worker, repeat
from fedstream.runtime.task_settings import LeaseSettings, Participation, ParticipationGroup
from fedstream.trainer import local_values
from fedstream.trainer.attempt import Attempt, AttemptContext, Newest
from fedstream.trainer.devices import DeviceSettings, eligible
from fedstream.trainer.failures import Failures, OutageLimit
from fedstream.trainer.leases import Delivery, Leases
from fedstream.trainer.measuring import Evaluated, measurement
from fedstream.trainer.metrics import TrainerMetrics
from fedstream.trainer.saved_work import Feedback, LocalValues, SavedWork
from fedstream.trainer.settings import InitiativeSettings, TrainerSettings
from fedstream.trainer.solvers import Cancelled, SolverGroup, Solvers, SolverSettings
from fedstream.trainer.task import check_run

if TYPE_CHECKING:
    from fedstream.broker.ledger.trainer import TakenTask
    from fedstream.core.formats import Format
    from fedstream.trainer.learner import Learner
    from fedstream.trainer.sealing import Sealer
    from fedstream.trainer.task import Task


class Initiative:
    """Triggers tasks of an anarchic trainer's devices while the trainer is idle."""

    def __init__(
        self,
        settings: InitiativeSettings,
        groups: Sequence[ParticipationGroup],
        devices: Sequence[int],
        *,
        name: str,
        outbox: Outbox,
        ledger: TrainerLedger,
        context: Context,
        is_idle: Callable[[], bool],
        is_eligible: Callable[[int], bool],
    ) -> None:
        """``name``: of the trainer; ``is_eligible``: whether a device may work now."""
        self._parts = Participation(settings.steps, groups)
        self._devices = devices
        self._rate = settings.rate * self._parts.mean(devices)
        self._name = name
        self._outbox = outbox
        self._ledger = ledger
        self._context = context
        self._is_idle = is_idle
        self._is_eligible = is_eligible
        self._rng = random.Random()

    @property
    def patience_s(self) -> float:
        """Seconds after which a decision counts as hanging: 20 times the mean wait."""
        return 30.0 + 20.0 / self._rate

    async def decide(self) -> None:
        """Wait, then trigger a task for one of the devices if the trainer is still idle."""
        rng, stop = self._rng, self._context.stop
        await pause(stop, rng.expovariate(self._rate))
        if stop.is_set() or not self._is_idle():
            return
        try:
            run = await self._ledger.run()
        except NoRun:
            return  # Redis was emptied; the updater will publish the run again
        if run.state == "finished":
            return
        device = self._devices[self._parts.pick(rng, self._devices)]
        if not self._is_eligible(device):
            return  # an ineligible device triggers nothing
        length = self._parts.length(rng, device)
        await self._outbox.say(
            Trigger(
                task=task_id(time.time_ns() // 1_000_000),
                device=device,
                seed=rng.getrandbits(63),
                steps=length.steps,
                epochs=length.epochs,
                seconds=length.seconds,
                why="own initiative",
                origin=self._name,
            )
        )


_SAID = {"upload": "uploaded", "give_up": "gave up", "lease lost": "lease lost"}
_ASKS_S = 0.05  # between reads of the run's record, as trainers may not read events
_HEARTBEAT_S = 2.0
_GOODBYE_S = 2.0  # time-out of the last message, shorter than the drain
_REST_S = 5.0  # longest rest after a task that was given up


class Trainer:
    """The trainer service. ``load``: creates the task; called once, off the event loop."""

    role = "trainer"

    def __init__(
        self,
        settings: TrainerSettings,
        solver: SolverSettings,
        devices: DeviceSettings,
        lease: LeaseSettings,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        load: Callable[[], Task],
        solvers: Sequence[SolverGroup] = (),
        participation: Sequence[ParticipationGroup] = (),
        wire: Format = F32,
        private: PrivateSettings | None = None,
        rests: Backoff | None = None,
        run_devices: int | None = None,
    ) -> None:
        """``wire``: format of updates. ``private``: None: only for runs that are not private.
        ``rests``: back-off after given-up tasks; None: at most five seconds. ``run_devices``: the
        key ``task.devices``; None: the task decides.
        """
        self._settings = settings
        self._solvers = Solvers(solver, solvers)
        self._devices = devices
        self._lease = lease
        self._keys = keys
        self._name = name
        self._load = load
        self._run_devices = run_devices
        self._participation = participation
        self._wire = wire
        self._private = private or PrivateSettings()
        self._rests = rests or Backoff(0.01, _REST_S, rng=random.Random())
        self._client = Client(redis, name, loads_scripts=False)
        self._ledger = TrainerLedger(self._client, keys, name)
        self._outbox = Outbox(self._client, keys, settings.site)
        stream = keys.tasks_of(member(settings.site, name)) if settings.owns else keys.tasks
        self._group = Group(self._client, stream, TRAINERS, name)
        self._outage_limit = OutageLimit(settings.redis_away_s)
        self._run: Run | None = None
        self._sealer: Sealer | None = None  # of a private run

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The trainer serves no routes."""
        return ()

    async def run(self, context: Context) -> None:
        """Work until stopped; hand back a task in progress at the next batch."""
        metrics = TrainerMetrics(context.registry)
        context.watch(self._client)
        loaded = False
        context.health.ready_when("task loaded", lambda: loaded)
        with Worker("training") as thread:
            learner = await thread.run(self._loaded, context)
            loaded = True
            gc.freeze()  # torch and the task live as long as the process
            self._outage_limit.heard = time.monotonic()
            await self._take_part(context, metrics, learner, thread)

    async def _check_same(self) -> None:
        """Raise ConfigError if the run was purged and begun anew.

        Its unshared values are others then, and so is the lineage to which updates are sealed.
        """
        run = self._run
        if run is None or (run.layout.unshared is None and self._sealer is None):
            return
        with suppress(NoRun):
            if (await self._ledger.run()).lineage != run.lineage:
                raise ConfigError(
                    f"run {self._keys.name!r} was begun anew, and this trainer has joined the "
                    "earlier run: start it again"
                )

    async def _take_part(
        self, context: Context, metrics: TrainerMetrics, learner: Learner, thread: Worker
    ) -> None:
        """Join the run, work until told to stop, and sign off."""
        try:
            await repeat(context, "run", partial(self._join, context, learner))
            if self._run is None or context.stop.is_set():
                return
            shared = self._workshop(context, metrics, learner, thread, self._run)
            await self._work(context, shared)
        finally:
            self._client.hurry(_GOODBYE_S)
            try:
                await self._outbox.goodbye(self._name)
            except FedstreamError as error:
                context.log.warning("could not announce that it is leaving", reason=str(error))
            await self._client.close()

    async def _work(self, context: Context, shared: AttemptContext) -> None:
        """Do the run's tasks until told to stop."""
        shift = self._shift(shared)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(
                    repeat(context, "heartbeat", partial(self._announce, context, shift))
                )
                within_s = max(30.0, self._lease.seconds)
                group.create_task(repeat(context, "tasks", shift.step, within_s=within_s))
                if self._settings.anarchic is not None:
                    initiative = self._initiative(self._settings.anarchic, shared, shift)
                    within_s = initiative.patience_s
                    group.create_task(
                        repeat(context, "initiative", initiative.decide, within_s=within_s)
                    )
            await shift.leases.end()
        finally:
            shift.leases.abandon()

    def _loaded(self, context: Context) -> Learner:
        """Load torch and the task. Runs in the training thread."""
        from fedstream.trainer.learner import Learner

        settings, say = self._settings, context.log.warning
        return Learner(self._load, settings.threads, settings.device, say)

    async def _join(self, context: Context, learner: Learner) -> bool:
        """Join the run; False if it doesn't exist yet.

        Raises LayoutMismatch if the run has another model, ConfigError if it has another number of
        devices, or if solver and strategy don't fit together.
        """
        try:
            with self._outage_limit.requesting():
                run = await self._ledger.run()
        except NoRun:
            await pause(context.stop, _ASKS_S)
            return False
        devices = self._run_devices or learner.task.run_devices
        check_run(run, self._keys.name, learner.layout, devices, self.role)
        if bool(run.layout.controls) != self._solvers.usual.controls:
            raise ConfigError(
                f"solver.kind = {self._solvers.usual.kind!r}: run {self._keys.name!r} was made "
                f"with strategy {run.strategy!r}: scaffold must be both strategy and solver, or "
                "neither"
            )
        if run.sends == "model" and self._wire.of_changes:
            raise ConfigError(
                f"wire.update = {self._wire.name!r}: run {self._keys.name!r} was made with "
                f"strategy {run.strategy!r}, which takes models, and {self._wire.kind} is too "
                "coarse for them: use bf16 or int8"
            )
        self._sealer = await asyncio.to_thread(self._sealer_for, run)
        await self._group.ensure()
        learner.task.joined(run.devices)
        with self._outage_limit.requesting():
            layout = await with_unshared(self._client, self._keys, run.layout)
        self._run = replace(run, layout=layout)
        return True

    def _sealer_for(self, run: Run) -> Sealer | None:
        """The sealer of a private run; None: the run is not private. Raises ConfigError."""
        if not run.policy and self._private.policy is None:
            return None
        with importing("a private run"):
            from fedstream.trainer.sealing import sealer_of
        if not self._wire.is_plain:
            raise ConfigError(
                f"wire.update = {self._wire.name!r} in a private run: masked updates have a format "
                "of their own: leave it out"
            )
        if local_values.layout_of(run.layout) is not None and self._settings.local_dir is None:
            raise ConfigError(
                "the task keeps parameters on the devices (Task.local), and in Redis others could "
                "read them: name a folder for them, trainer.local_dir"
            )
        devices = self._settings.owns or range(run.devices)
        return sealer_of(run, self._keys.name, self._private, devices)

    def _workshop(
        self,
        context: Context,
        metrics: TrainerMetrics,
        learner: Learner,
        thread: Worker,
        run: Run,
    ) -> AttemptContext:
        site = self._settings.site

        def is_eligible(device: int) -> bool:
            at_s = self._ledger.now() - run.created
            return eligible(self._devices.availability, device, run.seed, at_s)

        def saved_work(task: str) -> SavedWork:
            key = self._keys.workspace(site, task)
            return SavedWork(
                key,
                self._client,
                self._ledger,
                self._settings,
                context.log,
                private=self._sealer is not None,
            )

        return AttemptContext(
            name=self._name,
            settings=self._settings,
            context=context,
            run=run,
            now=self._ledger.now,
            solvers=self._solvers,
            devices=self._devices,
            is_eligible=is_eligible,
            newest=Newest(self._client, self._ledger, self._keys, site, run.layout, metrics),
            saved_work=saved_work,
            learner=learner,
            thread=thread,
            out=Model(run.layout),
            failures=Failures(
                context,
                self._outbox,
                self._name,
                self._rests,
                private=self._sealer is not None,
            ),
            metrics=metrics,
            wire=self._wire,
            feedback=Feedback(
                self._client,
                self._ledger,
                self._keys,
                self._settings,
                run.layout.parameters,
                metrics,
                context.log,
            ),
            local=LocalValues(self._client, self._keys, self._settings, run, context.log),
            sealer=self._sealer,
        )

    def _shift(self, shared: AttemptContext) -> _Shift:
        leases = Leases(self._group, self._ledger, self._lease, shared.context)
        delivery = Delivery(
            self._client,
            self._keys,
            self._outbox,
            leases,
            self._group.stream,
            self._settings.blob_expiry_s,
            shared.context,
            shared.metrics,
        )
        evaluated = Evaluated(self._client, self._keys, shared.run.layout)
        return _Shift(shared, leases, delivery, self._client, evaluated, self._check_same)

    def _initiative(
        self, settings: InitiativeSettings, shared: AttemptContext, shift: _Shift
    ) -> Initiative:
        devices = self._settings.owns or range(shared.run.devices)
        return Initiative(
            settings,
            self._participation,
            devices,
            name=self._name,
            outbox=self._outbox,
            ledger=self._ledger,
            context=shared.context,
            is_idle=shift.is_idle,
            is_eligible=shared.is_eligible,
        )

    async def _announce(self, context: Context, shift: _Shift) -> None:
        """Announce this trainer periodically; end with the run if configured."""
        device = shift.task.device if shift.task else None
        with self._outage_limit.requesting():
            await self._outbox.announce(
                self._name,
                self._settings.owns,
                device=device,
                answers=shift.answers,
                failing=shift.given_up_in_a_row,
            )
            if self._settings.ends_with_run:
                with suppress(NoRun):  # the updater will publish it again
                    if (await self._ledger.run()).state == "finished":
                        context.log.info("the run is finished")
                        context.stop.set()
        await pause(context.stop, _HEARTBEAT_S)


class _Shift:
    """Performs a trainer's tasks, one at a time."""

    def __init__(
        self,
        shared: AttemptContext,
        leases: Leases,
        delivery: Delivery,
        client: Client,
        evaluated: Evaluated,
        check_run: Callable[[], Awaitable[None]],
    ) -> None:
        """``check_run``: raises an error if the run is another by now."""
        self._shared = shared
        self._context = shared.context
        self.leases = leases
        self._delivery = delivery
        self._client = client
        self.task: Assignment | Evaluation | None = None  # being performed
        self._evaluated = evaluated
        self._check_run = check_run
        self.answers = 0

    @property
    def given_up_in_a_row(self) -> int:
        """The tasks given up in a row on several devices, for announcements.

        0 while a device may be the cause.
        """
        return self._shared.failures.in_a_row

    def is_idle(self) -> bool:
        """Whether the trainer could take a task now."""
        return self.task is None and not self._shared.failures.rests

    def _goes_on(self) -> bool:
        """Whether to request the next task together with the present answer."""
        rests = self._shared.failures.rests
        return not (self._context.stop.is_set() or rests or self.leases.is_due)

    async def step(self) -> None:
        """Take and perform one task, if there is one."""
        await self._shared.failures.rest()
        if self._context.stop.is_set():
            return
        taken = await self.leases.next()
        if taken is None:
            return
        try:
            task = decode(taken.entry.data, Assignment, Evaluation)
        except BadMessage as error:
            await self._delivery.bury(taken.entry, str(error))
            return
        await self._check_run()
        self.task = task
        unbound = bind_contextvars(task=task.task, device=task.device)
        try:
            if isinstance(task, Evaluation):
                await self._measure(taken, task)
            else:
                await self._perform(taken, task)
        finally:
            self.task = None
            reset_contextvars(**unbound)

    async def _measure(self, taken: TakenTask, task: Evaluation) -> None:
        """Evaluate a version on the device's test data, and send the metrics."""
        metrics, entry = self._shared.metrics, taken.entry
        async with self.leases.held(entry) as lost:
            try:
                answer = await measurement(task, lost, self._shared, self._evaluated)
            except Cancelled:
                if not lost.is_set():
                    self._client.hurry(_GOODBYE_S)
                    await self.leases.hand_back(entry)
                self.leases.settle()
                metrics.ended("lease lost" if lost.is_set() else "handed back")
                return
            said = await self._delivery.send(entry, answer, along=self._goes_on())
        self.leases.settle()
        self.answers += said
        metrics.ended(answer.kind if said else "lease lost")

    async def _perform(self, taken: TakenTask, task: Assignment) -> None:
        """Carry out a task, from fetching the model to sending the answer."""
        log, metrics, entry = self._context.log, self._shared.metrics, taken.entry
        async with self.leases.held(entry) as lost:
            attempt = Attempt(task, taken, lost, self._shared)
            self._context.trace("taken", attempt=attempt.id)
            try:
                answer = await attempt.answer()
            except Cancelled as stopped:
                end = "lease lost" if lost.is_set() else "handed back"
                if not lost.is_set():
                    self._client.hurry(_GOODBYE_S)
                    await attempt.saved.save(stopped.workspace)
                    await self.leases.hand_back(entry)
                self.leases.settle()
                log.info("task not finished", end=end)
                metrics.ended(end)
                return
            if isinstance(answer, GiveUp):
                failures = self._shared.failures
                failures.gave_up(task.device, answer.reason)
                answer = answer.model_copy(update={"failing": failures.in_a_row})
            answered_at = time.time()
            feedback, unsent = self._shared.feedback, attempt.unsent

            async def stage() -> Sequence[str]:
                device, values = task.device, attempt.local
                kept = await self._shared.local.stage(device, attempt.id, values)
                if unsent is None:
                    return kept
                return (*await feedback.stage(device, attempt.id, unsent), *kept)

            said = await self._delivery.send(
                entry,
                answer,
                attempt.update,
                make_room=attempt.saved.discard,
                stage=stage,
                along=self._goes_on(),
            )
            if unsent is not None:
                feedback.answered(task.device, unsent, said=said, dropped=attempt.dropped)
            if said:
                self._shared.local.answered(task.device, attempt.local)
        await attempt.saved.discard()
        self.leases.settle()
        self.answers += said
        end = answer.kind if said else "lease lost"
        metrics.ended(end)
        metrics.took(attempt.seconds)
        tau = answer.tau if isinstance(answer, Upload) else None
        self._context.trace(
            _SAID[end],
            at=answered_at,
            attempt=attempt.id,
            tau=tau,
            seconds=round(attempt.seconds, 3),
        )
