"""One attempt at a task: the start of training, training itself, and the answer.

:class:`Attempt` has the state of one attempt, :class:`AttemptContext` the settings and resources
that all attempts share.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedstream.broker import blobs
from fedstream.broker.published import read_newest
from fedstream.core import reasons
from fedstream.core.errors import (
    BadMessage,
    BlobDamaged,
    BlobMissing,
    ConfigError,
    FedstreamError,
    LayoutMismatch,
    Unavailable,
)
from fedstream.core.layout import Floats, Layout, Model, vector_of
from fedstream.core.messages import Assignment, GiveUp, Upload
from fedstream.runtime.backoff import Backoff, pause
from fedstream.trainer.devices import DeviceSettings, behaviour
from fedstream.trainer.failures import Guard
from fedstream.trainer.saved_work import SavedWork
from fedstream.trainer.solvers import Cancelled, Solvers, Work
from fedstream.trainer.task import solver_for_device
from fedstream.trainer.workspace import Start

if TYPE_CHECKING:
    from fedstream.broker.client import Client
    from fedstream.broker.keys import Keys
    from fedstream.broker.ledger.trainer import TakenTask, TrainerLedger
    from fedstream.core.formats import Format
    from fedstream.core.layout import Payload
    from fedstream.core.records import Head, Run
    from fedstream.private.sealing import EpochKey
    from fedstream.runtime.service import Context, Worker
    from fedstream.trainer.failures import Failures
    from fedstream.trainer.learner import Learned, Learner
    from fedstream.trainer.metrics import TrainerMetrics
    from fedstream.trainer.saved_work import Feedback, LocalValues
    from fedstream.trainer.sealing import Sealer
    from fedstream.trainer.settings import TrainerSettings

_LOOK_S = 0.1  # between checks whether a device has become eligible
# Between reads of the newest version, as trainers may not wait for one; or this share of the work
# so far, so that many trainers with long tasks don't keep Redis busy.
_STALE_S, _STALE_SHARE = 0.05, 0.05
_OF_NO_USE = (BadMessage, ConfigError, LayoutMismatch)  # of a workspace that can't be resumed


class Newest:
    """A cache of the newest version, for all tasks that start from it."""

    def __init__(
        self,
        client: Client,
        ledger: TrainerLedger,
        keys: Keys,
        site: str,
        layout: Layout,
        metrics: TrainerMetrics,
    ) -> None:
        self._client = client
        self._ledger = ledger
        self._keys = keys
        self._site = site
        self._layout = layout
        self._metrics = metrics
        self._version: tuple[Head, Model] | None = None  # None: not read, or only partly

    async def start(self, device: int, newest: Head | None) -> Start:
        """The start from the newest version, with the strategy's vector for the device.

        ``newest``: the newest version's head; None: it is read first.
        """
        head, model = await self._read(newest)
        control: Floats | None = None
        if self._layout.controls:
            control = np.zeros(self._layout.parameters, np.float32)  # zero the first time
            key = self._keys.control(self._site, device)
            try:
                await blobs.recall(self._client, key, vector_of(control))
            except (BlobDamaged, BlobMissing) as error:
                raise Unavailable(f"device {device}'s control is being written") from error
        return Start(head.version, head.given, model, control)

    async def version(self) -> int:
        """The newest version's number. Raises FedstreamError."""
        head = await self._ledger.head()
        return -1 if head is None else head.version

    async def epoch_key(self) -> EpochKey:
        """The helper's newest key, as Redis has it. Raises Unavailable, BadMessage."""
        from fedstream.private.sealing import EpochKey

        if (data := await self._ledger.epoch_key()) is None:
            raise Unavailable("the helper's key is not in Redis: can the updater reach it?")
        return EpochKey.decode(data)

    async def _read(self, head: Head | None) -> tuple[Head, Model]:
        """Read the newest version; retry if a newer one supersedes it meanwhile."""
        with self._metrics.timed("download"):
            while True:
                if head is None and (head := await self._ledger.head()) is None:
                    raise Unavailable(f"run {self._keys.name!r} is gone from Redis")
                if self._version is not None and self._version[0].given == head.given:
                    # A new version may have the same bits.
                    self._version = (head, self._version[1])
                    return self._version
                model = self._version[1] if self._version is not None else Model(self._layout)
                self._version = None
                try:
                    await read_newest(self._client, self._keys, head, model)
                except BlobMissing as error:
                    now = await self._ledger.head()
                    if now is not None and now.version == head.version:
                        raise Unavailable(f"version {head.version} is gone: {error}") from error
                    head = now
                    continue
                self._version = (head, model)
                return self._version


@dataclass(frozen=True)
class AttemptContext:
    """The settings and resources that the attempts of one trainer share."""

    name: str  # the trainer's
    settings: TrainerSettings
    context: Context
    run: Run
    now: Callable[[], float]  # seconds since 1970, by Redis's clock
    solvers: Solvers
    devices: DeviceSettings
    is_eligible: Callable[[int], bool]  # by device, now
    newest: Newest
    saved_work: Callable[[str], SavedWork]  # of the task with this id
    learner: Learner
    thread: Worker  # the only thread that may use the learner
    out: Model  # holds one update at a time
    failures: Failures
    metrics: TrainerMetrics
    wire: Format  # of sent updates, before they are sealed
    feedback: Feedback
    local: LocalValues
    sealer: Sealer | None  # of a private run


class Attempt:
    """One attempt at a task."""

    def __init__(
        self, task: Assignment, taken: TakenTask, lost: asyncio.Event, shared: AttemptContext
    ) -> None:
        """``lost``: set when the lease is lost."""
        self.id = secrets.token_hex(6)
        self.saved = shared.saved_work(task.task)
        self._again = taken.again
        self._newest = taken.newest  # version; None: unknown
        self.update: Payload | None = None  # payload of the answer
        self.unsent: Floats | None = None  # error feedback of this update
        self.local: Model | None = None  # the device's new local values
        self.dropped = False  # whether the previous feedback is missing in the update
        self._task = task
        self._lost = lost
        self._shared = shared
        self._stop = shared.context.stop
        self._tau = 0
        self._is_stale = False  # whether an update from version tau would be too stale
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the attempt began."""
        return time.monotonic() - self._began

    async def answer(self) -> Upload | GiveUp:
        """Train and return the upload, or the reason for giving up.

        Raises Cancelled if the lease is lost or the trainer is told to stop.
        """
        try:
            if self._is_cancelled():
                raise Cancelled
            await self._until_eligible()
            start = await self._start()
            self._tau, self._is_stale = start.version, False
            async with self._watching():
                return await self._answer_from(start)
        except Cancelled:
            if self._is_over() or not self._is_cancelled():
                raise
            late = reasons.DEADLINE_PASSED if self._is_late() else reasons.BECAME_STALE
            return self._give_up(late)

    async def _answer_from(self, start: Start) -> Upload | GiveUp:
        task, shared = self._task, self._shared
        if task.version is not None and task.version != start.version:
            return self._give_up(reasons.ROUND_OVER)
        simulated = behaviour(shared.devices, task.device, task.seed)
        if simulated.drops_out:
            await self._device_time(simulated.latency_s * 0.5, self._is_cancelled)
            return self._give_up(reasons.DROPPED_OUT)
        unsent = await shared.feedback.of(task.device) if shared.wire.of_changes else None
        try:
            work = self._work(start)
            with shared.metrics.timed("training"):
                learned = await self._learned(start, work, unsent)
            if shared.sealer is not None:
                learned = await self._sealed(shared.sealer, start, learned)
        except Cancelled:
            raise
        except Exception as error:
            if start.saved is not None and isinstance(error, _OF_NO_USE):
                await self.saved.reject(error)
                self._again, self._newest = False, None
                return await self.answer()
            await shared.failures.raised(error, task, start.version)
            return self._give_up(reasons.raised(error))
        shared.failures.trained()
        # If told to stop now, answer at once rather than lose the trained model.
        left_s = simulated.latency_s - self.seconds
        await self._device_time(
            left_s, lambda: self._lost.is_set() or self._is_late() or self._is_stale
        )
        return self._upload(start, work, learned)

    async def _start(self) -> Start:
        """The start from the task's workspace, or without one from the newest version."""
        local = await self._shared.local.of(self._task.device)
        if self._again:
            layout = self._shared.run.layout.without_controls()
            saved = await self.saved.read(layout)
            if saved is not None:
                return replace(Start.resumed(saved, layout), local=local)
        start = await self._shared.newest.start(self._task.device, self._newest)
        return replace(start, local=local)

    def _work(self, start: Start) -> Work:
        task, shared = self._task, self._shared
        return Work(
            device=task.device,
            task=task.task,
            version=start.version,
            seed=task.seed,
            steps=task.steps,
            epochs=task.epochs,
            seconds=task.seconds,
            solver=solver_for_device(
                shared.learner.task, task.device, shared.solvers, start.version
            ),
            cancelled=lambda: self._is_cancelled() or not shared.is_eligible(task.device),
            base=start.digest,
            control=start.model.controls if shared.run.layout.controls else None,
            device_control=start.device_control,
            resume=start.saved,
        )

    async def _learned(self, start: Start, work: Work, unsent: Floats | None) -> Learned:
        """Train; if the device becomes ineligible midway, finish later. Raises Cancelled.

        Waiting is the 'flexibility' of *Asynchronous Federated Optimization*.
        """
        shared = self._shared
        while True:
            try:
                # A train() that does not stop may finish an update that has become too stale.
                with Guard(self._has_ended, self._hangs, patience_s=shared.settings.drain_s):
                    return await shared.thread.run(
                        shared.learner.train,
                        start,
                        work,
                        shared.out,
                        shared.run.sends,
                        shared.wire,
                        unsent,
                    )
            except Cancelled as stopped:
                if self._is_cancelled():
                    raise
                await self.saved.save(stopped.workspace)
                work = replace(work, resume=stopped.workspace)
                await self._until_eligible()

    async def _sealed(self, sealer: Sealer, start: Start, learned: Learned) -> Learned:
        """Mask and seal the update, as soon as the helper's key is in Redis.

        Raises Cancelled; BadMessage or BadSeal if the key in Redis is not the helper's, or too old.
        """
        shared, backoff, waits = self._shared, Backoff(rng=random.Random()), False
        while True:
            try:
                epoch = await shared.newest.epoch_key()
                break
            except FedstreamError as error:
                if not error.retriable:
                    raise
                if not waits:
                    shared.context.log.warning("update not sealed yet", reason=str(error))
                waits = True
            await pause(self._stop, backoff.next())
            if self._is_cancelled():
                raise Cancelled
        return await shared.thread.run(
            sealer.sealed,
            learned,
            shared.out,
            epoch,
            run=shared.run.lineage,
            task=self._task.task,
            attempt=self.id,
            device=self._task.device,
            tau=start.version,
            base=start.digest,
        )

    def _hangs(self) -> None:
        # The drain waits as long again; then the process ends in any case.
        self._shared.context.log.error(
            "training hangs: this trainer exits and must be restarted",
            told_to_stop_s=self._shared.settings.drain_s,
        )
        self._stop.set()

    # the answer's content

    def _upload(self, start: Start, work: Work, learned: Learned) -> Upload:
        task, trained, size = self._task, learned.trained, learned.update.buffer.nbytes
        self.update, self.unsent = learned.update, learned.unsent
        self.dropped, self.local = learned.dropped, learned.local
        return Upload(
            task=task.task,
            attempt=self.id,
            device=task.device,
            trainer=self._shared.name,
            tau=start.version,
            base=start.digest,
            layout=self._shared.run.layout.signature,
            digest=learned.digest,
            size=size,
            samples=trained.samples,
            steps=trained.steps,
            lr=trained.lr or work.solver.lr,
            loss=trained.loss,
            seconds=self.seconds if learned.sealed is None else 0.0,  # tells of the data's size
            seed=task.seed,
            sends=self._shared.run.sends,
            site=self._shared.settings.site,
            chunks=blobs.chunks_of(size),
            format=learned.format.name,
            sealed=learned.sealed,
        )

    def _give_up(self, reason: str) -> GiveUp:
        return GiveUp(
            task=self._task.task,
            attempt=self.id,
            device=self._task.device,
            trainer=self._shared.name,
            reason=reason,
        )

    # whether to continue

    def _is_over(self) -> bool:
        """Whether the lease is lost, or the trainer is told to stop."""
        return self._lost.is_set() or self._stop.is_set()

    def _is_late(self) -> bool:
        """Whether the task's deadline has passed."""
        deadline = self._task.deadline
        return deadline is not None and self._shared.now() > deadline

    def _has_ended(self) -> bool:
        return self._is_over() or self._is_late()

    def _is_cancelled(self) -> bool:
        return self._has_ended() or self._is_stale

    @asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Cancel the training inside the block once its update would be too stale."""
        if not self._shared.run.cancel_stale:
            yield
            return
        watching = asyncio.create_task(self._watch(), name="staleness")
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.wait({watching})

    async def _watch(self) -> None:
        most = self._shared.run.max_staleness or 0
        while not self._is_stale:
            worked = time.monotonic() - self._began
            if await pause(self._stop, max(_STALE_S, _STALE_SHARE * worked)):
                return
            with suppress(FedstreamError):  # training goes on while Redis is away
                self._is_stale = await self._shared.newest.version() - self._tau > most

    async def _until_eligible(self) -> None:
        """Wait until the device may train. Raises Cancelled."""
        while not self._shared.is_eligible(self._task.device):
            self._newest = None  # outdated by then
            await pause(self._stop, _LOOK_S)
            if self._is_cancelled():
                raise Cancelled

    async def _device_time(self, seconds: float, cancelled: Callable[[], bool]) -> None:
        """Wait as long as the simulated device would take, or until stopped. Raises Cancelled."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            stopped = await pause(self._stop, min(left, 0.25))
            if cancelled():
                raise Cancelled
            if stopped:
                return
