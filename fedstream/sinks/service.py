"""The service that writes a run to its trackers, and sinks without a service for simulations.

Each sink reads the run's streams by itself, from their beginning, so a slow or failing tracker
delays no other: it is retried, and catches up from the streams. The tracker itself, or else the
cursor in Redis, gives its progress.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from prometheus_client import Counter, Gauge
from safetensors import numpy as safetensors

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.sinks import Cursor, SinksLedger
from fedstream.broker.published import as_given, read_newest
from fedstream.broker.streams import Entry, Reader
from fedstream.core.errors import BadMessage, BlobMissing, ConfigError, FedstreamError, NoRun
from fedstream.core.layout import Model
from fedstream.core.messages import Event, Message, Version
from fedstream.runtime.backoff import pause
from fedstream.runtime.service import Context, repeat
from fedstream.sinks.sink import (
    Feed,
    PointKind,
    Reached,
    Sink,
    SinkSettings,
    TrackedPoint,
    TrackedRun,
    TrackedValue,
    counted,
    tasks_of,
    told,
)

if TYPE_CHECKING:
    from aiohttp import web

    from fedstream.core.records import Head, Run

M = TypeVar("M", bound=Message)
T = TypeVar("T")

DRAIN_S = 30.0
_REST_S = 10.0  # time limit for writing the rest when stopped
_COUNT = 1000  # entries of a stream in one batch
_MEASURED_WITHIN_S = 120.0  # time limit for evaluating the last version


class TrackerFailed(FedstreamError):
    """An error of a tracker, which may work again later."""

    retriable = True

    def __init__(self, sink: str, error: Exception) -> None:
        reason = str(error).strip().splitlines() or [""]
        super().__init__(f"{sink}: {type(error).__name__}: {reason[0][:300]}")


@dataclass(frozen=True)
class Named:
    """The settings of a sink, and its unique name in the run."""

    name: str
    settings: SinkSettings
    make: Callable[[], Sink]


class Sinks:
    """The sinks service. ``parameters``: of the run, for the trackers."""

    role = "sinks"

    def __init__(
        self,
        sinks: Sequence[Named],
        parameters: Mapping[str, TrackedValue],
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
    ) -> None:
        if not sinks:
            raise ConfigError('no sinks: add a table [[sinks]] with kind = "tensorboard", say')
        self._client = Client(redis, name)
        self._ledger = SinksLedger(self._client, keys, name)
        self._sinks = [(named, named.make()) for named in sinks]
        self._parameters = parameters

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The service has no routes."""
        return ()

    async def run(self, context: Context) -> None:
        """Write until stopped, then write the rest."""
        metrics = SinkMetrics(context)
        context.watch(self._client)
        try:
            async with asyncio.TaskGroup() as group:
                for named, sink in self._sinks:
                    writer = Tracking(
                        named, sink, self._parameters, self._client, self._ledger, context, metrics
                    )
                    group.create_task(writer.work(), name=named.name)
        finally:
            await self._client.close()


class SinkMetrics:
    """The service's metrics."""

    def __init__(self, context: Context) -> None:
        registry = context.registry
        self.version = Gauge(
            "fedstream_sink_version",
            "The newest version written to the tracker.",
            ["sink"],
            registry=registry,
        )
        self.points = Counter(
            "fedstream_sink_points",
            "Versions and evaluations written to the tracker.",
            ["sink", "kind"],
            registry=registry,
        )
        self.lost = Gauge(
            "fedstream_sink_lost_versions",
            "Versions that Redis had trimmed before they could be written to the tracker.",
            ["sink"],
            registry=registry,
        )
        self.failures = Counter(
            "fedstream_sink_failures",
            "Attempts to write to the tracker that failed.",
            ["sink"],
            registry=registry,
        )


class Tracking:
    """Writes a run to one sink."""

    def __init__(
        self,
        named: Named,
        sink: Sink,
        parameters: Mapping[str, TrackedValue],
        client: Client,
        ledger: SinksLedger,
        context: Context,
        metrics: SinkMetrics,
    ) -> None:
        self._name, self._settings, self._sink = named.name, named.settings, sink
        self._parameters = parameters
        self._client, self._ledger, self._context = client, ledger, context
        self._metrics = metrics
        self._log = context.log.bind(sink=named.name)
        self._run: Run | None = None  # the run that the tracker has begun
        self._ended = False
        for kind in get_args(PointKind):  # shown before the first one
            metrics.points.labels(self._name, kind)
        metrics.failures.labels(self._name)
        metrics.version.labels(self._name).set(-1)
        metrics.lost.labels(self._name)

    async def work(self) -> None:
        """Write until stopped, then write the rest."""
        try:
            await repeat(self._context, f"sink {self._name}", self._step, within_s=600.0)
            await self._write_rest()
        finally:
            with suppress(TrackerFailed):
                await self._ask(self._sink.close)

    async def _write_rest(self) -> None:
        """Write the rest, retrying for a few seconds."""
        until = time.monotonic() + _REST_S
        while True:
            try:
                run = await self._ledger.run()
                await self._begin_if_new(run)
                while not self._ended and await self._write(run, block_ms=0):
                    pass
                if not self._ended:
                    await self._end_if_over(stopping=True)
            except NoRun:
                pass
            except FedstreamError as error:
                if not error.retriable:
                    raise
                if time.monotonic() < until:
                    await asyncio.sleep(0.2)
                    continue
                self._log.error("stopped before everything was written", reason=str(error))
            return

    async def _step(self) -> None:
        """Write a batch, or wait for one."""
        try:
            run = await self._ledger.run()
        except NoRun:
            await pause(self._context.stop, 0.2)
            return
        await self._begin_if_new(run)
        if self._ended and run.state == "finished":
            await pause(self._context.stop, 0.5)
            return
        if await self._write(run, block_ms=1000):
            await pause(self._context.stop, self._settings.every_s)
        else:
            await self._end_if_over(stopping=False)

    async def _begin_if_new(self, run: Run) -> None:
        """Open the tracker for a new run, and start from the tracker's progress."""
        if self._run is not None and self._run.lineage == run.lineage:
            return
        cursor = await self._ledger.cursor(self._name, run.lineage)
        goals = {f"goal.{name}": goal for name, goal in run.goal.items()}
        tracked = TrackedRun(
            run.lineage, self._ledger.keys.name, run.created, {**self._parameters, **goals}
        )
        reached = await self._ask(lambda: self._sink.begin(tracked))
        own = Reached(cursor.version, cursor.evaluation, cursor.devices)
        self._feed = Feed(own if reached is None else reached, cursor.lost)
        keys = self._ledger.keys
        # From the beginning: the tracker may be behind the cursor, and streams are short.
        self._reader = Reader(self._client, {keys.models: "0", keys.events: "0"})
        self._run, self._ended = run, cursor.ended
        self._show()
        self._log.info("tracking", **self._feed.reached.__dict__, ended=cursor.ended)

    async def _write(self, run: Run, *, block_ms: int) -> bool:
        """Write new points, and save the cursor; return whether Redis had new entries."""
        keys, lost = self._ledger.keys, self._feed.lost
        found = await self._reader.read(count=_COUNT, block_ms=block_ms)
        points = self._feed.points(
            _messages(found.get(keys.models, ()), Version),
            _messages(found.get(keys.events, ()), Event),
        )
        if points:
            points = counted(points, tasks_of(await self._counts()))
            await self._ask(lambda: self._sink.write(points))
            for point in points:
                self._metrics.points.labels(self._name, point.kind).inc()
        if self._feed.lost > lost:
            self._log.warning(
                "versions were gone before they could be written: Redis keeps the newest 10,000",
                lost=self._feed.lost - lost,
            )
        if points or self._feed.lost > lost:
            await self._save(run, ended=False)
        return bool(found)

    async def _counts(self) -> dict[str, int]:
        try:
            return await self._ledger.counts()
        except FedstreamError:
            self._run = None  # the entries must be read again
            raise

    async def _end_if_over(self, *, stopping: bool) -> None:
        """Complete the record if the run is finished and its last version measured."""
        run, head = await self._ledger.run(), await self._ledger.head()
        if run.state != "finished" or head is None:
            return
        waited = self._ledger.now() - (run.finished or 0.0) > _MEASURED_WITHIN_S
        if not (stopping or waited or self._feed.has_tried(head.version)):
            return
        summary: dict[str, TrackedValue] = {
            "versions": head.version,
            "why": run.why or "",
            **tasks_of(await self._ledger.counts()),
            **self._feed.measured,
        }
        if self._feed.lost:
            summary["versions not tracked"] = self._feed.lost
        model = await self._model(run, head) if self._settings.save_model else None
        with _file_of(model, head, self._ledger.keys.name) as file:
            await self._ask(lambda: self._sink.end(summary, file))
        await self._save(run, ended=True)
        self._ended = True
        self._log.info("complete", version=head.version)

    async def _model(self, run: Run, head: Head) -> Model | None:
        model = Model(run.layout)
        try:
            await read_newest(self._client, self._ledger.keys, head, model)
        except BlobMissing as error:
            self._log.warning("the final model could not be read", reason=str(error))
            return None
        return model

    async def _save(self, run: Run, *, ended: bool) -> None:
        reached = self._feed.reached
        cursor = Cursor(
            run.lineage,
            reached.version,
            reached.evaluation,
            self._feed.lost,
            ended,
            devices=reached.devices,
        )
        self._show()
        await self._ledger.save(self._name, cursor)

    def _show(self) -> None:
        self._metrics.version.labels(self._name).set(self._feed.reached.version)
        self._metrics.lost.labels(self._name).set(self._feed.lost)

    async def _ask(self, call: Callable[[], T]) -> T:
        """Call the tracker in a thread. Raises TrackerFailed; the tracker must then begin again."""
        try:
            return await asyncio.to_thread(call)
        except FedstreamError:
            raise
        except Exception as error:
            self._run = None
            self._metrics.failures.labels(self._name).inc()
            self._log.debug("tracker raised", exc_info=error)
            raise TrackerFailed(self._name, error) from error


def _messages(entries: Iterable[Entry], kind: type[M]) -> Iterator[M]:
    """Messages of the entries, skipping undecodable ones."""
    for entry in entries:
        with suppress(BadMessage):
            yield kind.decode(entry.data)


@contextmanager
def _file_of(model: Model | None, head: Head, run: str) -> Iterator[Path | None]:
    """The model as a temporary safetensors file."""
    if model is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="fedstream-model-") as folder:
        file = Path(folder) / "model.safetensors"
        about = {"version": str(head.version), "digest": head.digest, "run": run}
        safetensors.save_file(model.tensors(), file, about | as_given(head))
        yield file


class DirectSinks:
    """Writes a run's points to its trackers in batches; a failing tracker is reported and dropped.

    The run waits meanwhile, so a slow tracker makes a simulation slow.
    """

    def __init__(self, sinks: Sequence[Named], run: TrackedRun, say: Callable[[str], None]) -> None:
        """Begin. Raises ConfigError if a tracker's package is missing."""
        self._say = say
        self._sinks: dict[str, Sink] = {named.name: named.make() for named in sinks}
        self._models = {named.name for named in sinks if named.settings.save_model}
        self._every_s = min((named.settings.every_s for named in sinks), default=0.0)
        self._feed = Feed(Reached())
        self._points: list[TrackedPoint] = []
        self._wrote = time.monotonic()
        self._each(lambda _, sink: sink.begin(run))

    def publish(self, version: Version, *measured: Event) -> None:
        """Add a version and its measurements."""
        if not self._sinks:
            return
        self._points += self._feed.points([version], measured)
        if time.monotonic() - self._wrote >= self._every_s:
            self._write()

    def end(self, summary: Mapping[str, object], model: Path, *, finished: bool) -> None:
        """Write the rest, and complete the records if the run is ``finished``."""
        self._write()
        plain = told(summary)
        if finished:
            self._each(lambda name, sink: sink.end(plain, model if name in self._models else None))
        self._each(lambda _, sink: sink.close())

    def _write(self) -> None:
        points, self._points = self._points, []
        self._each(lambda _, sink: sink.write(points))
        self._wrote = time.monotonic()

    def _each(self, call: Callable[[str, Sink], object]) -> None:
        for name, sink in list(self._sinks.items()):
            try:
                call(name, sink)
            except Exception as error:  # the run continues without the tracker
                del self._sinks[name]
                with suppress(Exception):  # its failure is reported already
                    sink.close()
                self._say(f"{name} failed, and is left out from here on: {error}")
