"""The simulation's engine: trains arrivals in order and passes them to the server's rule.

The rule is the updater's own (:mod:`fedstream.journal.progress`). Local training is the trainer's
own (:meth:`fedstream.trainer.task.Task.train`), or its equivalent for several devices at once.
"""

from __future__ import annotations

import math
import pickle
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from fedstream.coordinator.cooldowns import most_refused, no_device_works
from fedstream.core import reasons
from fedstream.core.errors import ConfigError, DataError
from fedstream.core.layout import Layout, Model
from fedstream.core.messages import Contribution, DevicesEvaluated, Goal, Upload
from fedstream.journal.progress import Progress, Step, close_round, take
from fedstream.journal.records import Counted
from fedstream.runtime.plugins import about, place_of, words
from fedstream.simulation.arrivals import Arrival, Job, PlannedEvent, RoundOver, plan
from fedstream.simulation.record import Happened, SimulationRecorder
from fedstream.simulation.transport import Transport
from fedstream.strategies import State
from fedstream.strategies.adapt import Windows
from fedstream.trainer.adaptive_steps import Scorer
from fedstream.trainer.goals import best_of, goal_of, unknown_goal
from fedstream.trainer.solvers import Cancelled, SolverSettings, minibatches_in
from fedstream.trainer.task import declared_goals
from fedstream.updater.decider import refusal_by_content, refusal_by_metadata

if TYPE_CHECKING:
    from torch import nn

    from fedstream.settings.config import Settings
    from fedstream.trainer.solvers import Trained
    from fedstream.trainer.task import Task

_EndState: TypeAlias = tuple[Literal["finished", "interrupted", "failed"], str]  # and why

_NO_DIGEST = "none"  # without a journal
_AHEAD = 128  # arrivals searched for ones that can be trained together
_SAVE_S = 300.0  # between two checkpoints
_MADE_ANEW = {  # after a restart; everything else is in the checkpoint
    "_settings",
    "_on_version",
    "_on_error",
    "_plan",
    "_strategy",
    "_training",
    "_measure",
    "_scorer",
    "_journal",
    "_checkpoint",
}


@dataclass(frozen=True, slots=True)
class VersionMade:
    """A version, and the cumulative cost of reaching it."""

    version: int
    updates: tuple[Contribution, ...]
    """updates in this version"""
    used: int
    """updates so far that went into a version"""
    gradients: int
    """local steps in those updates"""
    epochs: float
    """passes over a device's data in those updates (FedAsync's 'global epochs' are versions)"""
    communications: int
    """models that the server sent and received so far, including refused ones"""
    time: float
    """in virtual seconds; without a clock, the number of arrivals"""
    loss: float | None
    """mean training loss of its updates"""
    metrics: dict[str, float]
    """on the test data; empty if not measured"""
    on_devices: DevicesEvaluated | None = None
    """the evaluation on the devices, whose metrics are among ``metrics``; None: there is none"""


@dataclass
class SimulationResult:
    """Result of a simulation."""

    versions: list[VersionMade]
    model: Model
    """of the newest version, as published"""
    module: nn.Module
    """the same model as a module"""
    devices: int
    state: Literal["finished", "interrupted", "failed"]
    why: str
    refused: Counter[str] = field(default_factory=Counter)
    given_up: Counter[str] = field(default_factory=Counter)
    """tasks that raised or became too stale, by reason"""
    failing: dict[int, tuple[int, str]] = field(default_factory=dict)
    """devices with several errors in a row: their number, and the last error"""
    seconds: float = 0.0
    """real time, not virtual"""
    measuring: float = 0.0
    """seconds of that spent on metrics"""
    together: int = 0
    """updates trained together with others"""
    start: str = ""
    """source and digest of version 0; '' if it was drawn from the seed"""
    per_device: dict[int, dict[str, float]] = field(default_factory=dict)
    """last measured metrics on each device's own test data (``evaluator.per_device``)"""
    update_bytes: int = 0
    """bytes of all arrived updates, in their wire format"""
    goal: Mapping[str, Goal] = field(default_factory=dict)
    """goals of metrics, declared by the task"""
    steps: list[tuple[int, float]] = field(default_factory=list)
    """versions at which the rule's step changed, each with the rate from then on"""
    remembering: int = 0
    """devices with error feedback; each takes the memory of a model's parameters"""
    precision: str = ""
    """with ``solver.precision = "bf16"``: the faster of bf16 and float32, which was used"""

    @property
    def measured(self) -> list[VersionMade]:
        """Versions that were measured."""
        return [made for made in self.versions if made.metrics]

    def best(self, name: str = "accuracy") -> float:
        """Best value of a metric over the measured versions.

        Raises ConfigError for a metric without a goal.
        """
        goal = goal_of(name, self.goal)
        if goal is None:
            raise ConfigError(unknown_goal(name))
        found = best_of(((made.metrics[name], 0) for made in self.measured), goal)
        return found[0] if found else math.nan

    def last(self, name: str = "accuracy") -> float:
        """Value of a metric at the last measured version."""
        return self.measured[-1].metrics[name]


def simulate(
    settings: Settings,
    task: Task | None = None,
    *,
    arrivals: Iterable[PlannedEvent] | None = None,
    journal: Path | None = None,
    lineage: str | None = None,
    on_version: Callable[[VersionMade, Model], object] | None = None,
    on_error: Callable[[str], object] = lambda _text: None,
    cancelled: Callable[[], bool] = lambda: False,
    checkpoint: Path | None = None,
) -> SimulationResult:
    """Simulate the run that ``settings`` describe, to its end.

    ``task``: the task that ``settings`` name, if already loaded, so that many simulations read its
    data only once. ``arrivals``: events to use instead of :func:`arrivals.plan`; there must be
    enough for all versions. ``journal``: a folder to write a journal to; ``lineage``: the run's id
    there, drawn by default. ``on_version``: called for every version, including 0; the model is
    valid only during the call. ``on_error``: called with an error of the task and its traceback,
    once for each raising place. ``checkpoint``: a file in which the run is saved every five
    minutes, and from which it continues if the file exists: with the same bits, but without
    ``on_version`` for earlier versions. It is unpickled, so it must be your own; it fits only the
    same settings, task and release, and no journal.

    A device on which the task raises gives its task up and rests, as in a live run. Raises
    ConfigError, JournalError; DataError, naming the device, for an error of the task if no device
    works; Fenced if the folder already has a journal.
    """
    from fedstream.settings.services import task_of
    from fedstream.simulation.training import use_of_torch

    with use_of_torch(settings.simulation) as threads, ExitStack() as stack:
        run = _Simulation(
            settings,
            task or task_of(settings),
            arrivals,
            journal,
            lineage or secrets.token_hex(8),
            on_version,
            on_error,
            cancelled,
            threads,
            checkpoint,
        )
        stack.callback(run.close)
        return run.result()


@dataclass(slots=True)
class _Base:
    """Version that devices may start from."""

    model: Model
    version: int
    digest: str


class _Bases:
    """The models that devices may start from, by the plan's versions, and reusable models.

    The plan counts versions as if no update were refused: each planned version has the model that
    was the newest at that moment.
    """

    def __init__(self, first: State, digest: str, transport: Transport) -> None:
        self.newest = 0  # the plan's newest version
        self._transport = transport
        self._free: list[Model] = []
        self.published = self._as_published(first, digest)
        self._bases = {0: self.published}

    def base(self, tau: int) -> _Base:
        """The model of one of the plan's versions."""
        return self._bases[tau]

    def publish(self, state: State, digest: str) -> None:
        """Publish a version; ``digest``: of its model, or 'none' if digests are not needed."""
        last, self.published = self.published, self._as_published(state, digest)
        if self._transport.copies:
            self.release(state, last.model)

    def _as_published(self, state: State, digest: str) -> _Base:
        """A version's model as devices receive it."""
        model = state.model
        if self._transport.copies:
            model = self.spare(state.model.layout)
            digest = self._transport.publish(state.model, state.version, model)
        return _Base(model, state.version, digest)

    def add(self) -> None:
        """Use the last published model for the plan's next version."""
        self.newest += 1
        self._bases[self.newest] = self.published

    def drop(self, oldest: int, state: State) -> None:
        """Forget versions below ``oldest``, from which no device will start."""
        for old in [version for version in self._bases if version < oldest]:
            self.release(state, self._bases.pop(old).model)

    def spare(self, layout: Layout) -> Model:
        """A model to write into."""
        return self._free.pop() if self._free else Model(layout)

    def release(self, state: State, *models: Model) -> None:
        """Return models for reuse, except published ones and those in the state."""
        used = {id(model) for model in (*state.models(), self.published.model)}
        used |= {id(base.model) for base in self._bases.values()}
        self._free += [model for model in models if id(model) not in used]


@dataclass(slots=True)
class _Cost:
    """The cost of the run so far."""

    answers: int = 0
    used: int = 0
    gradients: int = 0
    epochs: float = 0.0

    def add(self, update: Contribution, solver: SolverSettings) -> None:
        """Count an update in a version, and the passes that its solver made over the data."""
        self.used += 1
        self.gradients += update.steps
        # a user's own train() may report 0 samples
        self.epochs += (
            update.steps * solver.accumulate / (minibatches_in(update.samples, solver) or 1)
        )


class _Simulation:
    """A simulation in progress."""

    def __init__(
        self,
        settings: Settings,
        task: Task,
        arrivals: Iterable[PlannedEvent] | None,
        journal: Path | None,
        lineage: str,
        on_version: Callable[[VersionMade, Model], object] | None,
        on_error: Callable[[str], object],
        cancelled: Callable[[], bool],
        threads: int,
        checkpoint: Path | None,
    ) -> None:
        from fedstream.settings.dry_step import try_task
        from fedstream.settings.services import devices_of
        from fedstream.settings.start import first_model
        from fedstream.simulation.training import Measuring, Training, blamed

        self._settings = settings
        self._goal = declared_goals(task)
        self._on_version = on_version
        self._on_error = on_error
        self._raised: set[str] = set()  # the places that raised before
        self._devices = devices_of(settings, task)
        if settings.private.policy is not None:
            raise ConfigError(
                "private.policy: a simulation has no devices and no helper between which to share "
                "updates: leave it out, or train with `fedstream run --private`"
            )
        on_devices = settings.evaluator.on_devices
        measured = settings.simulation.evaluate_every or (on_devices and on_devices.every)
        if settings.run.stop and not measured:
            raise ConfigError(
                "run.stop decides by measurements, but simulation.evaluate_every = 0 measures the "
                "last version alone: set it to 1 or more"
            )
        self._failed: set[int] = set()  # numbers of tasks, for the plan
        self._is_planned = arrivals is None
        self._plan = self._planned() if arrivals is None else iter(arrivals)
        self._strategy = settings.rule.build(self._devices)
        tried = try_task(settings, task, self._devices, simulated=True, cancelled=cancelled)
        with blamed("model()"):
            x_0, self._start = first_model(
                task, settings.run.seed, settings.run.start, controls=self._strategy.controls
            )
        self._training = Training(settings, task, self._strategy, self._devices, cancelled, threads)
        self._measure = Measuring(settings, task, self._training, self._devices, tried.test_data)
        self._progress = Progress(State(0, x_0))
        self._digest = x_0.digest(settings.wire.digest) if journal else _NO_DIGEST
        self._transport = Transport(settings.wire, self._strategy.sends)
        self._models = _Bases(self._progress.state, self._digest, self._transport)
        self._ahead: deque[PlannedEvent] = deque()
        self._taken = 0  # events of the plan
        self._trained: dict[int, tuple[Trained, Job]] = {}  # by task number
        self._entries = self._streak = 0
        self._refused: Counter[str] = Counter()
        self._given_up: Counter[str] = Counter()
        self._failing: dict[int, tuple[int, str]] = {}  # device -> failures in a row, the error
        self._in_a_row: Counter[int] = Counter()  # failures since the last update, by device
        self._cost = _Cost()
        self._measuring = self._seconds = 0.0
        self._versions: list[VersionMade] = []
        self._steps: list[tuple[int, float]] = []
        self._scorer: Scorer | None = None
        if (adapt := settings.strategy.adapt) is not None:
            module, place = self._training.module, settings.simulation.device
            self._scorer, self._windows = Scorer(adapt, task, module, place), Windows(adapt.every)
        self._ending: _EndState | None = None
        self._journal = (
            SimulationRecorder(
                journal,
                settings,
                self._devices,
                self._progress,
                self._digest,
                self._start,
                self._goal,
                lineage,
            )
            if journal
            else None
        )
        self._checkpoint = checkpoint
        if checkpoint is not None:
            if journal:
                raise ConfigError("a simulation with a journal has no checkpoint: leave one out")
            if checkpoint.is_file():
                self._restore(checkpoint)

    def close(self) -> None:
        """Sync the journal to disk and close it."""
        if self._journal is not None:
            self._journal.close()

    def result(self) -> SimulationResult:
        """Run the simulation to its end."""
        from fedstream.trainer.vector import load

        began = time.perf_counter() - self._seconds
        saved = time.monotonic()
        if not self._versions:
            self._tell(self._made(Step(self._progress, made=()), 0.0))
        while self._ending is None:
            if self._checkpoint is not None and time.monotonic() >= saved + _SAVE_S:
                self._seconds = time.perf_counter() - began
                self._save(self._checkpoint)
                saved = time.monotonic()
            try:
                event = self._next()
                if isinstance(event, RoundOver):
                    self._end_round(event)
                    self._follow(event)
                elif (trained := self._trained_for(event)) is not None:
                    self._take(event, *trained)
                    self._follow(event)
            except Cancelled:
                self._ending = "interrupted", f"at version {self._progress.state.version}"
        state, why = self._ending
        failing = {device: known for device, known in self._failing.items() if known[0] > 1}
        module, model = self._training.module, self._models.published.model.copy()
        load(model, module)
        return SimulationResult(
            self._versions,
            model,
            module,
            self._devices,
            state,
            why,
            self._refused,
            self._given_up,
            dict(sorted(failing.items())),
            time.perf_counter() - began,
            self._measuring,
            self._training.together,
            self._start,
            self._measure.per_device,
            self._transport.update_bytes,
            self._goal,
            self._steps,
            self._transport.remembering,
            self._training.precision.chosen,
        )

    # the checkpoint

    def _save(self, checkpoint: Path) -> None:
        state = {name: one for name, one in vars(self).items() if name not in _MADE_ANEW}
        new = checkpoint.with_name(f"{checkpoint.name}.new")
        with new.open("wb") as file:
            pickle.dump((state, self._training.local, self._training.precision.chosen), file)
        new.replace(checkpoint)

    def _restore(self, checkpoint: Path) -> None:
        try:
            kept = pickle.loads(checkpoint.read_bytes())  # noqa: S301  (own)
            state, self._training.local, self._training.precision.chosen = kept
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ConfigError(
                f"{checkpoint} is damaged, or of another release: delete it to start anew "
                f"({words(error)})"
            ) from error
        vars(self).update(state)
        if self._is_planned:
            self._plan = self._planned()
        deque(islice(self._plan, self._taken + len(self._ahead)), maxlen=0)
        for made in self._versions:
            self._measure.stopping.add(made.metrics, made.version)

    # arrivals, and training ahead of them

    def _planned(self) -> Iterator[PlannedEvent]:
        return plan(self._settings, self._devices, self._failed)

    def _next(self) -> PlannedEvent:
        if not self._ahead:
            self._ahead.append(next(self._plan))
        self._taken += 1
        event = self._ahead.popleft()
        if isinstance(event, Arrival) and event.cancelled:
            self._given_up[reasons.BECAME_STALE] += event.cancelled
        return event

    def _trained_for(self, arrival: Arrival) -> tuple[Trained, Job] | None:
        """The result of an arrival's training; None if the task raised.

        Also trains later arrivals that can be trained together with it.
        """
        if arrival.n not in self._trained:
            jobs = [self._job(one) for one in self._trainable(arrival)]
            try:
                results = self._training.train(jobs)
            except DataError as error:
                self._release(*(job.into for job in jobs))
                self._give_up(arrival, error)
                return None
            for job, trained in zip(jobs, results, strict=False):
                self._trained[job.arrival.n] = trained, job
            self._release(*(job.into for job in jobs[len(results) :]))
        return self._trained.pop(arrival.n)

    def _give_up(self, arrival: Arrival, error: DataError) -> None:
        """Give up a task that raised. Raises the error if no device works."""
        device = arrival.device
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        self._given_up[reasons.of_giving_up(reasons.raised(cause))] += 1
        self._failing[device] = self._failing.get(device, (0, ""))[0] + 1, words(cause)
        self._in_a_row[device] += 1
        tried = len(self._in_a_row)
        if why := no_device_works(self._in_a_row.total(), tried, self._devices):
            raise about(error, DataError(f"{why}: {error}")) from error
        self._report([error])
        self._failed.add(arrival.n)
        if not self._is_planned:
            self._follow(arrival)
        elif self._ahead:  # planned as if the task had not failed: only once, see `_trainable`
            self._release(*(job.into for _, job in self._trained.values()))
            self._trained.clear()
            self._ahead.clear()
            self._plan = self._planned()
            deque(islice(self._plan, self._taken), maxlen=0)

    def _report(self, errors: list[DataError]) -> None:
        """Report errors of the user's task, each place that raises once; empties the list."""
        for error in errors:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            if (place := place_of(cause)) not in self._raised:
                self._raised.add(place)
                self._on_error(f"the task raised on {error}\n{error.trace}".rstrip())
        errors.clear()

    def _trainable(self, first: Arrival) -> list[Arrival]:
        """``first`` and later arrivals that train well together and have known base versions."""
        sizes = self._training.sizes
        if sizes == (1,) or self._failed:  # later arrivals depend on failures
            return [first]
        missing = max(0, _AHEAD - len(self._ahead))
        self._ahead.extend(islice(self._plan, missing))
        found, devices = [first], {first.device}
        left = self._settings.run.versions - self._progress.state.version
        for event in self._ahead:
            if len(found) == sizes[0]:
                break
            if isinstance(event, RoundOver) or event.version >= self._models.newest + left:
                continue
            # The device's c_i is unknown until its earlier answer has been processed.
            waits = self._strategy.controls and event.device in devices
            devices.add(event.device)
            if event.tau <= self._models.newest and event.n not in self._trained and not waits:
                found.append(event)
        return found[: next((size for size in sizes if size <= len(found)), len(found))]

    def _job(self, arrival: Arrival) -> Job:
        base, vectors = self._models.base(arrival.tau), self._progress.state.memory.devices
        return Job(
            arrival,
            base.model,
            base.version,
            base.digest,
            self._spare(),
            vectors[arrival.device] if vectors is not None and self._strategy.controls else None,
        )

    def _follow(self, event: PlannedEvent) -> None:
        """Advance the plan's newest version, and drop versions that no device will start from."""
        if event.makes:
            self._models.add()
        self._models.drop(event.oldest, self._progress.state)

    def _spare(self) -> Model:
        return self._models.spare(self._progress.state.model.layout)

    def _release(self, *models: Model) -> None:
        self._models.release(self._progress.state, *models)

    # arrivals

    def _take(self, arrival: Arrival, trained: Trained, job: Job) -> None:
        """Process an answer."""
        before, update = self._progress, job.into
        self._cost.answers += 1
        sent, undecodable = self._transport.send(arrival.device, update, arrival.seed)
        upload = Upload(
            task=f"task-{arrival.n}",
            attempt="1",
            device=arrival.device,
            trainer="simulation",
            tau=job.version,
            base=job.digest,
            layout=update.layout.signature,
            digest=sent.digest_like(self._digest) if self._journal else _NO_DIGEST,
            size=sent.buffer.nbytes,
            format=self._transport.format,
            samples=trained.samples,
            steps=trained.steps,
            loss=trained.loss,
            lr=trained.lr or self._training.solver(arrival.device, job.version).lr,
            sends=self._strategy.sends,
        )
        rule, limits = self._strategy, self._settings.updater
        sizes: Counted = ()
        refusal = refusal_by_metadata(upload, rule, before.state) or undecodable
        if not refusal:
            refusal, sizes = refusal_by_content(
                upload,
                rule,
                update,
                before,
                max_norm=limits.max_norm,
                norm_factor=limits.norm_factor,
            )
        before = self._progress = before.with_sizes(sizes)
        if refusal:
            self._refuse(upload, refusal, arrival.time, sizes)
            self._release(update)
            return
        spare = self._spare()
        step = take(rule, before, upload, update, spare)
        if step.decision is not None and step.decision.outcome == "dropped":
            self._refuse(upload, step.decision.reason, arrival.time, sizes)
            self._release(update, spare)
            return
        if step.decision is None or not step.decision.is_reference:
            self._streak = 0
        self._in_a_row.clear()
        self._failing.pop(arrival.device, None)
        self._progress = step.after
        made = self._made(step, arrival.time)
        if self._journal is not None:
            about = self._happened(step, arrival.time)
            self._journal.taken(upload, sent, step, about, sizes)
        self._tell(made)
        self._adapt(made)
        self._release(before.state.model, update, spare)

    def _refuse(self, upload: Upload, reason: str, at: float, sizes: Counted) -> None:
        self._refused[reason] += 1
        self._streak += 1
        if self._journal is not None:
            version = self._progress.state.version
            self._journal.refused(upload, reason, version, self._happened(None, at), sizes)
        if self._streak >= most_refused(self._refused, self._devices):
            self._ending = "failed", f"{self._streak} updates in a row were refused ({reason})"

    def _end_round(self, over: RoundOver) -> None:
        before = self._progress
        round_ = before.state.version
        dropped = len(before.held) if over.drops else 0
        step = close_round(self._strategy, before, round_, drops=dropped > 0)
        self._progress = step.after
        made = self._made(step, over.time)
        if self._journal is not None:
            version = step.after.state.version
            about = self._happened(step, over.time)
            self._journal.round_over(over, round_, version, about, dropped)
        self._tell(made)
        self._adapt(made)
        self._release(*before.state.models())

    def _adapt(self, made: VersionMade | None) -> None:
        """Note a version, and scale the rule's step if the held-out data say so."""
        from fedstream.simulation.training import blamed

        run, rule = self._progress, self._strategy
        if made is None or self._scorer is None:
            return
        self._windows.add(made.version, run.state.model)
        if not self._windows.is_due or self._ending is not None:
            return
        began = time.perf_counter()
        with blamed(f"validation data at version {made.version}"):
            proposed = self._scorer.proposal(rule, run, self._windows)
        self._measuring += time.perf_counter() - began
        if proposed is not None:
            rate = rule.step_rate * proposed.scale
            self._progress = replace(run, scale=proposed.scale, scaled_at=proposed.at)
            self._steps.append((made.version, rate))
            if self._journal is not None:
                about = self._happened(None, made.time)
                self._journal.scaled(proposed, rule.step_key, rate, about)

    def _happened(self, step: Step | None, at: float) -> Happened:
        self._entries += 1
        digest = self._digest if step is not None and step.made is not None else None
        given = self._models.published.digest if digest and self._transport.copies else None
        finished = self._ending[1] if self._ending and digest else None
        return Happened(self._entries, at, digest, given, finished)

    # versions

    def _made(self, step: Step, at: float) -> VersionMade | None:
        """Make the version of a step, measured if due; the last version also sets the ending."""
        if step.made is None:
            return None
        state, updates, run = step.after.state, step.made, self._settings.run
        if self._journal is not None:
            self._digest = state.model.digest_like(self._digest)
        self._models.publish(state, self._digest)
        for update in updates:
            self._cost.add(update, self._training.solver(update.device, update.tau))
        every, last = self._settings.simulation.evaluate_every, state.version >= run.versions
        due = last or (every and state.version % every == 0)
        on_devices = self._settings.evaluator.on_devices
        if on_devices is not None and (often := on_devices.every or every):
            due_there = last or state.version % often == 0
        else:
            due_there = on_devices is not None and last
        began = time.perf_counter()
        published = self._models.published.model
        metrics = self._measure(published, state.version, last=last) if due else {}
        found = self._measure.on_devices(published, state.version) if due_there else None
        self._measuring += time.perf_counter() - began
        if found is not None:
            metrics |= found.metrics
            self._report(self._measure.raised)
        if last:
            self._ending = "finished", f"version {state.version} reached"
        elif why := self._measure.stopping.add(metrics, state.version):
            self._ending = "finished", why
        losses = [update.loss for update in updates if update.loss is not None]
        cost = self._cost
        return VersionMade(
            state.version,
            updates,
            cost.used,
            cost.gradients,
            cost.epochs,
            2 * cost.answers,
            at,
            sum(losses) / len(losses) if losses else None,
            metrics,
            found,
        )

    def _tell(self, made: VersionMade | None) -> None:
        if made is None:
            return
        self._versions.append(made)
        if self._journal is not None and made.on_devices is not None:
            about = self._happened(None, made.time)
            self._journal.evaluated(made.on_devices, made.version, about)
        if self._on_version is not None:
            self._on_version(made, self._progress.state.model)
