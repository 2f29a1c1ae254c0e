"""Learning tasks: the class that users subclass, calls of its methods, and the settings.

torch is imported inside functions, so that services that only read the settings start without it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, field_validator

from fedstream.core.errors import ConfigError, DataError, LayoutMismatch
from fedstream.core.layout import Model
from fedstream.core.messages import Goal
from fedstream.runtime.config import Section
from fedstream.trainer.data import samples_of
from fedstream.trainer.goals import Goals
from fedstream.trainer.partitions import PartitionSettings
from fedstream.trainer.solvers import Solver

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from fedstream.core.layout import Layout
    from fedstream.core.records import Run
    from fedstream.trainer.solvers import Solvers, SolverSettings, Trained, Work


IGNORED = -100  # torch's mark of a label that doesn't count: cross_entropy's ignore_index


class Mean(float):
    """A metric that is a mean, with its sum and the count over which it is one.

    ``metrics()`` may return it in place of a number: sums and counts add up exactly over devices,
    where other metrics are weighted by the devices' samples. ``count`` may be a sum of weights.
    """

    sum: float
    count: float

    def __new__(cls, sum: float, count: float) -> Mean:  # noqa: A002  (the field's usual name)
        """Raises ValueError unless ``count`` is above 0."""
        if not count > 0:
            raise ValueError(f"Mean(sum, count) needs a count above 0, not {count}")
        self = super().__new__(cls, sum / count)
        self.sum, self.count = float(sum), float(count)
        return self

    def __reduce__(self) -> tuple[type[Mean], tuple[float, float]]:
        return Mean, (self.sum, self.count)


class NoLabels(DataError):
    """No label of the data counts."""


class Task(ABC):
    """A model, the devices' data, and optionally test data, loss, metrics and local training.

    Define :meth:`model` and :meth:`device_data`, and usually :attr:`devices` and
    :meth:`test_data`. Everything else has a default. Override, to change

    - the loss: :meth:`loss`
    - what is measured: :meth:`metrics` with its :attr:`goal`, :meth:`device_test_data`
    - the batches: :meth:`collate`, :meth:`sampler`
    - the optimizer: :meth:`optimizers`; the solver of one device: :meth:`solver_of`
    - the whole of local training: :meth:`train`, which may call :meth:`descend`
    - the number of devices that a run may have: :attr:`run_devices`, :meth:`joined`

    The defaults suit classification: items are ``(x, y)``, the model returns scores of shape
    (batch, classes), and y holds class numbers, of shape (batch,) and type int64. Sequences work
    too, with scores of shape (batch, classes, T) and y of shape (batch, T). Labels of -100 don't
    count.
    """

    devices: int | None = None
    """The number of devices that the data is split over; None: unknown to the task."""

    local: tuple[str, ...] = ()
    """Patterns of the names of parameters and buffers that stay on the device, such as
    ``("bn*",)`` (FedBN) or ``("head.*",)`` (FedPer): see ``torch.nn.Module.state_dict``."""

    goal: Goals = MappingProxyType({})
    """The goal of each metric, "min" or "max": ``goal = {"bits": "min"}``. Well-known names such
    as accuracy, loss or rmse need no entry."""

    evaluation_batch: int = 512
    """Samples in a batch of the default ``metrics``; ``evaluator.batch_size``, if set."""

    exact_steps: ClassVar[bool] = True
    """Whether ``train`` returns its steps and learning rate, and corrects client drift if the
    solver does. A strategy that needs this refuses other tasks."""

    @abstractmethod
    def model(self) -> nn.Module:
        """A new, untrained model. Its weights may be random: torch is seeded before the call.

        Parameters with ``requires_grad = False`` are frozen: never trained, and sent once.

        Training must leave integer tensors unchanged, except batch norms' counters, or the update
        is refused. A model whose training changes others (a quantiser's zero points, a flag) must
        name them by pattern: ``model.changing_integers = ("*.zero_point",)``.
        """

    @abstractmethod
    def device_data(self, device: int) -> Dataset[Any]:
        """The data of one device, from 0 to ``devices`` - 1: the same at every call.

        Map-style, of at least one item; by default of items ``(x, y)``, x as the model takes it
        without the batch's dimension. An ``IterableDataset`` is trained by numbers of steps; when
        it ends, it begins again.
        """

    def test_data(self) -> Dataset[Any] | None:
        """The data to evaluate models on, map-style; None: models are not evaluated."""
        return None

    def validation_data(self) -> Dataset[Any] | None:
        """The data by which ``strategy.adapt`` scores models; by default the test data.

        Data of their own keep the measurements on the test data honest.
        """
        return self.test_data()

    def device_test_data(self, device: int) -> Dataset[Any] | None:
        """The test data of one device, map-style; None: the device is not measured.

        Devices are measured, by :meth:`metrics`, only with ``evaluator.per_device`` or
        ``evaluator.on_devices``.
        """
        return None

    def collate(self, items: list[Any]) -> Any:
        """A batch of these items of a data set; by default as torch's ``default_collate`` makes it.

        Raises DataError if the items cannot be stacked.
        """
        from torch.utils.data import default_collate

        try:
            return default_collate(items)
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"cannot form a batch from items of the data set: {error}; define the task's own "
                "collate(items)"
            ) from error

    def gather(self, data: Dataset[Any], rows: Tensor) -> Any:
        """The batch of these rows, int64 of shape (batch,), as :meth:`collate` makes it.

        Call it in ``metrics``, to get all rows of a data set as one batch.
        """
        from torch.utils.data import TensorDataset

        # A subclass of TensorDataset may override __getitem__.
        if type(data) is TensorDataset and type(self).collate is Task.collate:
            # several times as fast as tensor[rows]
            return [tensor.index_select(0, rows.to(tensor.device)) for tensor in data.tensors]
        return self.collate([data[row] for row in rows.tolist()])

    def sampler(self, data: Dataset[Any], generator: Generator) -> Iterable[int] | None:
        """The rows of one pass over a device's data, in order, from 0 to ``len(data)`` - 1.

        None, the default: all of them, shuffled.

        For instance a ``WeightedRandomSampler``. All randomness must come from ``generator``.
        """
        return None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss to minimise on one collated batch, a tensor of shape ().

        By default the mean cross entropy over the counted labels; 0 if no label counts.
        """
        import torch
        from torch.nn.functional import cross_entropy

        x, y = examples(model, batch)
        scores = _checked(model(x), y, "loss")
        loss = cross_entropy(scores, y)  # without labels NaN, with a gradient of zero
        return torch.where((y == IGNORED).all(), 0.0, loss)  # no `if`: it would wait for a GPU

    def metrics(self, model: nn.Module, data: Dataset[Any]) -> dict[str, float]:
        """The metrics of ``model`` on all of ``data``, by name.

        fedstream calls this without gradients, with the model in evaluation mode. By default
        ``accuracy`` and ``loss``, the mean cross entropy over all counted labels. Raises DataError
        if the data is empty, if its items are not (x, y), or if no label counts.
        """
        import torch
        from torch.nn.functional import cross_entropy

        model.eval()
        samples = samples_of(data)
        hits = answers = 0
        loss = 0.0
        with torch.no_grad():
            for rows in torch.split(torch.arange(samples), self.evaluation_batch):
                x, y = examples(model, self.gather(data, rows))
                scores = _checked(model(x), y, "metrics")
                hits += int((scores.argmax(1) == y).sum())
                loss += float(cross_entropy(scores, y, reduction="sum"))
                answers += int((y != IGNORED).sum())  # where y is a sequence, many per sample
        if not answers:
            raise NoLabels("there is nothing to evaluate: every label is -100, which doesn't count")
        return {"accuracy": Mean(hits, answers), "loss": Mean(loss, answers)}

    @property
    def run_devices(self) -> int | None:
        """The number of devices that this task requires of a run; None: any number.

        A trainer ends if its run has another number. ``task.devices`` in the configuration takes
        precedence.
        """
        return self.devices

    def joined(self, devices: int) -> None:
        """Called when this trainer joins a run of ``devices`` devices; does nothing by default.

        The number is allowed by :meth:`run_devices`. A task for any number of devices may set its
        ``devices`` here.
        """
        return

    def solver_of(self, device: int, solver: SolverSettings) -> SolverSettings:
        """The solver of a device; by default ``solver``, the configured one.

        It must be the same at every call, because an interrupted task resumes with it.
        """
        return solver

    def optimizers(self, model: nn.Module, solver: SolverSettings) -> Sequence[Optimizer]:
        """The optimizers of a task, which all take each step; by default the solver's.

        For example one for sparse embeddings, another for the rest.
        """
        return [solver.optimizer(solver.parameter_groups(model))]

    def train(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        """Train ``model`` in place on one device's data; by default with the solver.

        ``work`` has the length, the seed and the solver. Returns the steps taken and the number of
        samples.
        """
        return work.solver.train(self, model, data, work)

    def descend(self, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        """Train ``model`` by the solver's steps: to call in ``train``, not to override."""
        from fedstream.trainer.descent import solve

        return solve(self, model, data, work)


def examples(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The inputs and classes of a batch, on the model's device.

    Raises DataError if the items of the data set are not (x, y).
    """
    import torch

    match batch:
        case [torch.Tensor() as x, torch.Tensor() as y]:
            device = next(chain(model.parameters(), model.buffers()), x).device
            return x.to(device), y.to(device)
    raise DataError(
        "the default loss and metrics expect items (x, y) of tensors or numbers: override loss() "
        "and metrics() for other items"
    )


def _checked(scores: Tensor, y: Tensor, method: Literal["loss", "metrics"]) -> Tensor:
    """Scores that suit a default method. Raises DataError, for example for a regression.

    The loss also takes probabilities of the classes, of the scores' shape.
    """
    is_soft = method == "loss" and y.shape == scores.shape
    if scores.dim() > 1 and (is_soft or not y.is_floating_point()):
        return scores
    raise DataError(
        f"the default {method} is that of classification: it expects scores of shape (batch, "
        f"classes, ...) and class numbers, not {tuple(scores.shape)} and {y.dtype}: override "
        f"{method}()"
    )


class TaskSettings(Section):
    """The table ``[task]``: the task's name, and a built-in task's data and partition."""

    name: str = "digits"
    """A built-in task (``BUILT_IN`` in :mod:`fedstream.trainer.loading`),
    ``path/to/file.py:attribute`` or ``package.module:attribute``."""
    devices: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """None: the task's default."""
    partition: PartitionSettings | None = None
    """None: the task's default; for digits and MNIST, ``classes`` with p = 2."""
    data_root: str | None = None
    """Folder of data sets; None: the environment variable ``FEDSTREAM_DATA``."""
    download: bool = False
    seed: Annotated[int, Field(ge=0)] = 0
    """seed of the partition"""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a user's own task, checked when the task is loaded."""

    @field_validator("partition", mode="before")
    @classmethod
    def _told_by_its_key(cls, table: object) -> object:
        """Infer the kind of a partition from a key that only this kind has."""
        if isinstance(table, dict) and "kind" not in table:
            return table | {"kind": "dirichlet" if "alpha" in table else "classes"}
        return table

    @field_validator("args")
    @classmethod
    def _has_no_null(cls, args: dict[str, Any]) -> dict[str, Any]:
        """Refuse None, which run.toml can't contain."""
        if null := _first_null(args):
            raise ValueError(f"{null} is None, which TOML cannot express: leave it out")
        return args

    def __hash__(self) -> int:
        return hash(self.model_dump_json())


def _first_null(value: object, key: str = "args") -> str | None:
    """The key of the first None in a tree of tables and lists."""
    match value:
        case None:
            return key
        case dict():
            inner = ((f"{key}.{name}", one) for name, one in value.items())
        case list():
            inner = ((f"{key}[{n}]", one) for n, one in enumerate(value))
        case _:
            return None
    return next((null for name, one in inner if (null := _first_null(one, name))), None)


def untrained(task: Task) -> nn.Module:
    """Make the task's model, and check it.

    Raises ConfigError if it isn't a Module, if no parameter is trained and shared, or if a pattern
    of ``local`` fits no tensor; LayoutMismatch, naming the tensor, if a tensor cannot be sent; and
    the errors of ``model()``.
    """
    from torch import nn

    from fedstream.trainer.vector import layout_of

    module: object = task.model()
    if not isinstance(module, nn.Module):
        got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ConfigError(f"model() returned {got}: it must return an untrained torch.nn.Module")
    if task.local:
        module.local_tensors = _checked_local(task.local)  # type: ignore[assignment]
    layout = layout_of(module)
    for pattern in task.local:
        if not any(fnmatchcase(tensor.name, pattern) for tensor in layout.whole):
            raise ConfigError(
                f"Task.local: {pattern!r} fits no tensor of model(), whose first is "
                f"{layout.whole[0].name!r}: correct the pattern"
            )
    if layout.unshared is not None and not layout.parameters:
        names = [tensor.name for tensor in layout.unshared.layout.tensors]
        raise ConfigError(
            f"model(): all {len(names)} parameters are frozen or local, such as {names[0]}: leave "
            "some to be trained and shared (requires_grad, Task.local)"
        )
    return module


def _checked_local(patterns: object) -> tuple[str, ...]:
    if isinstance(patterns, tuple) and all(isinstance(one, str) for one in patterns):
        return patterns
    raise ConfigError(f"Task.local = {patterns!r}: must be a tuple of patterns: ('bn*',)")


def initial(task: Task, seed: int, *, controls: bool = False) -> Model:
    """The task's untrained model x_0: the same bits for the same seed and release of torch.

    ``controls``: add a control variate of zeros. torch's global generator keeps its state.
    """
    import torch

    from fedstream.trainer.vector import layout_of, read, with_own_values

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = untrained(task)
    layout = with_own_values(layout_of(module), module)
    model = Model(layout.with_controls() if controls else layout)
    read(module, model)
    model.controls[:] = 0.0
    return model


def measured(task: Task, module: nn.Module, data: Dataset[Any]) -> dict[str, float]:
    """Call ``task.metrics`` for a model, and check the result.

    Runs without gradients, with the model in evaluation mode; restores the mode of each submodule.
    Raises DataError if the metrics are not a dict of numbers by name, and the errors of
    ``metrics()``.
    """
    return {name: float(value) for name, value in measured_means(task, module, data).items()}


def measured_means(task: Task, module: nn.Module, data: Dataset[Any]) -> dict[str, float]:
    """The metrics as :func:`measured` returns them, but each :class:`Mean` as it is."""
    import torch

    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            found: object = task.metrics(module, data)
    finally:
        for part, mode in modes:
            part.training = mode
    if not hasattr(found, "items"):
        raise DataError(
            f"metrics() returned {type(found).__name__}: it must return a dict from names to "
            'numbers, such as {"accuracy": 0.9}'
        )
    means: dict[str, float] = {}
    for name, value in found.items():
        try:
            means[str(name)] = value if isinstance(value, Mean) else float(value)
        except (TypeError, ValueError) as error:
            raise DataError(f"metrics()[{name!r}] is not a number: {error}") from error
    return means


def check_run(run: Run, name: str, ours: Layout, devices: int | None, role: str) -> None:
    """Check that a service's task fits the run ``name``.

    ``ours``: the layout of the task's model. ``devices``: number of devices that the data is split
    over; None: any number. Raises LayoutMismatch, ConfigError.
    """
    if run.layout.without_controls() != ours:
        raise LayoutMismatch(
            f"the model of this {role}'s task has {ours.summary}, but run {name!r} was made with "
            f"{run.layout.summary}: give every service the same task, or purge the run"
        )
    if devices not in (None, run.devices):
        raise ConfigError(
            f"task.devices: the data of this {role}'s task is split over {devices} devices, but "
            f"run {name!r} was made with {run.devices}: give every service the same number"
        )


def solver_for_device(task: Task, device: int, solvers: Solvers, version: int) -> SolverSettings:
    """The solver of a device that trains from a version of the model.

    Raises TypeError if ``task.solver_of`` returns another type; ConfigError as :meth:`Solver.at`.
    """
    solver = task.solver_of(device, solvers[device])
    if not isinstance(solver, Solver):
        raise TypeError(
            f"solver_of() must return the settings of a solver, not {type(solver).__name__}; "
            "for example solver.model_copy(update={'lr': 0.1})"
        )
    return solver.at(version)


def declared_goals(task: Task) -> dict[str, Goal]:
    """The goals that a task declares. Raises ConfigError unless each is ``min`` or ``max``."""
    goal: object = task.goal
    if isinstance(goal, Mapping) and all(
        isinstance(name, str) and end in get_args(Goal) for name, end in goal.items()
    ):
        return dict(goal)
    raise ConfigError(
        f"Task.goal = {goal!r}: must be a dict from names of metrics to 'min' or 'max', such as "
        '{"rmse": "min"}'
    )
