"""`fedstream replay --redis`: recorded updates go through live services once more, in their time.

The feeder is scheduler and trainers at once: it opens a task for each recorded update and answers
it with the recorded bytes, once the live run has the version that it was trained from. So an update
is as stale as it was. What coordinator and updater make of it is theirs.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

import structlog
from prometheus_client import CollectorRegistry
from rich.console import Console
from rich.table import Table

from broker import blobs
from broker.client import Client, RedisSettings
from broker.errors import FedstreamError, NoRun, Unavailable
from broker.keys import TRAINERS, Keys
from broker.layout import Model
from broker.lease import Lease
from broker.ledger import Ledger, View
from broker.messages import OUTCOMES, CloseRound, Task, Trigger, Upload, task_id
from broker.streams import Entry, Group
from fedstream.config import Settings
from runtime.backoff import pause
from runtime.health import Health
from runtime.leading import lead
from runtime.logging import configure
from runtime.service import Context, repeat
from updater.journal import JournalError, Record, RoundClosed, Segment, Taken, cuts, segments
from updater.rebuild import is_used, recorded

IN_FLIGHT = 4  # tasks
_LEASE_S = 5.0
_EXPIRE_S = 600.0  # of an update that is written and not admitted
_LOOK_S = 0.005  # between two looks at a run whose tasks are all in flight
_NAME = "replay"

Recorded: TypeAlias = tuple[Segment, Record, Taken | RoundClosed]


class Feeder:
    """Feeds the run of ``keys``, which must have no scheduler and no trainers of its own."""

    def __init__(self, redis: RedisSettings, keys: Keys, folder: Path, speed: float) -> None:
        """``speed``: how many times as fast as it was. Raises JournalError."""
        self._chain = segments(folder)
        if not self._chain:
            raise JournalError(f"{folder}: there is no journal")
        self._speed = speed
        self._keys = keys
        self._client = Client(redis, _NAME)
        self._ledger = Ledger(self._client, keys, _NAME)
        self._lease = Lease(self._client, keys, "scheduler", _NAME, seconds=_LEASE_S)
        self._tasks = Group(self._client, keys.tasks, TRAINERS, _NAME)
        self._todo = self._records()
        self._next = next(self._todo, None)
        self._trigger: Trigger | None = None  # of the next one
        self._open: dict[str, tuple[Segment, Record, Upload]] = {}  # by task
        self._offset = 0  # of the live run's versions from the recorded ones
        self._began: tuple[float, float] | None = None  # on our clock, and on the queue's then
        self._unsure = True  # whether we hold tasks that we don't know of
        self._before: View | None = None
        self._after: View | None = None
        self.recorded: Counter[str] = Counter()  # outcomes of what was fed

    def _records(self) -> Iterator[Recorded]:
        """What can be fed: refused updates are recorded without their bytes."""
        for segment, cut in cuts(self._chain):
            for record in segment.records(cut):
                message = record.message
                if isinstance(message, RoundClosed) or is_used(message):
                    yield segment, record, message

    @property
    def live(self) -> dict[str, int]:
        """What the live run made of its tasks meanwhile, by outcome."""
        if self._before is None or self._after is None:
            return {}
        before, after = self._before.outcomes, self._after.outcomes
        return {outcome: after[outcome] - before[outcome] for outcome in OUTCOMES}

    async def run(self, context: Context) -> None:
        """Feeds until the journal's end, the run's, or stop. Raises FedstreamError."""
        self._context = context
        context.log.info("taking the scheduler's lease", speed=self._speed)
        try:
            await lead(context, self._lease, self._work)
        finally:
            await self._client.close()
            for segment in self._chain:
                segment.close()

    async def _work(self) -> None:
        try:
            await repeat(self._context, "feed", self._step)
            self._after = await self._ledger.look()
        except Unavailable as error:
            self._context.log.warning("the last outcomes are not counted", reason=str(error))
        finally:
            self._context.stop.set()

    async def _step(self) -> bool:
        """Opens the next task if it is time, and answers those that came: whether all is done."""
        try:
            view = await self._ledger.look()
        except NoRun:
            await pause(self._context.stop, 0.2)
            return False
        self._before, self._after = self._before or view, view
        if view.run.state == "finished" or (self._next is None and not view.open):
            return True
        wait_s = await self._advance(view)
        try:
            for entry in await self._given(round(1000 * wait_s)):
                await self._answer(entry)
        except FedstreamError:
            self._unsure = True
            raise
        return False

    async def _advance(self, view: View) -> float:
        """The next record, if it is its time: seconds until there may be something to do."""
        if self._next is None or len(view.open) >= IN_FLIGHT:
            return _LOOK_S
        segment, record, message = self._next
        now = time.monotonic()
        self._began = self._began or (now, message.received)
        due_s = self._began[0] + (message.received - self._began[1]) / self._speed - now
        if due_s > 0:
            return min(due_s, _LOOK_S if view.open else 1.0)
        if isinstance(message, RoundClosed):
            if not view.open:  # all that came before has arrived
                closing = CloseRound(version=view.head.version, tasks=(), why=message.why)
                await self._ledger.ask(closing)
                self._next = next(self._todo, None)
            return _LOOK_S
        upload, head = message.upload, view.head.version
        if not view.open:  # whatever the live run did otherwise
            self._offset = head - upload.tau - message.staleness
        tau = max(0, upload.tau + self._offset)
        if head >= tau:
            await self._open_task(view, segment, record, upload.model_copy(update={"tau": tau}))
        return _LOOK_S

    async def _open_task(
        self, view: View, segment: Segment, record: Record, upload: Upload
    ) -> None:
        if self._trigger is None:
            self._trigger = Trigger(
                task=task_id(time.time_ns() // 1_000_000), device=upload.device, seed=0,
                steps=max(1, upload.steps), why=f"replay of {upload.task}",
            )  # fmt: skip
        trigger = self._trigger
        opened = await self._ledger.trigger(self._lease.token, IN_FLIGHT, view.issued, [trigger])
        # A repetition after a lost reply opens nothing, and finds the task in the view.
        if opened or trigger in view.open:
            self._open[trigger.task] = (segment, record, upload)
            self._next, self._trigger = next(self._todo, None), None

    async def _given(self, block_ms: int) -> list[Entry]:
        """Tasks to answer, those first that were given to us before trouble."""
        if self._unsure:
            await self._tasks.ensure()
            entries, _ = await self._tasks.claim(
                idle_ms=0, most=1 << 30, own=True, quiet=True, count=IN_FLIGHT
            )
            self._unsure = False
            if entries:
                return entries
        return await self._tasks.read(count=IN_FLIGHT, block_ms=max(1, block_ms))

    async def _answer(self, entry: Entry) -> None:
        """Answers a task with the recorded update."""
        task = Task.decode(entry.data)
        if task.task not in self._open:
            raise FedstreamError(
                f"run {self._keys.name!r} has a task that the replay did not open: feed a run that "
                "has no scheduler, begun anew"
            )
        segment, record, original = self._open[task.task]
        base = await self._ledger.digest(original.tau)
        model = await asyncio.to_thread(_loaded, segment, record)
        upload = original.model_copy(
            update={
                "task": task.task, "attempt": _NAME, "trainer": _NAME, "base": base or "forgotten",
            }
        )  # fmt: skip
        ahead = await blobs.prepare(
            self._client, self._keys.update(upload.blob), model, expire_s=_EXPIRE_S
        )
        said = await self._ledger.answer(
            self._tasks.stream, TRAINERS, entry, upload, expire_s=_EXPIRE_S, ahead=ahead
        )
        if said == "unwritten":  # it expired meanwhile: the task is still ours
            self._unsure = True
        elif isinstance(record.message, Taken):
            self.recorded[record.message.outcome] += 1


def _loaded(segment: Segment, record: Record) -> Model:
    model = Model(segment.layout)
    recorded(record, model if record.payload_bytes else None)
    segment.load(record, model)
    return model


def feed(settings: Settings, folder: Path, speed: float) -> Feeder:
    """Feeds until the end or Ctrl-C: the feeder, with what came of it. Raises FedstreamError."""
    configure(settings.log, run=settings.run.name, service="replay")

    async def fed() -> Feeder:
        feeder = Feeder(settings.redis, Keys(settings.run.name), folder, speed)
        context = Context(asyncio.Event(), Health(), CollectorRegistry(), structlog.get_logger())
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, context.stop.set)
        await feeder.run(context)
        return feeder

    try:
        return asyncio.run(fed())
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from group


def numbers(feeder: Feeder) -> dict[str, Mapping[str, int]]:
    """Outcomes as they were recorded, and as they were now."""
    return {"recorded": dict(feeder.recorded), "live": feeder.live}


def show(feeder: Feeder) -> None:
    """Prints the outcomes."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("outcome", "recorded", "now"):
        table.add_column(name, justify="left" if name == "outcome" else "right")
    live = feeder.live
    for outcome in OUTCOMES:
        if feeder.recorded[outcome] or live.get(outcome):
            table.add_row(outcome, str(feeder.recorded[outcome]), str(live.get(outcome, 0)))
    Console().print(table)
