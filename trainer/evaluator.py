"""The evaluator: follows versions, evaluates the newest on the test data, reports the metrics.

Metrics on the devices' own test data measure how well a model serves each device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite, nan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from aiohttp import web
from prometheus_client import Gauge, Summary
from pydantic import Field

from fedstream.broker.client import Client, RedisSettings
from fedstream.broker.keys import Keys
from fedstream.broker.ledger.evaluator import EvaluatorLedger
from fedstream.broker.published import read_newest, with_unshared
from fedstream.broker.streams import Reader
from fedstream.core.errors import BadMessage, BlobMissing, NoRun, innermost
from fedstream.core.layout import Model
from fedstream.core.messages import Event, Goal
from fedstream.core.records import Best, Head, Run
from fedstream.runtime.backoff import pause
from fedstream.runtime.config import Section
from fedstream.runtime.plugins import users_traceback, words
from fedstream.runtime.service import Context, repeat
from fedstream.trainer.adaptive_steps import Scorer, StepProposals
from fedstream.trainer.data import Processor, Threads, check, placed
from fedstream.trainer.device_evaluations import DeviceEvaluations, is_due
from fedstream.trainer.goals import (
    Stopping,
    StopSettings,
    Swings,
    goal_of,
    is_over_devices,
    main_metric,
)
from fedstream.trainer.on_devices import OnDevicesSettings, device_metrics, spread
from fedstream.trainer.task import Task, check_run, measured, untrained

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.strategies.adapt import Adapt

PerDevice: TypeAlias = Literal["never", "last", "always"]
"""When devices are measured: never, with a run's last version, with every measurement."""

_GONE_S = 0.1  # between attempts to read a model


class EvaluatorSettings(Section):
    """The table ``[evaluator]``: the interval of evaluations, and their resources."""

    every: Annotated[int, Field(ge=1)] = 10  # versions; a run's last version is always evaluated
    batch_size: Annotated[int, Field(ge=1)] | None = None  # of the default metrics; None: 512
    threads: Threads = 1  # of torch
    device: Processor = "cpu"  # of torch
    per_device: PerDevice = "never"  # devices' own test data; also in a simulation
    on_devices: OnDevicesSettings | None = None  # measured by the devices themselves
    drain_s: Annotated[float, Field(gt=0)] = 20.0


class Evaluator:
    """The evaluator service. ``load``: creates the task. ``stop``: when to end the run early."""

    role = "evaluator"

    def __init__(
        self,
        settings: EvaluatorSettings,
        *,
        keys: Keys,
        redis: RedisSettings,
        name: str,
        load: Callable[[], Task],
        stop: StopSettings | None,
        run_devices: int | None = None,
        adapt: tuple[Adapt, Path] | None = None,
    ) -> None:
        """``run_devices``: the key ``task.devices``; None: the task decides. ``adapt``: how the
        rule's step adapts, and the journal's folder; None: it doesn't.
        """
        self._adapt = adapt
        self._alone = asyncio.Lock()  # held while the module is used
        self._run_devices = run_devices
        self._settings = settings
        self._keys = keys
        self._name = name
        self._load = load
        self._stop = stop
        self._client = Client(redis, name)
        self._ledger = EvaluatorLedger(self._client, keys, name)
        self._models = Reader(self._client, {keys.models: "0"})
        self._measured: int | None = None  # the last measured version
        self._created: float | None = None  # when the run began that is being measured
        self._ends = ""  # why the last measurement of an earlier evaluator ends the run
        self._lacks_spread = False  # measured without devices
        self._on_devices: DeviceEvaluations | None = None

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """The evaluator serves no routes."""
        return ()

    async def run(self, context: Context) -> None:
        """Evaluate until stopped."""
        self._context = context
        self._metrics = Gauge(
            "fedstream_metric", "The newest measurement.", ["metric"], registry=context.registry
        )
        self._relapses = Gauge(
            "fedstream_metric_relapses",
            "How often a metric fell back, in the newest 20 measurements.",
            ["metric"],
            registry=context.registry,
        )
        self._version = Gauge(
            "fedstream_measured_version", "The version measured last.", registry=context.registry
        )
        self._seconds = Summary(
            "fedstream_evaluation_seconds", "How long measuring took.", registry=context.registry
        )
        context.watch(self._client)
        loaded = False
        context.health.ready_when("task loaded", lambda: loaded)
        await asyncio.to_thread(self._prepare)
        loaded = True
        on_devices = self._settings.on_devices
        if not self._measures and on_devices is None:
            context.log.info("nothing to measure: the task has no test data")
        measuring = repeat(context, "models", self._step, within_s=600.0)
        try:
            if on_devices is None and self._proposals is None:
                await measuring
                return
            async with asyncio.TaskGroup() as group:
                group.create_task(measuring)
                if on_devices is not None:
                    self._on_devices = DeviceEvaluations(
                        on_devices,
                        on_devices.every or self._settings.every,
                        self._ledger,
                        Reader(self._client, {self._keys.models: "0"}),
                        context,
                        self._learning.goal,
                        self._candidate,
                        self._found,
                    )
                    group.create_task(repeat(context, "devices", self._evaluate_devices))
                if self._proposals is not None:
                    group.create_task(repeat(context, "steps", self._adapt_steps, within_s=600.0))
        finally:
            await self._client.close()

    def _found(self, metrics: dict[str, float], version: int) -> str:
        """Show what devices measured; returns why the run ends, '' if it goes on."""
        self._show(metrics)
        return self._stopping.add(metrics, version)

    async def _evaluate_devices(self) -> None:
        """Take the evaluation on the devices a step further, once :meth:`_step` knows the run."""
        assert self._on_devices is not None  # noqa: S101  (made before this is first called)
        with suppress(NoRun):
            run = await self._ledger.run()
            if run.created == self._created:
                await self._on_devices.step(run)
                return
        await pause(self._context.stop, _GONE_S)

    async def _adapt_steps(self) -> None:
        """Take the proposals of steps further."""
        assert self._proposals is not None  # noqa: S101  (made before this is first called)
        try:
            run = await self._ledger.run()
        except NoRun:
            await pause(self._context.stop, _GONE_S)
            return
        await self._proposals.step(run)

    def _prepare(self) -> None:
        import torch

        from fedstream.trainer.vector import layout_of

        place = self._settings.device
        check("evaluator.device", place)
        torch.set_num_threads(self._settings.threads)
        self._learning = self._load()
        data = self._learning.test_data()
        self._data: Dataset[object] | None = data if data is None else placed(data, place)
        Stopping(self._stop, self._learning.goal)  # raises
        self._module: nn.Module = untrained(self._learning).to(place)
        self._layout = layout_of(self._module)
        self._proposals: StepProposals | None = None
        if self._adapt is not None:
            adapt, journal = self._adapt
            self._proposals = StepProposals(
                journal,
                adapt.every,
                Scorer(adapt, self._learning, self._module, place),
                self._ledger,
                Reader(self._client, {self._keys.models: "0"}),
                self._context,
                self._alone,
            )

    async def _begin(self, run: Run) -> None:
        """Begin to measure a run; with ``patience``, first recall the measurements so far.

        An earlier evaluator may have died after a measurement that ends the run. The last
        evaluation on the devices is recalled too.
        """
        goals = self._learning.goal
        self._swings, self._stopping = Swings(goals), Stopping(self._stop, goals)
        self._measured, self._lacks_spread, self._ends = None, False, ""
        self._names: set[str] = set()  # of all metrics that were measured
        has_patience = self._stop is not None and self._stop.patience is not None
        last = await self._remember() if has_patience or self._on_devices is not None else None
        if self._on_devices is not None:
            self._on_devices.begin(run, last)
        self._whole = await with_unshared(self._client, self._keys, run.layout)
        self._created = run.created

    async def _remember(self) -> int | None:
        """Recall the measurements; returns the version that devices evaluated last."""
        last: int | None = None
        events = Reader(self._client, {self._keys.events: "0"})
        while found := await events.read(count=1000, block_ms=1):
            for entry in found[self._keys.events]:
                with suppress(BadMessage):
                    event = Event.decode(entry.data)
                    if event.metrics and event.version is not None:
                        self._names |= event.metrics.keys()
                        self._ends = self._stopping.add(event.metrics, event.version) or self._ends
                    if event.what == "devices_evaluated":
                        last = event.version
                    elif event.metrics:
                        self._measured = event.version
                        self._lacks_spread = self._settings.per_device == "last" and not any(
                            map(is_over_devices, event.metrics)
                        )
        return last

    async def _step(self) -> None:
        """Evaluate the newest version if it is due, else wait for the next."""
        head = await self._ledger.head()
        try:
            run = await self._ledger.run()
        except NoRun:
            await self._models.read(count=1000)  # from the first version on
            return
        if run.created != self._created:
            await self._begin(run)
        if self._ends and run.state != "finished":
            await self._ledger.finish(self._ends)
        self._ends = ""
        devices = self._run_devices or self._learning.run_devices
        each = devices if self._settings.per_device != "never" else None
        check_run(run, self._keys.name, self._layout, each, self.role)
        if run.state == "finished":  # then this is the last version
            head = await self._ledger.head()
        if head is not None and self._measures and self._is_due(head, run.state):
            await self._measure(head, run)
        elif run.state == "finished" or not self._measures:
            await pause(self._context.stop, 0.5)
        else:
            await self._models.read(count=1000)

    def _is_due(self, head: Head, state: str) -> bool:
        is_over = state == "finished"
        if is_over and self._lacks_spread:
            return True
        return is_due(head.version, self._measured, self._settings.every, is_over=is_over)

    @property
    def _measures(self) -> bool:
        """Whether there is anything to measure in this run."""
        return self._data is not None or self._settings.per_device != "never"

    async def _measure(self, head: Head, run: Run) -> None:
        if not await self._ledger.pin(head.blob):  # superseded, or lost by Redis
            await pause(self._context.stop, _GONE_S)
            return
        model = Model(self._whole)
        is_last = run.state == "finished" or head.version >= run.versions
        try:
            await read_newest(self._client, self._keys, head, model)
        except BlobMissing:  # Redis was full, or has lost it
            await pause(self._context.stop, _GONE_S)
            return
        try:
            async with self._alone:
                with self._seconds.time():
                    metrics = await asyncio.to_thread(
                        self._evaluate, model, head.version, run.devices, is_last
                    )
        except Exception as error:
            await self._report(error, head)
            self._measured, self._lacks_spread = head.version, False
            return
        self._show(metrics)
        self._version.set(head.version)
        self._context.log.info("measured", version=head.version, metrics=metrics)
        await self._ledger.tell(
            Event(
                what="evaluation",
                service=self._name,
                time=self._ledger.now(),
                version=head.version,
                metrics=metrics,
            ),
            *self._candidate(metrics, head.version, head.given, head.blob),
        )
        lacks_spread = not self._is_spread(metrics, head.version, is_last)
        if why := self._stopping.add(metrics, head.version):
            await self._ledger.finish(why)
        # Set last, so that an unreported measurement is repeated.
        self._measured, self._lacks_spread = head.version, lacks_spread

    def _candidate(
        self, metrics: Mapping[str, float], version: int, given: str, blob: str
    ) -> tuple[()] | tuple[Best, Goal]:
        """The measured version and the goal of the main metric; () if it can't be the best."""
        self._names |= metrics.keys()
        goals, stop = self._learning.goal, self._stop
        metric = main_metric(self._names, goals, stop.metric if stop else None)
        goal = goal_of(metric, goals) if metric else None
        if metric is None or goal is None or not isfinite(metrics.get(metric, nan)):
            return ()
        return Best(metric, metrics[metric], version, given, blob), goal

    def _show(self, metrics: Mapping[str, float]) -> None:
        self._swings.add(metrics)
        for name, value in metrics.items():
            self._metrics.labels(name).set(value)
        for name, swing in self._swings.items():
            self._relapses.labels(name).set(swing.times)

    async def _report(self, error: Exception, head: Head) -> None:
        """Report an error of the user's metrics; the run continues without this measurement."""
        self._context.log.error("metrics raised", version=head.version, exc_info=error)
        await self._ledger.tell(
            Event(
                what="error",
                service=self._name,
                time=self._ledger.now(),
                version=head.version,
                reason=f"metrics: {type(innermost(error)).__name__}",
                text=(users_traceback(error) or words(error))[-8000:],
            )
        )

    def _is_spread(self, metrics: Mapping[str, float], version: int, is_last: bool) -> bool:
        """Whether the measurement is complete: no metrics of devices are left for the end."""
        ends = is_last or bool(self._stopping.why(metrics, version))
        return ends or self._settings.per_device != "last"

    def _evaluate(
        self, model: Model, version: int, devices: int, is_last: bool
    ) -> dict[str, float]:
        """The task's metrics, and their spread over devices. Runs in a worker thread."""
        from fedstream.trainer import vector

        vector.load(model, self._module)
        metrics: dict[str, float] = {}
        if self._data is not None:
            metrics = measured(self._learning, self._module, self._data)
        if self._settings.per_device != "never" and self._is_spread(metrics, version, is_last):
            found = device_metrics(
                self._learning,
                self._module,
                devices,
                self._settings.device,
                self._context.stop.is_set,
            )
            if not self._context.stop.is_set():  # else some devices are missing
                metrics |= spread(found, self._learning.goal)
        return metrics
