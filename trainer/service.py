"""The trainer: takes a task and the newest model, trains off the event loop, and answers.

In the pool, any replica serves any device's partition; a trainer that owns devices serves only
those. It renews its lease while a task runs. A trainer that loses the lease stops at the next
batch; one that is told to stop hands the task back. If it dies, the task is redelivered, and the
first answer counts.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Annotated

import numpy as np
from aiohttp import web
from prometheus_client import Counter, Histogram
from pydantic import Field, model_validator
from structlog.contextvars import bound_contextvars

from fedstream.broker import blobs, reasons, workspaces
from fedstream.broker.client import Client, Command, RedisSettings
from fedstream.broker.errors import (
    BadMessage,
    BlobDamaged,
    BlobMissing,
    ConfigError,
    FedstreamError,
    LayoutMismatch,
    NoRun,
    OutOfMemory,
    Unavailable,
)
from fedstream.broker.keys import POOL, TRAINERS, Keys, check_name, member
from fedstream.broker.layout import Floats, Model, vector_of
from fedstream.broker.ledger import Ledger
from fedstream.broker.messages import (
    OWNED,
    Dead,
    Event,
    GiveUp,
    Sends,
    Task,
    Trigger,
    Upload,
    task_id,
)
from fedstream.broker.outbox import Outbox
from fedstream.broker.records import Head, Run
from fedstream.broker.streams import Entry, Group
from fedstream.runtime.backoff import Backoff, pause
from fedstream.runtime.config import Section
from fedstream.runtime.participation import Participation, ParticipationGroup
from fedstream.runtime.service import Context, repeat
from fedstream.runtime.steps import Epochs, Steps
from fedstream.runtime.tasks import LeaseSettings
from fedstream.trainer.answer import as_sent
from fedstream.trainer.choices import SolverGroup, Solvers, chosen
from fedstream.trainer.devices import AlwaysAvailable, DeviceSettings, behaviour, eligible
from fedstream.trainer.hanging import returns
from fedstream.trainer.patience import Patience
from fedstream.trainer.placement import Place, Threads, check, placed
from fedstream.trainer.solvers import Cancelled, SolverSettings, Trained, Work
from fedstream.trainer.task import untrained
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from fedstream.trainer.task import Task as Learning

# Histogram buckets: from a small model's download to an hour of training.
_SECONDS = (
    0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 30, 60, 180, 600, 1800, 3600,
)  # fmt: skip
_SAID = {"upload": "uploaded", "give_up": "gave up", "lease lost": "lease lost"}
_HEARTBEAT_S = 2.0
_GOODBYE_S = 2.0  # so that a hanging Redis can't outlast the drain
_LOOK_S = 0.1  # between checks whether a device has become eligible
_OF_NO_USE = (BadMessage, ConfigError, LayoutMismatch)  # workspace of other work or another torch
_REST_S = 10.0  # longest pause after a task raised: if all do, the scheduler keeps triggering more
_PARTITIONS_KEPT = 64  # devices' data sets kept open
# Share of Redis's memory above which no workspace is kept. The scheduler lets models and updates
# grow to 0.8, and they need that room.
_WORKSPACES_SHARE = 0.5


class Initiative(Section):
    """How an anarchic trainer decides by itself when to take part and how many steps to do."""

    rate: Annotated[float, Field(gt=0)] = 1.0  # triggers per second while idle
    steps: Steps = Epochs()


class TrainerSettings(Section):
    """What one trainer serves, and the resources it may use."""

    site: str = POOL  # trainers of one site trust each other: they share a Redis user
    # Device numbers; (): a replica of the pool.
    owns: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=OWNED)] = ()
    anarchic: Initiative | None = None
    threads: Threads = 1  # of torch
    device: Place = "cpu"  # of torch; updates are float32 either way
    blob_expiry_s: Annotated[float, Field(gt=0)] = 600.0  # of an update that is never admitted
    workspace_bytes: Annotated[int, Field(ge=0)] = 64 << 20  # larger workspaces are not saved
    workspace_expiry_s: Annotated[float, Field(gt=0)] = 3600.0
    # The trainer exits after a longer outage of Redis; None: it waits forever.
    redis_away_s: Annotated[float, Field(gt=0)] | None = None
    ends_with_run: bool | None = None  # True: exit when the run is finished; else idle
    drain_s: Annotated[float, Field(gt=0)] = 20.0

    @model_validator(mode="after")
    def _site_owns(self) -> TrainerSettings:
        try:
            check_name("trainer.site", self.site)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        if self.site != POOL and not self.owns:
            raise ValueError(
                f"trainer.site = {self.site!r} without trainer.owns: only the site {POOL!r} serves "
                "devices that nobody owns"
            )
        return self


@dataclass(frozen=True)
class _Start:
    """Where training starts or resumes."""

    version: int  # tau
    digest: str  # of x_tau
    model: Model  # x_tau
    device_control: Floats | None = None  # c_i
    saved: Workspace | None = None


@dataclass(frozen=True)
class _Answered:
    """A trained model, ready for upload."""

    trained: Trained
    model: Model
    digest: str


class Trainer:
    """The service. ``load`` creates the user's task; it is called once, off the event loop."""

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
        load: Callable[[], Learning],
        solvers: Sequence[SolverGroup] = (),
        participation: Sequence[ParticipationGroup] = (),
    ) -> None:
        self._settings = settings
        self._solvers = Solvers(solver, solvers)
        self._participation = participation
        self._devices = devices
        self._lease = lease
        self._keys = keys
        self._name = name
        self._load = load
        self._site = settings.site
        self._client = Client(redis, name, loads_scripts=False)
        self._ledger = Ledger(self._client, keys, name)
        self._outbox = Outbox(self._client, keys, settings.site)
        stream = keys.tasks_of(member(settings.site, name)) if settings.owns else keys.tasks
        self._tasks = Group(self._client, stream, TRAINERS, name)
        self._unsure: str | None = "crash"  # why we may hold tasks that we don't know of
        self._swept = 0.0
        self._run: Run | None = None
        self._base: tuple[Head, Model] | None = None  # the newest version we have
        self._out: Model | None = None
        self._now: Task | None = None
        self._saved_for = ""  # the task whose workspace is in Redis
        self._patience = Patience(settings.redis_away_s)
        self._raised: set[str] = set()
        self._answers = 0
        self._rng = random.Random()  # for back-off and initiative; tasks seed training
        self._rests = Backoff(0.01, _REST_S, rng=self._rng)
        self._rest_s = 0.0  # before the next task, if this one raised
        self._thread = ThreadPoolExecutor(1, "training")

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """No routes of its own."""
        return ()

    async def run(self, context: Context) -> None:
        """Work until stopped; hand back a task in progress at the next batch."""
        self._context = context
        self._done = Counter(
            "fedstream_trainer_tasks", "Tasks by what became of them here.", ["end"],
            registry=context.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "fedstream_task_seconds", "How long a task took.", ["part"], registry=context.registry,
            buckets=_SECONDS,
        )  # fmt: skip
        context.watch(self._client)
        loaded = False
        context.health.ready_when("task loaded", lambda: loaded)
        await asyncio.get_running_loop().run_in_executor(self._thread, self._prepare)
        loaded = True
        self._patience.heard = time.monotonic()
        try:
            await repeat(context, "run", self._joined)
            if context.stop.is_set():
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(repeat(context, "heartbeat", self._announce))
                within_s = max(30.0, self._lease.seconds)
                group.create_task(repeat(context, "tasks", self._step, within_s=within_s))
                if (initiative := self._settings.anarchic) is not None:
                    parts = Participation(initiative.steps, self._participation)
                    devices = self._served()
                    rate = initiative.rate * parts.mean(devices)
                    anarchy = partial(self._take_initiative, parts, devices, rate)
                    # Waiting 20 times the mean is as good as impossible.
                    patience_s = 30.0 + 20.0 / rate
                    group.create_task(repeat(context, "initiative", anarchy, within_s=patience_s))
        finally:
            self._client.hurry(_GOODBYE_S)
            try:
                await self._outbox.goodbye(self._name)
            except FedstreamError as error:
                context.log.warning("left without a good-bye", reason=str(error))
            await self._client.close()
            self._thread.shutdown(wait=False)

    def _prepare(self) -> None:
        """Load torch and the task, in the training thread."""
        import torch

        from fedstream.trainer.vector import layout_of

        place = self._settings.device
        check("trainer.device", place)
        torch.set_num_threads(self._settings.threads)
        torch.backends.cudnn.deterministic = True  # redoing a task gives the same bits
        self._learning = learning = self._load()
        self._module = untrained(learning).to(place)
        self._layout = layout_of(self._module)
        self._data = lru_cache(_PARTITIONS_KEPT)(
            lambda device: placed(learning.device_data(device), place)
        )

    async def _joined(self) -> bool:
        """Join the run; False if it doesn't exist yet.

        Raises LayoutMismatch if the run has another model, ConfigError if solver and strategy don't
        fit together.
        """
        try:
            with self._patience.asking():
                run = await self._ledger.run()
        except NoRun:
            await pause(self._context.stop, 0.2)
            return False
        if run.layout.without_controls() != self._layout.without_controls():
            raise LayoutMismatch(
                f"the model of this trainer's task has {self._layout.parameters} parameters in "
                f"{len(self._layout.tensors)} tensors, run {self._keys.name!r} was made with "
                f"{run.layout.parameters} in {len(run.layout.tensors)}: give every service the "
                "same task, or purge the run"
            )
        if bool(run.layout.controls) != self._solvers.usual.controls:
            raise ConfigError(
                f"solver.kind = {self._solvers.usual.kind!r}: run {self._keys.name!r} was made "
                f"with strategy {run.strategy!r}; scaffold takes both"
            )
        self._run, self._layout = run, run.layout
        self._out = Model(run.layout)
        await self._tasks.ensure()
        return True

    @property
    def _sends(self) -> Sends:
        return self._run.sends if self._run is not None else "model"

    @property
    def _controls(self) -> bool:
        return self._layout.controls > 0

    # register

    async def _announce(self) -> None:
        device = self._now.device if self._now else None
        with self._patience.asking():
            await self._outbox.announce(
                self._name, self._settings.owns, device=device, answers=self._answers
            )
            if self._settings.ends_with_run:
                with suppress(NoRun):  # the updater will publish it again
                    if (await self._ledger.run()).state == "finished":
                        self._context.log.info("the run is finished")
                        self._context.stop.set()
        await pause(self._context.stop, _HEARTBEAT_S)

    def _served(self) -> Sequence[int]:
        """The devices that this trainer decides for."""
        return self._settings.owns or range(self._run.devices if self._run is not None else 0)

    async def _take_initiative(
        self, parts: Participation, devices: Sequence[int], rate: float
    ) -> None:
        """Trigger a task for one of this anarchic trainer's devices, if it is idle."""
        rng = self._rng
        await pause(self._context.stop, rng.expovariate(rate))
        if self._now is not None or self._rest_s or self._context.stop.is_set():
            return
        try:
            run = await self._ledger.run()
        except NoRun:
            return  # Redis was emptied; the updater will publish the run again
        if run.state == "finished":
            return
        device = devices[parts.pick(rng, devices)]
        if not self._is_eligible(device):
            return  # an ineligible device does not act
        length = parts.length(rng, device)
        trigger = Trigger(
            task=task_id(time.time_ns() // 1_000_000),
            device=device,
            seed=rng.getrandbits(63),
            steps=length.steps,
            epochs=length.epochs,
            seconds=length.seconds,
            why="own initiative",
            origin=self._name,
        )
        await self._outbox.say(trigger)

    # one task

    async def _step(self) -> None:
        """Perform one task: our own from before, one that another trainer lost, or a new one."""
        if self._rest_s and await pause(self._context.stop, self._rest_s):
            return
        self._rest_s = 0.0
        for entry in await self._next():
            try:
                task = Task.decode(entry.data)
            except BadMessage as error:
                await self._unreadable(entry, error)
                continue
            with bound_contextvars(task=task.task, device=task.device):
                self._now = task
                try:
                    await self._perform(entry, task)
                finally:
                    self._now = None

    async def _unreadable(self, entry: Entry, error: BadMessage) -> None:
        """Have a coordinator move an entry to ``dead``; trainers may not write there."""
        stream = self._tasks.stream
        dead = Dead(
            stream=stream.removeprefix(self._keys.prefix), entry=entry.id, reason=str(error),
            time=time.time(), deliveries=1, data=entry.data,
        )  # fmt: skip
        await self._outbox.answer(stream, entry, dead)

    async def _next(self) -> list[Entry]:
        """The next entry; empty if none arrives within a second."""
        why, self._unsure = self._unsure, "trouble"  # until proven otherwise
        if why is not None:
            await self._tasks.ensure()
            entries, _ = await self._tasks.claim(
                idle_ms=0, most=self._lease.attempts, own=True, quiet=why == "trouble",
                count=1,
            )  # fmt: skip
            if not entries:
                self._unsure = None
            return entries
        if time.monotonic() - self._swept > self._lease.seconds / 4:
            entries, _ = await self._tasks.claim(
                idle_ms=round(self._lease.seconds * 1000), most=self._lease.attempts, count=1
            )
            if entries:
                return entries
            self._swept = time.monotonic()
        entries = await self._tasks.read()
        if not entries:
            self._unsure = None
        return entries  # in hand: sure again once it is answered

    async def _perform(self, entry: Entry, task: Task) -> None:
        """Carry out a task, from fetching the model to sending the answer."""
        started = time.monotonic()
        attempt = secrets.token_hex(6)
        self._context.trace("taken", attempt=attempt)
        async with self._leased(entry) as lost:
            try:
                answer = await self._answer(task, attempt, started, lost)
            except Cancelled as stopped:
                end = "lease lost" if lost.is_set() else "handed back"
                if not lost.is_set():
                    self._client.hurry(_GOODBYE_S)
                    await self._save(task.task, stopped.workspace)
                    await self._tasks.release(entry)
                self._unsure = None
                self._context.log.info("task not finished", end=end)
                self._done.labels(end).inc()
                return
            answered_at = time.time()
            said = await self._said(entry, answer)
        await self._unsave(task.task)
        self._unsure = None
        self._answers += said
        end = answer.kind if said else "lease lost"
        self._done.labels(end).inc()
        self._seconds.labels("whole").observe(time.monotonic() - started)
        tau = answer.tau if isinstance(answer, Upload) else None
        self._context.trace(
            _SAID[end], at=answered_at, attempt=attempt, tau=tau,
            seconds=round(time.monotonic() - started, 3),
        )  # fmt: skip

    async def _answer(
        self, task: Task, attempt: str, started: float, lost: asyncio.Event
    ) -> Upload | GiveUp:
        """The answer to a task. Raises Cancelled."""

        def late() -> bool:
            return task.deadline is not None and time.time() > task.deadline

        try:
            return await self._attempted(task, attempt, started, lost, late)
        except Cancelled:
            if lost.is_set() or self._context.stop.is_set() or not late():
                raise
            return self._give_up(task, attempt, reasons.DEADLINE_PASSED)

    def _give_up(self, task: Task, attempt: str, reason: str) -> GiveUp:
        return GiveUp(
            task=task.task, attempt=attempt, device=task.device, trainer=self._name, reason=reason
        )

    async def _attempted(
        self,
        task: Task,
        attempt: str,
        started: float,
        lost: asyncio.Event,
        late: Callable[[], bool],
    ) -> Upload | GiveUp:
        """Train and return the upload, or the reason for giving up. Raises Cancelled.

        ``late`` says whether the task's deadline has passed.
        """

        def cancelled() -> bool:
            return lost.is_set() or self._context.stop.is_set() or late()

        give_up = partial(self._give_up, task, attempt)
        if late():
            raise Cancelled
        await self._eligible(task.device, cancelled)
        start = await self._start(task)
        if task.version is not None and task.version != start.version:
            return give_up(reasons.ROUND_OVER)
        simulated = behaviour(self._devices, task.device, task.seed)
        if simulated.drops_out:
            await self._device_time(simulated.latency_s * 0.5, cancelled)
            return give_up(reasons.DROPPED_OUT)
        try:
            work = Work(
                device=task.device, task=task.task, version=start.version, seed=task.seed,
                steps=task.steps, epochs=task.epochs, seconds=task.seconds,
                solver=chosen(self._learning, task.device, self._solvers),
                cancelled=lambda: cancelled() or not self._is_eligible(task.device),
                base=start.digest, control=start.model.controls if self._controls else None,
                device_control=start.device_control, resume=start.saved,
            )  # fmt: skip
            with self._seconds.labels("training").time():
                done = await self._trained(start, work, cancelled)
        except Cancelled:
            raise
        except Exception as error:
            if start.saved is not None and isinstance(error, _OF_NO_USE):
                self._begins_anew(error)
                await workspaces.delete(self._client, self._keys.workspace(self._site, task.task))
                self._saved_for = ""
                return await self._attempted(task, attempt, started, lost, late)
            self._rest_s = self._rests.next()
            await self._report(error, task, start.version)
            return give_up(reasons.raised(error))
        self._rests.reset()
        # If told to stop now, it answers at once rather than lose the trained model.
        left_s = simulated.latency_s - (time.monotonic() - started)
        await self._device_time(left_s, lambda: lost.is_set() or late())
        return Upload(
            task=task.task, attempt=attempt, device=task.device, trainer=self._name,
            tau=start.version, base=start.digest, layout=done.model.layout.signature,
            digest=done.digest, size=done.model.layout.nbytes, samples=done.trained.samples,
            steps=done.trained.steps, lr=done.trained.lr or work.solver.lr,
            loss=done.trained.loss, seconds=time.monotonic() - started, seed=task.seed,
            sends=self._sends, site=self._site,
            chunks=blobs.chunks_of(done.model.layout.nbytes),
        )  # fmt: skip

    async def _trained(self, start: _Start, work: Work, cancelled: Callable[[], bool]) -> _Answered:
        """Train; if the device becomes ineligible midway, finish later. Raises Cancelled.

        Asynchronous Federated Optimization, 'flexibility'.
        """
        while True:
            try:
                training = asyncio.get_running_loop().run_in_executor(
                    self._thread, self._train, start, work
                )
                if not await returns(training, cancelled, patience_s=self._settings.drain_s):
                    # The drain waits as long again; then the process ends, hung thread or not.
                    self._context.log.error(
                        "training hangs: this trainer ends, and has to be started again",
                        told_to_stop_s=self._settings.drain_s,
                    )
                    self._context.stop.set()
                return await training
            except Cancelled as stopped:
                if cancelled():
                    raise
                await self._save(work.task, stopped.workspace)
                work = replace(work, resume=stopped.workspace)
                await self._eligible(work.device, cancelled)

    # where training starts

    async def _start(self, task: Task) -> _Start:
        """The task's workspace, left by any replica; without one, the newest version."""
        saved = await self._saved(task)
        if saved is not None:
            _, x_tau = saved.models(self._layout.without_controls())
            return _Start(saved.version, saved.base, x_tau, saved.device_control, saved)
        head, base = await self._newest()
        control: Floats | None = None
        if self._controls:
            control = np.zeros(self._layout.parameters, np.float32)  # zero the first time
            key = self._keys.control(self._site, task.device)
            try:
                await blobs.recall(self._client, key, vector_of(control))
            except (BlobDamaged, BlobMissing) as error:
                raise Unavailable(f"device {task.device}'s control is being written") from error
        return _Start(head.version, head.digest, base, control)

    async def _saved(self, task: Task) -> Workspace | None:
        """The task's workspace, if there is a usable one."""
        # Other trainers of the site may write anything there, so don't read beyond the size limit.
        most, key = self._settings.workspace_bytes, self._keys.workspace(self._site, task.task)
        data = await workspaces.read(self._client, key, most=most)
        if not data:
            return None
        if len(data) > most:
            self._begins_anew(BadMessage(f"a workspace of more than {most} bytes"))
            return None
        try:
            saved = Workspace.decode(data)
            saved.models(self._layout.without_controls())
        except FedstreamError as error:
            self._begins_anew(error)
            return None
        self._saved_for = task.task
        self._context.log.info("goes on from a workspace", version=saved.version, step=saved.step)
        return saved

    def _begins_anew(self, error: Exception) -> None:
        self._context.log.warning("workspace of no use: begun anew", reason=str(error))

    async def _save(self, task: str, workspace: Workspace | None) -> None:
        """Save a workspace, so that the task can be resumed; without one it starts over."""
        if workspace is None:
            return
        data = workspace.encode()
        if len(data) > self._settings.workspace_bytes:
            self._context.log.warning("workspace too large to be saved", bytes=len(data))
            return
        key, expire_s = self._keys.workspace(self._site, task), self._settings.workspace_expiry_s
        try:
            await workspaces.write(self._client, key, data, expire_s=expire_s)
        except FedstreamError as error:
            self._context.log.warning("workspace not saved", reason=str(error))
            return
        self._saved_for = task
        # Check afterwards: if many save at once, each then counts the workspaces saved before it.
        try:
            used, most = await self._ledger.memory()
        except FedstreamError as error:
            self._context.log.warning("workspace saved, room not known", reason=str(error))
            return
        if most and used > _WORKSPACES_SHARE * most:
            self._context.log.warning("no room for a workspace", used=used, maxmemory=most)
            await self._unsave(task)
            return
        self._context.log.info("workspace saved", step=workspace.step, bytes=len(data))

    async def _unsave(self, task: str) -> None:
        """Delete the task's workspace, if this trainer saved or read one."""
        if self._saved_for == task:
            with suppress(FedstreamError):  # else it expires
                await workspaces.delete(self._client, self._keys.workspace(self._site, task))
                self._saved_for = ""

    def _is_eligible(self, device: int) -> bool:
        if self._run is None or isinstance(self._devices.availability, AlwaysAvailable):
            return True
        at_s = time.time() - self._run.created
        return eligible(self._devices.availability, device, self._run.seed, at_s)

    async def _eligible(self, device: int, cancelled: Callable[[], bool]) -> None:
        """Wait until the device may train. Raises Cancelled."""
        while not self._is_eligible(device):
            await pause(self._context.stop, _LOOK_S)
            if cancelled():
                raise Cancelled

    async def _said(self, entry: Entry, answer: Upload | GiveUp) -> bool:
        """Upload and answer, retrying transient errors so that finished work isn't lost.

        Retrying is harmless: answering is idempotent. False if the lease was lost.
        """
        update = self._keys.update(answer.blob) if isinstance(answer, Upload) else ""
        expire_s = self._settings.blob_expiry_s
        unwritten = isinstance(answer, Upload)
        backoff = Backoff(rng=self._rng)
        while True:
            ahead: Sequence[Command] = ()
            try:
                with self._seconds.labels("upload").time():
                    if unwritten and self._out is not None:
                        ahead = await blobs.prepare(
                            self._client, update, self._out, expire_s=expire_s
                        )
                        # Don't rewrite it unasked: once admitted, it must not expire.
                        unwritten = False
                    said = await self._outbox.answer(
                        self._tasks.stream, entry, answer, expire_s=expire_s, ahead=ahead
                    )
            except FedstreamError as error:
                if not error.retriable or self._context.stop.is_set():
                    raise
                self._context.log.warning("answer not said yet", reason=str(error))
                if isinstance(error, OutOfMemory):
                    await self._unsave(answer.task)  # to make room for the update
                await pause(self._context.stop, backoff.next())
            else:
                if said != "unwritten":
                    return said == "said"
                unwritten = True  # it expired during an outage, or never arrived

    def _train(self, start: _Start, work: Work) -> _Answered:
        """Train the module from x_tau. Runs in the training thread."""
        from fedstream.trainer import vector

        vector.load(start.model, self._module)
        trained = self._learning.train(self._module, self._data(work.device), work)
        out = self._out or Model(self._layout)
        vector.read(self._module, out)
        took = as_sent(
            trained, out, start.model, start.device_control, self._sends, work.solver.compression
        )
        return _Answered(took, out, out.digest())

    async def _newest(self) -> tuple[Head, Model]:
        """Read the newest version; if it vanishes meanwhile, it was superseded, so try again."""
        with self._seconds.labels("download").time():
            while True:
                head = await self._ledger.head()
                if head is None:
                    raise Unavailable(f"run {self._keys.name!r} is gone from Redis")
                if self._base is not None and self._base[0].digest == head.digest:
                    self._base = (head, self._base[1])  # a new version may have the same bits
                    return self._base
                model = self._base[1] if self._base is not None else Model(self._layout)
                self._base = None
                key = self._keys.model(head.blob)
                try:
                    await blobs.read(
                        self._client, key, model, digest=head.digest, chunks=head.chunks
                    )
                except BlobMissing as error:
                    now = await self._ledger.head()
                    if now is not None and now.version == head.version:
                        raise Unavailable(f"version {head.version} is gone: {error}") from error
                    continue
                self._base = (head, model)
                return self._base

    # around a task

    @asynccontextmanager
    async def _leased(self, entry: Entry) -> AsyncIterator[asyncio.Event]:
        """Renew the lease inside the block; the event is set if it is lost."""
        lost = asyncio.Event()

        async def renew() -> None:
            while not await pause(lost, self._lease.seconds / 4):
                self._context.health.beat("tasks")
                try:
                    if not await self._tasks.renew(entry):
                        self._context.log.warning("lease lost")
                        lost.set()
                except FedstreamError as error:
                    self._context.log.warning("lease not renewed", reason=str(error))

        renewing = asyncio.create_task(renew(), name="renew")
        try:
            yield lost
        finally:
            renewing.cancel()
            await asyncio.wait({renewing})
            if not renewing.cancelled():
                renewing.result()  # re-raises if renewing failed

    async def _device_time(self, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Wait as long as the simulated device would take, or until stopped. Raises Cancelled."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            stopped = await pause(self._context.stop, min(left, 0.25))
            if cancelled():
                raise Cancelled
            if stopped:
                return

    async def _report(self, error: Exception, task: Task, version: int) -> None:
        """Report a task that raised: with a traceback the first time, then in one line."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{type(error).__name__} at {frames[-1].filename}:{frames[-1].lineno}"
        log = self._context.log.bind(version=version)
        if isinstance(error, FedstreamError):
            text = str(error)
            log.error("task failed", error=type(error).__name__, reason=text)
        elif where in self._raised:
            text = f"{where}: {error}"
            log.error("task raised again", error=type(error).__name__, reason=str(error))
        else:
            text = "".join(traceback.format_exception(error))
            log.error("task raised", exc_info=error)
        self._raised.add(where)
        await self._outbox.say(
            Event(
                what="error", service=self._name, time=time.time(), task=task.task,
                device=task.device, version=version, reason=where, text=text[-8000:],
            )
        )  # fmt: skip
