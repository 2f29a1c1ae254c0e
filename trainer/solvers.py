"""The solvers' settings, the input of local training and its result.

:mod:`fedstream.trainer.descent` trains by them, with the optimizers of ``torch.optim``. Anarchic
Federated Learning, section 3: 'each worker is able to completely take control of its own
optimization process'. So the configuration (``solvers``) can give groups of devices a solver of
their own, and :meth:`fedstream.trainer.task.Task.solver_of` any single device.
"""

# ruff: noqa: SLF001  (torch's list operations, torch._foreach_*, are private in name only)

from __future__ import annotations

import inspect
import math
import operator
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationError,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Floats
from fedstream.runtime.config import NamedSettings, Positive, Section, check
from fedstream.runtime.plugins import OneOf, PluginRegistry
from fedstream.runtime.text import did_you_mean
from fedstream.trainer.compression import Compression, NoCompression
from fedstream.trainer.schedules import ConstantRate, RateSchedule
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset

    Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]


@dataclass(slots=True)
class Iterate:
    """The state of local training before a step; each list has a tensor per trained parameter."""

    x: Tensors
    """the parameters, which must not be written to"""
    start: Tensors
    """the parameters of x_tau"""
    correction: Tensors = ()
    """c - c_i of SCAFFOLD; () for solvers without ``controls``"""
    n: int = 0
    """steps done"""
    memory: dict[str, Tensors] = field(default_factory=dict)

    def remembered(self, name: str) -> Tensors:
        """Tensors that a solver keeps between steps and changes in place; zeros at first.

        They last for one task, also across an interruption.
        """
        if name not in self.memory:
            import torch

            self.memory[name] = [torch.zeros_like(part) for part in self.x]
        return self.memory[name]


_SHOWN = 8  # names of parameters in an error


class ParameterGroup(Section):
    """Arguments of the optimizer for some parameters; those left out are as in the solver."""

    model_config = ConfigDict(extra="allow")

    parameters: Annotated[tuple[str, ...], Field(min_length=1, strict=False)]
    """patterns of their names in ``named_parameters()``, such as ``base.*``"""


class LrSchedule(Section):
    """A class of ``torch.optim.lr_scheduler``, with its arguments as keys.

    It begins anew in every task, and counts steps.
    """

    model_config = ConfigDict(extra="allow")

    kind: str
    """the class's name, such as ``CosineAnnealingLR``"""

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        """The scheduler. Raises ConfigError if there is no such class, or its arguments fail."""
        from torch.optim import lr_scheduler

        found = getattr(lr_scheduler, self.kind, None)
        base = lr_scheduler.LRScheduler
        if not (isinstance(found, type) and issubclass(found, base)) or found is base:
            raise ConfigError(
                f"solver.lr_scheduler.kind = {self.kind!r}: must be a class of "
                "torch.optim.lr_scheduler, such as CosineAnnealingLR"
            )
        if issubclass(found, lr_scheduler.ReduceLROnPlateau):
            raise ConfigError("solver.lr_scheduler.kind: a task measures nothing to wait for")
        given, arguments = self.model_extra or {}, inspect.signature(found).parameters
        for name in given:
            if name not in arguments:
                hint = did_you_mean(name, arguments)
                raise ConfigError(f"solver.lr_scheduler.{name}: {self.kind} has no such key{hint}")
        try:
            return found(optimizer, **given)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"solver.lr_scheduler: {error}") from error


class Solver(NamedSettings):
    """Base class of solvers, minibatch descent. A solver's fields are the keys of ``solver``.

    A step clips the loss's gradient, changes it by :meth:`direction`, and passes it to
    :meth:`optimizer`: here ``torch.optim.SGD``, which adds weight decay and momentum. A solver of
    your own overrides any of these or :meth:`rate`, or replaces the whole local training,
    :meth:`train`. It must be deterministic, apart from the global generators of Python, numpy and
    torch, which are seeded for each task.
    """

    controls: ClassVar[bool] = False  # corrects client drift, together with such a strategy
    kind: str = ""
    """the solver's name in the configuration"""
    lr: Annotated[float, Field(gt=0)] = 0.3
    """gamma (eta_L in AFL)"""
    # Left out while it is the default, so that earlier releases resume the work.
    schedule: Annotated[RateSchedule, Field(exclude_if=lambda one: one == ConstantRate())] = (
        ConstantRate()
    )
    """how gamma changes with the version that a device trains from"""
    batch_size: Annotated[int, Field(ge=0)] = 50
    """0: the whole partition in each step, i.e. the full gradient"""
    sampling: Literal["passes", "fresh"] = "passes"
    """passes: minibatches are slices of shuffled passes over the data; fresh: each minibatch is
    drawn from the whole data (AFL)"""
    drop_last: Annotated[bool, Field(exclude_if=lambda one: not one)] = False
    """Leave out the smaller last minibatch of a pass; else a single row that is left over joins
    the minibatch before."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """as in torch.optim.SGD; starts from zero in every task"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """as in torch.optim.SGD: weight_decay * x is added to the gradient"""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """upper bound on the norm of the loss's gradient, over all parameters; None: no clipping"""
    accumulate: Annotated[int, Field(ge=1, exclude_if=lambda one: one == 1)] = 1
    """minibatches whose mean gradient makes one step; saves memory beside a larger batch_size"""
    groups: Annotated[
        tuple[ParameterGroup, ...], Field(strict=False, exclude_if=lambda one: not one)
    ] = ()
    """parameters with other arguments of the optimizer, such as a rate of their own"""
    lr_scheduler: Annotated[LrSchedule | None, Field(exclude_if=lambda one: one is None)] = None
    """how gamma changes from step to step within a task"""
    precision: Annotated[
        Literal["float32", "bf16"], Field(exclude_if=lambda one: one == "float32")
    ] = "float32"
    """bf16: the loss is computed by torch.autocast in bfloat16; parameters stay float32"""
    channels_last: Annotated[bool, Field(exclude_if=lambda one: not one)] = False
    """keep images' channels last in memory, which many convolutions compute faster"""
    workers: Annotated[int, Field(ge=0, le=64, exclude_if=lambda one: not one)] = 0
    """processes that load batches beside training; 0: the trainer loads each one itself"""
    compression: Compression = NoCompression()
    """applied to the delta once training is done"""

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        """Check the groups' arguments as the solver's own keys are checked."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name != "groups"}
        known = sorted(self.arguments())
        for n, group in enumerate(self.groups):
            for name, value in (group.model_extra or {}).items():
                if name not in known:
                    raise ValueError(
                        f"groups[{n}].{name}: the optimizer has no such argument; it has "
                        f"{', '.join(known)}"
                    )
                try:
                    type(self).model_validate(own | {name: value})
                except ValidationError as error:
                    wrong = [one["msg"] for one in error.errors() if one["loc"][:1] == (name,)]
                    if wrong:  # else the solver's own keys are, which is told elsewhere
                        raise ValueError(f"groups[{n}].{name} = {value}: {wrong[0]}") from error
        return self

    def at(self, version: int) -> Self:
        """The solver of a task that trains from this version: with its rate, and no schedule.

        Raises ConfigError if the schedule gives no finite number above 0.
        """
        share = self.schedule(version)
        if share == 1.0:
            return self
        if not 0.0 < share < math.inf:
            raise ConfigError(
                f"solver.schedule.kind = {self.schedule.kind!r}: must give a finite number above "
                f"0; for version {version} it gave {share}"
            )
        groups = tuple(
            one.model_copy(update={"lr": one.lr * share}) if hasattr(one, "lr") else one
            for one in self.groups
        )
        now = {"lr": self.lr * share, "schedule": ConstantRate(), "groups": groups}
        return self.model_copy(update=now)

    def arguments(self) -> dict[str, Any]:
        """The arguments of the optimizer, by name."""
        return {"lr": self.lr, "momentum": self.momentum, "weight_decay": self.weight_decay}

    def optimizer(self, parameters: list[dict[str, Any]]) -> Optimizer:
        """The optimizer of a task; ``parameters``: groups as of :meth:`parameter_groups`."""
        from fedstream.trainer.optimizers import LeanSGD

        return LeanSGD(parameters, **self.arguments(), **in_lists(parameters))

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """The trained parameters as ``torch.optim`` takes them, with their groups' arguments.

        The last group has those that match no pattern. Raises ConfigError if a group is empty.
        """
        rest = {name: x for name, x in model.named_parameters() if x.requires_grad}
        names: dict[int, list[str]] = {}  # a tied parameter has several
        for name, x in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(x), []).append(name)
        found: list[dict[str, Any]] = []
        for n, group in enumerate(self.groups):
            patterns = group.parameters
            matched = [
                name
                for name, x in rest.items()
                if any(fnmatchcase(other, one) for other in names[id(x)] for one in patterns)
            ]
            if not matched:
                raise ConfigError(
                    f"solver.groups[{n}].parameters = {list(patterns)}: no trained parameter "
                    f"matches; those in no earlier group are {', '.join([*rest][:_SHOWN])}"
                    + (", ..." if len(rest) > _SHOWN else "")
                )
            found.append(
                {"params": [rest.pop(name) for name in matched], **(group.model_extra or {})}
            )
        return [*found, {"params": [*rest.values()]}] if rest else found

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """The scheduler of the rate within a task; None: the rate stays."""
        return self.lr_scheduler.scheduler(optimizer) if self.lr_scheduler else None

    def rate(self, n: int) -> float:
        """The step size of step ``n``, counted from 0; by default ``lr``."""
        return self.lr

    def direction(self, g: Tensors, at: Iterate) -> Tensors:
        """The gradient that the optimizer gets in place of ``g``; by default ``g`` itself.

        ``g`` has one tensor per trained parameter, zeros for those that the loss did not use, and
        must not be written to; the result must have the same shapes.
        """
        return g

    def train(self, task: Any, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        """Train ``model``, which holds x_tau, in place; by default by ``task.descend``.

        ``task``: a :class:`fedstream.Task`, whose module imports this one.

        An interruptible solver raises Cancelled once ``work.cancelled()`` is true.
        """
        trained: Trained = task.descend(model, data, work)
        return trained


def in_lists(parameters: list[dict[str, Any]]) -> dict[str, bool]:
    """The argument ``foreach``: all parameters change at once if that keeps the same bits.

    For dtypes other than float32, torch rounds lists of tensors differently.
    """
    import torch

    return {"foreach": all(x.dtype == torch.float32 for one in parameters for x in one["params"])}


class Sgd(Solver):
    """Plain minibatch SGD: FedAsync, option I; also the local solver of FedAvg, FedBuff and AFL."""

    kind: Literal["sgd"] = "sgd"
    nesterov: Annotated[bool, Field(exclude_if=lambda one: not one)] = False
    """as in torch.optim.SGD"""

    @model_validator(mode="after")
    def _has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = true needs momentum above 0")
        return self

    def arguments(self) -> dict[str, Any]:
        """The arguments of torch.optim.SGD."""
        return super().arguments() | {"nesterov": self.nesterov}


class Proximal(Solver):
    """SGD with a penalty on the distance from its start: FedAsync, option II; FedProx."""

    kind: Literal["proximal"] = "proximal"
    rho: Annotated[float, Field(ge=0)] = 0.01

    def direction(self, g: Tensors, at: Iterate) -> Tensors:
        """g + rho (x - x_tau)."""
        import torch

        if not self.rho:
            return g
        return torch._foreach_add(g, torch._foreach_sub(at.x, at.start), alpha=self.rho)


class DriftCorrected(Solver):
    """SGD with a correction for client drift: SCAFFOLD (Karimireddy et al., option II)."""

    controls: ClassVar[bool] = True
    kind: Literal["scaffold"] = "scaffold"

    def direction(self, g: Tensors, at: Iterate) -> Tensors:
        """g + c - c_i."""
        import torch

        return torch._foreach_add(g, at.correction)

    @model_validator(mode="after")
    def _plain_steps(self) -> DriftCorrected:
        if self.momentum:
            raise ValueError(
                f"momentum = {self.momentum} does not work with kind = scaffold, whose control is "
                "the mean of plain steps: leave out momentum"
            )
        return self


class OptimizerSolver(Solver):
    """Steps by another optimizer than SGD, whose arguments are keys.

    Its state, such as Adam's moments, begins anew in every task.
    """

    optimizer_class: ClassVar[Any]
    """a subclass of ``torch.optim.Optimizer``, or its name in ``torch.optim``"""
    names: ClassVar[tuple[str, ...]]
    """of the arguments"""

    @model_validator(mode="after")
    def _takes_its_keys(self) -> Self:
        for name in ("momentum", "weight_decay"):
            if name not in self.names and getattr(self, name):
                raise ValueError(f"kind = {self.kind} has no {name}: leave it out")
        return self

    def arguments(self) -> dict[str, Any]:
        """The arguments of the optimizer, by name."""
        return {name: getattr(self, name) for name in self.names}

    def optimizer(self, parameters: list[dict[str, Any]]) -> Optimizer:
        """The optimizer of a task."""
        import torch

        kind = self.optimizer_class
        made = getattr(torch.optim, kind) if isinstance(kind, str) else kind
        faster = in_lists(parameters) if isinstance(kind, str) else {}
        optimizer: Optimizer = made(parameters, **self.arguments(), **faster)
        return optimizer


Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamSolver(OptimizerSolver):
    """torch.optim.Adam."""

    optimizer_class = "Adam"
    names = ("lr", "betas", "eps", "weight_decay", "amsgrad")
    kind: Literal["adam"] = "adam"
    lr: Positive = 0.001
    betas: Annotated[tuple[Decay, Decay], Field(strict=False)] = (0.9, 0.999)
    eps: Positive = 1e-8
    amsgrad: bool = False


class AdamWSolver(AdamSolver):
    """torch.optim.AdamW, whose weight decay bypasses the moments."""

    optimizer_class = "AdamW"
    kind: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: Annotated[float, Field(ge=0)] = 0.01


class AdagradSolver(OptimizerSolver):
    """torch.optim.Adagrad."""

    optimizer_class = "Adagrad"
    names = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")
    kind: Literal["adagrad"] = "adagrad"
    lr: Positive = 0.01
    lr_decay: Annotated[float, Field(ge=0)] = 0.0
    initial_accumulator_value: Annotated[float, Field(ge=0)] = 0.0
    eps: Positive = 1e-10


class RMSpropSolver(OptimizerSolver):
    """torch.optim.RMSprop."""

    optimizer_class = "RMSprop"
    names = ("lr", "alpha", "eps", "weight_decay", "momentum", "centered")
    kind: Literal["rmsprop"] = "rmsprop"
    lr: Positive = 0.01
    alpha: Decay = 0.99
    eps: Positive = 1e-8
    centered: bool = False


_UNNAMED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_IMPLEMENTATION = {"maximize", "foreach", "fused", "capturable", "differentiable"}


def _of_optimizer(kind: type[Any]) -> type[OptimizerSolver]:
    """A solver for a subclass of ``torch.optim.Optimizer``.

    Its keys are the arguments, of their defaults' types. Raises ConfigError for an optimizer that
    computes the loss itself.
    """
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ConfigError(f"{kind.__name__}.step needs a closure; a task computes the loss once")
    _parameters, *given = inspect.signature(kind).parameters.values()
    arguments = {one.name: one for one in given if one.name not in _IMPLEMENTATION}
    if "lr" not in arguments or any(one.kind in _UNNAMED for one in given):
        raise ConfigError(f"{kind.__name__}() must name its arguments, and lr among them")
    fields: dict[str, Any] = {}
    for name, one in arguments.items():
        if one.default is one.empty:
            fields[name] = (Any, ...)
        else:  # a default is left out of what is recorded: TOML has no None
            left_out = Field(one.default, exclude_if=partial(operator.eq, one.default))
            fields[name] = (_type_of(one.default), left_out)
    made = create_model(
        kind.__name__, __base__=OptimizerSolver, __module__=kind.__module__, **fields
    )
    made.optimizer_class, made.names = kind, tuple(arguments)
    return made


def _type_of(default: object) -> Any:
    """The type of an argument with this default."""
    match default:
        case tuple() if None in default:
            return Annotated[tuple[Any, ...], Field(strict=False)]
        case tuple():
            return Annotated[tuple[float, ...], Field(strict=False)]
        case bool():
            return bool
        case int():
            return int | float
        case float():
            return float
    return Any


def _accept(value: object) -> type[Solver] | None:
    if not isinstance(value, type):
        return None
    if issubclass(value, Solver):
        return value
    torch = sys.modules.get("torch")  # imported by any program that defines an optimizer
    if torch is not None and issubclass(value, torch.optim.Optimizer):
        return _of_optimizer(value)
    return None


SOLVERS: PluginRegistry[type[Solver]] = PluginRegistry(
    "fedstream.solvers",
    "solver",
    {
        "sgd": Sgd,
        "proximal": Proximal,
        "scaffold": DriftCorrected,
        "adam": AdamSolver,
        "adamw": AdamWSolver,
        "adagrad": AdagradSolver,
        "rmsprop": RMSpropSolver,
    },
    accept=_accept,
    expected="a class derived from fedstream.Solver or torch.optim.Optimizer",
)
SolverSettings: TypeAlias = Annotated[Solver, OneOf(SOLVERS)]


_MOST_SHUFFLED = 1 << 24  # rows: their order takes 128 MiB and a second
_MANY = 100  # minibatches in a pass: so few rows are hardly ever drawn twice


def is_drawn(samples: int, solver: SolverSettings) -> bool:
    """Whether rows are drawn with replacement, because there are too many to shuffle."""
    return samples > _MOST_SHUFFLED and _size(samples, solver) * _MANY <= samples


def _size(samples: int, solver: SolverSettings) -> int:
    return min(solver.batch_size or samples, samples)


def pass_sizes(samples: int, solver: SolverSettings) -> list[int]:
    """The sizes of the minibatches of one pass over ``samples`` rows, in their order.

    With ``fresh`` sampling, or if rows are drawn, a pass has one minibatch. Otherwise the rows left
    over form a smaller last minibatch, or are left out by ``drop_last``. A single row left over
    belongs to the minibatch before: batch norm has no statistics of one row.
    """
    size = _size(samples, solver)
    if solver.sampling == "fresh" or is_drawn(samples, solver):
        return [size]
    whole, left = divmod(samples, size)
    sizes = [size] * whole
    if left and not solver.drop_last:
        if left == 1:
            sizes[-1] += 1
        else:
            sizes.append(left)
    return sizes


def minibatches_in(samples: int, solver: SolverSettings) -> int:
    """The number of minibatches in one epoch over ``samples`` rows; 0 for a stream."""
    if not samples:
        return 0
    whole, left = divmod(samples, _size(samples, solver))
    if solver.sampling == "fresh" or is_drawn(samples, solver):
        return whole + (left > 0)
    return whole + (left > 1 and not solver.drop_last)


class Cancelled(Exception):
    """Training was stopped between two batches.

    ``workspace``: for another replica to resume from; None if it was not kept.
    """

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.workspace = workspace


@dataclass(frozen=True)
class Work:
    """The input of local training; exactly one of ``steps``, ``epochs`` and ``seconds`` is set.

    Vectors hold one float32 per parameter of the model, in the layout's order.
    """

    device: int
    task: str
    """the task's id"""
    version: int
    """tau, the model's version"""
    seed: int
    steps: int | None
    """H"""
    epochs: int | None
    solver: SolverSettings
    cancelled: Callable[[], bool]
    seconds: float | None = None
    """a time budget: at least one step, and more until the time is spent"""
    base: str | None = None
    """digest of x_tau, for the workspace; None: computed from the model if needed"""
    control: Floats | None = None
    """c of SCAFFOLD, published with x_tau; None: zero. Other solvers ignore it."""
    device_control: Floats | None = None
    """c_i of SCAFFOLD; None: zero, as in the device's first task"""
    resume: Workspace | None = None
    """where to resume; x_tau, c and c_i are then taken from the workspace"""
    descents: Iterator[int] = field(default=repeat(0), compare=False, repr=False)
    """numbers the calls of ``descend``: only number 0 can be interrupted and resumed"""

    def __post_init__(self) -> None:
        given = [length for length in (self.steps, self.epochs, self.seconds) if length is not None]
        wrong = len(given) != 1 or not 0 < given[0] < math.inf
        if wrong or (self.seconds is None and given[0] < 1):
            raise ConfigError(
                f"task {self.task} asks for {self.steps} steps, {self.epochs} epochs and "
                f"{self.seconds} seconds: give exactly one of them: at least 1 step or epoch, or a "
                "time above 0"
            )


@dataclass(frozen=True)
class Trained:
    """The result of training: steps done, size of the partition, mean loss over the steps."""

    steps: int
    """steps done; 0: unknown, allowed only for a task without ``exact_steps``"""
    samples: int
    loss: float | None
    """mean loss over the steps; None: unknown"""
    control: Floats | None = None
    """c_i+ of SCAFFOLD, to keep for the device; not finite if the model isn't"""
    lr: float | None = None
    """gamma if it differs from the solver's lr; its mean over the steps if it varied"""


class SolverGroup(Section):
    """The solver of some devices; keys left out are taken from ``solver``.

    The other keys depend on the solver, so :meth:`of` checks them.
    """

    model_config = ConfigDict(extra="allow")

    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    kind: str | None = None

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str | None) -> str | None:
        if kind is None:
            return None
        try:
            return SOLVERS.find(kind).name
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def of(self, usual: SolverSettings, at: str = "solvers") -> SolverSettings:
        """The usual solver with the group's changes. ``at``: the group's key.

        Raises ConfigError.
        """
        kind = self.kind or usual.kind
        model = type(usual) if kind == usual.kind else SOLVERS.find(kind).value
        given = self.model_dump(mode="json", exclude_none=True, exclude={"devices"})
        known = model.model_fields
        kept = {key: v for key, v in usual.model_dump(mode="json").items() if key in known}
        return check(model, kept | given | {"kind": kind}, at)


@dataclass(frozen=True)
class _Group(OneOf):
    """Annotation of a group, so that a recorded solver of a group isn't trusted."""

    def __get_pydantic_core_schema__(
        self, base: type[BaseModel], handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return handler(base)

    def models(self, *_tags: object, recorded: bool = False) -> list[type[BaseModel]]:
        """The group itself, whose keys are checked once the solver is known."""
        return [SolverGroup]


SolverGroups: TypeAlias = tuple[Annotated[SolverGroup, _Group(SOLVERS)], ...]


class Solvers:
    """Every device's solver."""

    def __init__(self, usual: SolverSettings, groups: Sequence[SolverGroup] = ()) -> None:
        """Raises ValueError if a group's solver is invalid, or a device is in two groups."""
        self.usual = usual
        self.others: dict[int, SolverSettings] = {}
        for n, group in enumerate(groups):
            try:
                solver = group.of(usual, f"solvers[{n}]")
            except ConfigError as error:
                raise ValueError(str(error)) from error
            for device in group.devices:
                if device in self.others:
                    raise ValueError(f"solvers[{n}].devices: device {device} is listed twice")
                self.others[device] = solver

    def __getitem__(self, device: int) -> SolverSettings:
        return self.others.get(device, self.usual)
