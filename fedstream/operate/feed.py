"""`fedstream replay --redis`: feeds recorded updates through live services at the recorded pace.

The feeder acts as scheduler and trainers: it opens a task for each recorded update, and answers it
with the recorded bytes once the live run has the update's base version. So each update has its
recorded staleness. Coordinator and updater decide on the answer as on any other. Tasks are opened
ahead, so that only answering takes time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import structlog
from prometheus_client import CollectorRegistry
from rich.table import Table

from fedstream.broker import blobs
from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import TRAINERS, Keys
from fedstream.broker.lease import Lease
from fedstream.broker.ledger.operator import OperatorLedger
from fedstream.broker.ledger.scheduler import SchedulerLedger
from fedstream.broker.ledger.trainer import Outbox
from fedstream.broker.streams import Entry, Group
from fedstream.core.errors import FedstreamError, NoRun, Unavailable
from fedstream.core.layout import Model, Payload
from fedstream.core.messages import OUTCOMES, POOL, Assignment, CloseRound, Trigger, Upload, task_id
from fedstream.core.records import View
from fedstream.journal import (
    JournalError,
    NotRecorded,
    Record,
    RoundClosed,
    Segment,
    Taken,
    cuts,
    segments,
)
from fedstream.journal.rebuild import recorded
from fedstream.journal.records import is_used
from fedstream.journal.updates import received
from fedstream.runtime.backoff import pause
from fedstream.runtime.health import Health
from fedstream.runtime.logging import configure
from fedstream.runtime.process import Stop
from fedstream.runtime.service import Context, lead, repeat
from fedstream.settings.config import Settings
from fedstream.terminal import console, spaced

IN_FLIGHT = 4  # tasks
_LEASE_S = 5.0
_EXPIRE_S = 600.0  # lifetime of an update that is written but not admitted
_LOOK_S = 1.0  # polling interval while nothing happens
_CLOSED_S = 0.01  # polling interval while a round ends: an empty round announces nothing
_GIVEN_MS = 50  # to wait for a task just opened
_NAME = "replay"

Recorded: TypeAlias = tuple[Segment, Record, Taken | RoundClosed]


@dataclass
class _Open:
    """A task opened by the feeder."""

    segment: Segment
    record: Record
    message: Taken
    entry: Entry | None = None  # once delivered to us
    answered: bool = False


class _Todo:
    """The records still to feed, in order, without refused updates: their bytes were not kept."""

    def __init__(self, chain: Sequence[Segment]) -> None:
        self._records = (
            (segment, record, record.message)
            for segment, cut in cuts(chain)
            for record in segment.records(cut)
            if isinstance(record.message, RoundClosed) or is_used(record.message)
        )
        self.next: Recorded | None = next(self._records, None)
        self.trigger: Trigger | None = None  # for it, once there is one

    def done(self) -> None:
        """Continue with the next record."""
        self.next, self.trigger = next(self._records, None), None


class _Pace:
    """The due times of records, at the recorded pace times ``speed``."""

    def __init__(self, speed: float) -> None:
        self.speed = speed
        self._began: tuple[float, float] | None = None  # start: our clock, recorded clock

    def due_s(self, received: float) -> float:
        """Seconds until an update received at ``received`` (recorded clock) is due."""
        now = time.monotonic()
        self._began = self._began or (now, received)
        return self._began[0] + (received - self._began[1]) / self.speed - now


class Feeder:
    """Feeder of the run of ``keys``, which must have no scheduler and no trainers of its own."""

    def __init__(self, redis: RedisSettings, keys: Keys, folder: Path, speed: float) -> None:
        """Open the journal. ``speed``: a multiple of the recorded speed. Raises JournalError."""
        self._chain = segments(folder)
        if not self._chain:
            raise JournalError(f"{folder}: there is no journal")
        if self._chain[-1].head.masked:
            raise NotRecorded(
                f"{folder}: the updates of this private run are sealed for it alone, and its "
                "helper opens none twice, so no other run can take them: replay it without --redis"
            )
        self._pace = _Pace(speed)
        self._keys = keys
        self._client = Client(redis, _NAME)
        self._ledger = OperatorLedger(self._client, keys, _NAME)
        self._scheduler = SchedulerLedger(self._client, keys, _NAME)
        self._outbox = Outbox(self._client, keys, POOL)
        self._lease = Lease(self._client, keys, "scheduler", _NAME, seconds=_LEASE_S)
        self._tasks = Group(self._client, keys.tasks, TRAINERS, _NAME)
        self._todo = _Todo(self._chain)
        self._open: dict[str, _Open] = {}  # by task, in journal order
        self._wait_s = 0.0  # until the next action, unless an event comes first
        self._closing = False  # asked to close a round, and the live run hasn't yet
        self._offset = 0  # from recorded versions to the live run's
        self._told = False  # warned that there is no run
        self._unsure = True  # whether unknown pending tasks may be ours
        self._before: View | None = None
        self._after: View | None = None
        self.recorded: Counter[str] = Counter()  # recorded outcomes of the updates fed

    @property
    def live(self) -> dict[str, int]:
        """Number of the live run's tasks that ended since the start, by outcome."""
        if self._before is None or self._after is None:
            return {}
        before, after = self._before.outcomes, self._after.outcomes
        return {outcome: after[outcome] - before[outcome] for outcome in OUTCOMES}

    async def run(self, context: Context) -> None:
        """Feed until the journal or the run ends, or until stopped. Raises FedstreamError."""
        self._context = context
        context.log.info("taking the scheduler's lease", speed=self._pace.speed)
        try:
            await lead(context, self._lease, self._work)
        finally:
            await self._client.close()
            for segment in self._chain:
                segment.close()

    async def _work(self) -> None:
        try:
            await repeat(self._context, "feed", self._step)
            await self._look_last()
        except Unavailable as error:
            self._context.log.warning("could not count the last outcomes", reason=str(error))
        finally:
            self._context.stop.set()

    async def _look_last(self) -> None:
        """Count the outcomes once all answers have one, or after a second."""
        until = time.monotonic() + _LOOK_S
        view = await self._ledger.look()
        while self._is_waiting(view) and (left := until - time.monotonic()) > 0:
            view = await self._ledger.look_after(view, block_ms=max(1, round(1000 * left)))
        self._before, self._after = self._before or view, view

    def _is_waiting(self, view: View) -> bool:
        """Whether an answer has no outcome yet."""
        there = {trigger.task for trigger in view.open}
        return any(task.answered and name in there for name, task in self._open.items())

    async def _step(self) -> bool:
        """Open due tasks and answer those that can be answered; returns whether all is done."""
        try:
            view = await self._look()
        except NoRun as error:
            if not self._told:
                self._told = True
                self._context.log.warning(
                    "waiting for the run: start its coordinator and updater", reason=str(error)
                )
            await pause(self._context.stop, 0.2)
            return False
        self._before, self._after = self._before or view, view
        self._forget_ended(view)
        if view.run.state == "finished" or (self._todo.next is None and not view.open):
            return True
        try:
            self._wait_s = await self._open_next(view)
            await self._receive()
            await self._answer(view)
        except FedstreamError:
            self._unsure = True
            raise
        return False

    async def _look(self) -> View:
        """Read the run, at once if an action may be due, else after the next event."""
        if self._after is None or self._unsure or self._waits_for_task or self._wait_s <= 0:
            return await self._ledger.look()
        block_ms = max(1, round(1000 * min(self._wait_s, _LOOK_S)))
        return await self._ledger.look_after(self._after, block_ms=block_ms)

    @property
    def _waits_for_task(self) -> bool:
        """Whether the next task to answer has not been delivered to us yet."""
        mine = (task for task in self._open.values() if not task.answered)
        first = next(mine, None)
        return first is not None and first.entry is None

    def _forget_ended(self, view: View) -> None:
        there = {trigger.task for trigger in view.open}
        for name, task in list(self._open.items()):
            if name not in there:
                if not task.answered and view.run.state != "finished":  # answered; reply lost
                    self.recorded[task.message.outcome] += 1
                del self._open[name]

    async def _open_next(self, view: View) -> float:
        """Open due tasks; close a round once everything before its end has arrived.

        Returns the seconds until the next action, unless an event comes first.
        """
        if self._closing and (view.triggers or view.backlog):
            return _CLOSED_S
        self._closing = False
        issued, room = view.issued, IN_FLIGHT - len(view.open)
        todo = self._todo
        while todo.next is not None:
            segment, record, message = todo.next
            if (due_s := self._pace.due_s(message.received)) > 0:
                return due_s
            if isinstance(message, RoundClosed):
                if view.open or self._open:
                    return _LOOK_S
                closing = CloseRound(
                    version=view.head.version,
                    tasks=(),
                    why=message.why,
                    drops=view.head.held if message.dropped else (),
                )
                await self._scheduler.ask(closing)
                todo.done()
                self._closing = True
                return _CLOSED_S
            trigger = todo.trigger = todo.trigger or self._triggering(message.upload)
            if trigger not in view.open:  # else it is open already, and the reply was lost
                if room <= 0:
                    return _LOOK_S
                token = self._lease.token
                if not await self._scheduler.trigger(token, IN_FLIGHT, issued, [trigger]):
                    return 0.0
                issued, room = issued + 1, room - 1
            self._open[trigger.task] = _Open(segment, record, message)
            todo.done()
        return _LOOK_S

    def _triggering(self, upload: Upload) -> Trigger:
        return Trigger(
            task=task_id(round(self._ledger.now() * 1000)),
            device=upload.device,
            seed=0,
            steps=max(1, upload.steps),
            why=f"replay of {upload.task}",
        )

    async def _receive(self) -> None:
        """Receive our tasks; after an error, first reclaim those already delivered to us."""
        entries: list[Entry] = []
        if self._unsure:
            await self._tasks.ensure()
            entries, _ = await self._tasks.claim(
                idle_ms=0, most=1 << 30, own=True, quiet=True, count=1000
            )
            self._unsure = False
        if not entries and any(task.entry is None for task in self._open.values()):
            block_ms = _GIVEN_MS if self._waits_for_task else 0
            entries = await self._tasks.read(count=IN_FLIGHT, block_ms=block_ms)
        for entry in entries:
            name = Assignment.decode(entry.data).task
            if name not in self._open:
                raise FedstreamError(
                    f"run {self._keys.name!r} has a task that the replay did not open: feed a new "
                    "run that has no scheduler"
                )
            self._open[name].entry = entry

    async def _answer(self, view: View) -> None:
        """Answer, in order, the tasks whose base version the run has."""
        head = view.head
        waiting = self._is_waiting(view)
        for name, task in self._open.items():
            if task.answered:
                continue
            if task.entry is None:
                return
            upload = task.message.upload
            if not waiting:  # all answers have outcomes, so the live run may have diverged
                self._offset = head.version - upload.tau - task.message.staleness
            tau = max(0, upload.tau + self._offset)
            if tau > head.version:
                return
            base = head.given if tau == head.version else await self._ledger.given(tau)
            said = await self._say(
                task,
                task.entry,
                upload.model_copy(
                    update={
                        "task": name,
                        "attempt": _NAME,
                        "trainer": _NAME,
                        "tau": tau,
                        "base": base or "forgotten",
                        "site": POOL,
                        "handed": None,
                        "chunks": blobs.chunks_of(upload.size),
                    }
                ),
            )
            if said == "unwritten":  # the update has expired; the task is still ours
                self._unsure = True
                return
            task.answered = waiting = True
            self.recorded[task.message.outcome] += 1

    async def _say(self, task: _Open, entry: Entry, upload: Upload) -> str:
        """Send the recorded update; returns the outbox's verdict."""
        model = await asyncio.to_thread(_loaded, task.segment, task.record)
        ahead = await blobs.prepare(
            self._client, self._keys.update(upload.blob), model, expire_s=_EXPIRE_S
        )
        return await self._outbox.answer(
            self._tasks.stream, entry, upload, expire_s=_EXPIRE_S, ahead=ahead
        )


def _loaded(segment: Segment, record: Record) -> Payload:
    """The update's received bytes."""
    model = Model(segment.layout)
    recorded(record, model if record.payload_bytes else None)
    return received(segment, record, model)


def feed(settings: Settings, folder: Path, speed: float) -> tuple[Feeder, bool]:
    """Feed until the end or a signal; returns the feeder and whether it reached the end.

    Raises FedstreamError.
    """
    configure(settings.log, run=settings.run.name, service="replay")

    async def fed(stop: Stop) -> Feeder:
        feeder = Feeder(settings.redis, Keys(settings.run.name), folder, speed)
        context = Context(asyncio.Event(), Health(), CollectorRegistry(), structlog.get_logger())
        loop = asyncio.get_running_loop()
        stop.listen(lambda _name: loop.call_soon_threadsafe(context.stop.set))
        try:
            await feeder.run(context)
        finally:
            stop.listen(None)
        return feeder

    try:
        with Stop() as stop:
            return asyncio.run(fed(stop)), stop.name is None
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def numbers(feeder: Feeder) -> dict[str, Mapping[str, int]]:
    """Outcomes as recorded, and in the live run."""
    return {"recorded": dict(feeder.recorded), "live": feeder.live}


def show(feeder: Feeder) -> None:
    """Print the outcomes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("outcome", "recorded", "now"):
        table.add_column(name, justify="left" if name == "outcome" else "right")
    live = feeder.live
    for outcome in OUTCOMES:
        if feeder.recorded[outcome] or live.get(outcome):
            table.add_row(spaced(outcome), str(feeder.recorded[outcome]), str(live.get(outcome, 0)))
    console().print(table)
