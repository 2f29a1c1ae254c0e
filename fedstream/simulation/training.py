"""Local training and measuring in a simulation, on CPU or CUDA, one by one or together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedstream.core import reasons
from fedstream.core.errors import DataError, FedstreamError
from fedstream.core.layout import Model
from fedstream.core.messages import DevicesEvaluated, Measured
from fedstream.runtime.plugins import about, words
from fedstream.simulation import stacked
from fedstream.terminal import line
from fedstream.trainer import local_values, vector
from fedstream.trainer.data import check, placed, size_of
from fedstream.trainer.descent import channels_last
from fedstream.trainer.goals import Stopping
from fedstream.trainer.learner import as_sent
from fedstream.trainer.on_devices import Choice, Names, device_metrics, result, spread, sums_of
from fedstream.trainer.precision import Precision
from fedstream.trainer.solvers import Cancelled, Solvers, Trained, Work
from fedstream.trainer.task import NoLabels, Task, measured, solver_for_device, untrained

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.utils.data import Dataset

    from fedstream.settings.config import Settings
    from fedstream.settings.simulation import SimulationSettings
    from fedstream.simulation.arrivals import Job
    from fedstream.strategies import Strategy
    from fedstream.trainer.solvers import SolverSettings


@contextmanager
def use_of_torch(settings: SimulationSettings) -> Iterator[int]:
    """Configure torch by the settings inside the block.

    Gives the number of threads in which groups of devices may train side by side. Raises
    ConfigError if the settings ask for CUDA and there is none.
    """
    check("simulation.device", settings.device)
    threads, deterministic = torch.get_num_threads(), torch.backends.cudnn.deterministic
    # A small model's operations are too short for two threads, which wait for each other.
    torch.set_num_threads(settings.threads or 1)
    torch.backends.cudnn.deterministic = True
    try:
        yield settings.threads or threads
    finally:
        torch.set_num_threads(threads)
        torch.backends.cudnn.deterministic = deterministic


class Training:
    """Local training of devices."""

    def __init__(
        self,
        settings: Settings,
        task: Task,
        strategy: Strategy,
        devices: int,
        cancelled: Callable[[], bool],
        threads: int,
    ) -> None:
        """``threads``: in which groups of devices may train side by side.

        Raises ConfigError if all devices' local values may exceed ``trainer.local_bytes``.
        """
        simulation = settings.simulation
        with blamed("model()"), torch.random.fork_rng(devices=[]):
            self.module = untrained(task).to(simulation.device)
        layout = vector.layout_of(self.module)
        local_values.check_room(layout, devices, settings.trainer.local_bytes)
        self.together = 0
        self._settings = settings
        self._solvers = Solvers(settings.solver, settings.solvers)
        self._task = task
        self._strategy = strategy
        self._cancelled = cancelled
        self._data: dict[int, Dataset[Any]] = {}
        self.local: dict[int, Model] = {}
        """values of local tensors, by device, once it has trained"""
        self._group: stacked.StackedTraining | None = None
        self._channels_last = False
        self.precision = Precision(task, partial(line, err=True))
        if simulation.batched and _faster_channels_last(task, self.module):
            self._channels_last = True
        elif (
            simulation.batched
            and not self._solvers.others
            and settings.solver.schedule.kind == "constant"
            and type(task).solver_of is Task.solver_of
            and stacked.suits(task, self.module, settings.solver)
        ):
            rows = None
            with suppress(DataError):  # training on that device raises it again
                rows = stacked.rows_of(self._given, devices, simulation.device)
            if rows is not None:
                self._group = stacked.StackedTraining(
                    task, self.module, settings.solver, rows, cancelled, threads
                )

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of devices that are best trained together, the largest first."""
        return self._group.sizes if self._group is not None else (1,)

    def train(self, jobs: Sequence[Job]) -> list[Trained]:
        """Train jobs, with the updates in their ``into``: all jobs together, or only the first.

        Raises Cancelled; DataError if the task raises on the first.
        """
        if self._group is None or len(jobs) < stacked.LEAST:
            return [self._alone(jobs[0])]
        try:
            trained = self._group.train(jobs)
        except Cancelled:
            raise
        except Exception:  # a loss that branches on values or draws may still work one by one;
            self._group = None  # if not, that attempt raises the error with the device's number
            return self.train(jobs)
        self.together += len(jobs)
        return [self._as_sent(job, one) for job, one in zip(jobs, trained, strict=True)]

    def solver(self, device: int, version: int) -> SolverSettings:
        """Solver that a device trains with from a version."""
        with blamed(f"device {device}"):
            return solver_for_device(self._task, device, self._solvers, version)

    def data(self, device: int) -> Dataset[Any]:
        """A device's data, placed where the module is."""
        if device not in self._data:
            self._data[device] = placed(self._given(device), self._settings.simulation.device)
        return self._data[device]

    def _given(self, device: int) -> Dataset[Any]:
        with blamed(f"device {device}"):
            data = self._task.device_data(device)
            size_of(data, device)
        return data

    def _alone(self, job: Job) -> Trained:
        """Train one device as a trainer does."""
        arrival, controls = job.arrival, self._strategy.controls
        work = Work(
            device=arrival.device,
            task=f"task-{arrival.n}",
            version=job.version,
            seed=arrival.seed,
            steps=arrival.steps,
            epochs=arrival.epochs,
            solver=self.solver(arrival.device, job.version),
            cancelled=self._cancelled,
            base=job.digest,
            control=job.base.controls if controls else None,
            device_control=job.device_control,
        )
        try:
            return self._solve(job, work)
        except DataError:  # a model may rely on contiguous activations, so try that layout
            if not self._channels_last:
                raise
            self._channels_last = False  # if the error had another cause, it is raised again
            return self._solve(job, work)

    def put_local(self, device: int, x_0: Model) -> None:
        """Put the device's values of local tensors into the module; if it has none, those of x_0.

        ``x_0``: any version, as its layout has them.
        """
        unshared = x_0.layout.unshared
        if unshared is not None and unshared.local:
            vector.load_part(self.local.get(device, unshared.model()), self.module)

    def _solve(self, job: Job, work: Work) -> Trained:
        vector.load(job.base, self.module)
        device = job.arrival.device
        self.put_local(device, job.base)
        with blamed(f"device {device} at version {job.version}"):
            with self._layout():
                data = self.data(device)
                work = self.precision.settled(work, self.module, data)
                trained = self._task.train(self.module, data, work)
            vector.read(self.module, job.into)
            sent = self._as_sent(job, trained)
        if (values := local_values.read(self.module, job.base.layout)) is not None:
            self.local[device] = values
        return sent

    def _as_sent(self, job: Job, trained: Trained) -> Trained:
        return as_sent(
            trained,
            job.into,
            job.base,
            job.device_control,
            self._strategy.sends,
            self.solver(job.arrival.device, job.version).compression,
        )

    def _layout(self) -> AbstractContextManager[object]:
        """Memory layout of the module while it trains."""
        return channels_last(self.module) if self._channels_last else nullcontext()


def _faster_channels_last(task: Task, module: nn.Module) -> bool:
    """Whether channels last is faster, and equal up to rounding: for convolutions on CPU."""
    parts = list(module.modules())
    return (
        type(task).train is Task.train
        and any(isinstance(part, nn.Conv2d) for part in parts)
        and all(x.device.type == "cpu" and x.dim() < 5 for x in module.parameters())
    )


class Measuring:
    """Measurement of models on the task's test data, in float32."""

    def __init__(
        self,
        settings: Settings,
        task: Task,
        training: Training,
        devices: int,
        data: Dataset[Any] | None,
    ) -> None:
        """``data``: the test data."""
        self._task = task
        self._training = training
        self._settings = settings
        self._devices = devices
        self.per_device: dict[int, dict[str, float]] = {}
        """the devices' metrics, as they were measured last"""
        self.stopping = Stopping(settings.run.stop, task.goal)
        self._place = settings.simulation.device
        self._data = placed(data, self._place) if data is not None else None
        on_devices = settings.evaluator.on_devices
        self._choice = Choice(on_devices, settings.run.seed) if on_devices else None
        self._names = Names()
        self.raised: list[DataError] = []
        """errors of metrics on devices' own test data, since the caller took them out"""

    def __call__(self, model: Model, version: int, *, last: bool) -> dict[str, float]:
        """Metrics of a version; empty if there is no test data. ``last``: of the run."""
        vector.load(model, self._training.module)
        metrics: dict[str, float] = {}
        with blamed(f"test data at version {version}"):
            if self._data is not None:
                metrics = measured(self._task, self._training.module, self._data)
            when = self._settings.evaluator.per_device
            last = last or bool(self.stopping.why(metrics, version))
            if when == "always" or (when == "last" and last):
                self.per_device = device_metrics(
                    self._task,
                    self._training.module,
                    self._devices,
                    self._place,
                    prepare=partial(self._training.put_local, x_0=model),
                )
                metrics |= spread(self.per_device, self._task.goal)
        return metrics

    def on_devices(self, model: Model, version: int) -> DevicesEvaluated | None:
        """The evaluation of a version on the devices, in no virtual time; None if there is none.

        All devices are present, and each answers.
        """
        settings, choice = self._settings.evaluator.on_devices, self._choice
        if settings is None or choice is None:
            return None
        module = self._training.module
        vector.load(model, module)
        answers: dict[int, Measured] = {}
        outcomes: Counter[str] = Counter()
        for device in choice.of(range(self._devices), version):
            reason, found = None, None
            try:
                with blamed(f"test data of device {device} at version {version}"):
                    data = self._task.device_test_data(device)
                    if data is not None:
                        self._training.put_local(device, x_0=model)
                        with suppress(NoLabels):
                            found = sums_of(self._task, module, placed(data, self._place))
            except DataError as error:
                self.raised.append(error)
                cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
                reason = reasons.raised(cause)
            if found is None:
                outcomes[reasons.of_evaluation(reason or reasons.NO_TEST_DATA)] += 1
                if reason is None:
                    choice.without_data([device])
                continue
            samples, sums = found
            answer = Measured(
                task=f"evaluation-{version}-{device}",
                attempt="1",
                device=device,
                trainer="simulation",
                version=version,
                base="none",
                samples=samples,
                sums=sums,
                trusted=True,
            )
            outcomes[answer.outcome] += 1
            if answer.outcome == reasons.MEASURED:
                answers[device] = answer
        return result(
            answers,
            outcomes,
            settings,
            self._task.goal,
            self._names,
            evaluation=f"{version:012d}",
            version=version,
            base="none",
        )


@contextmanager
def blamed(what: str) -> Iterator[None]:
    """Turn an error of the user's task into a DataError that names the step ``what``.

    Its ``trace`` is the traceback from the user's first frame on.
    """
    try:
        yield
    except (FedstreamError, Cancelled):
        raise
    except Exception as error:
        raise about(error, DataError(f"{what}: {words(error)}")) from error
