"""The solvers' settings, the input of local training and its result.

:mod:`fedstream.trainer.descent` performs the training. Anarchic Federated Learning, section 3:
'each worker is able to completely take control of its own optimization process'. So the
configuration (``solvers``) can give groups of devices a solver of their own, and
:meth:`fedstream.trainer.task.Task.solver_of` any single device.
"""

# ruff: noqa: SLF001  (torch's list operations, torch._foreach_*, are private in name only)

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema

from fedstream.core.errors import ConfigError
from fedstream.core.layout import Floats
from fedstream.runtime.config import NamedSettings, Section, check
from fedstream.runtime.plugins import OneOf, PluginRegistry
from fedstream.trainer.schedules import ConstantRate, RateSchedule
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.trainer.task import Task

    Tensors: TypeAlias = list[torch.Tensor] | tuple[torch.Tensor, ...]


class NoCompression(Section):
    """Send the delta unchanged."""

    kind: Literal["none"] = "none"


class Bf16(Section):
    """Round every value to the nearest bfloat16, ties to even: a relative error of at most 2^-8."""

    kind: Literal["bf16"] = "bf16"


class TopK(Section):
    """Keep the k values of largest magnitude and zero the others; on ties the first ones win.

    top_k of *Sparsified SGD with Memory* (Stich, Cordonnier, Jaggi 2018), definition 2.2, without
    the memory: what is left out is lost.
    """

    kind: Literal["topk"] = "topk"
    share: Annotated[float, Field(gt=0, le=1)]
    """k as a share of the parameters; k is rounded, and at least 1"""


Compression = Annotated[NoCompression | Bf16 | TopK, Field(discriminator="kind")]


def compress(delta: Floats, how: Compression) -> None:
    """Overwrite ``delta``, a vector of any length, with its compressed and decoded values.

    Anarchic Federated Learning, algorithm 1: 'with extra processing if so desired', which section 3
    calls 'rescaling, compression for communication-efficiency, etc.'. This shows the effect of
    lossy compression on training, device by device. The wire format
    (:mod:`fedstream.core.formats`), not this, saves bytes. A delta that is not finite stays so, and
    the updater refuses it.
    """
    match how:
        case Bf16():
            import torch

            vector = torch.from_numpy(delta)
            vector.copy_(vector.to(torch.bfloat16))
        case TopK(share=share):
            _keep_largest(delta, max(1, round(share * delta.size)))


def _keep_largest(delta: Floats, k: int) -> None:
    sizes = np.abs(delta)
    if k >= sizes.size or not np.isfinite(sizes).all():
        return
    least = np.partition(sizes, -k)[-k]
    kept = sizes > least
    kept[np.flatnonzero(sizes == least)[: k - np.count_nonzero(kept)]] = True
    delta[~kept] = 0.0


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


class Solver(NamedSettings):
    """Base class of solvers, minibatch descent. A solver's fields are the keys of ``solver``.

    A step is x <- x - rate(n) g, where g comes from the loss's gradient: clipped, then with weight
    decay added, then changed by :meth:`direction`, then with momentum. A solver of your own
    overrides :meth:`direction` or :meth:`rate`, or replaces the whole local training,
    :meth:`train`. It must be deterministic, apart from torch's global generators, which are seeded
    for each task.
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
    compression: Compression = NoCompression()
    """applied to the delta once training is done"""

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
        return self.model_copy(update={"lr": self.lr * share, "schedule": ConstantRate()})

    def rate(self, n: int) -> float:
        """The step size of step ``n``, counted from 0; by default ``lr``."""
        return self.lr

    def direction(self, g: Tensors, at: Iterate) -> Tensors:
        """The direction of a step from ``g``; by default ``g`` itself.

        ``g`` has one tensor per trained parameter and must not be written to; the result must have
        the same shapes.
        """
        return g

    def train(self, task: Task, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
        """Train ``model``, which holds x_tau, in place; by default by ``task.descend``.

        An interruptible solver raises Cancelled once ``work.cancelled()`` is true.
        """
        return task.descend(model, data, work)


class Sgd(Solver):
    """Plain minibatch SGD: FedAsync, option I; also the local solver of FedAvg, FedBuff and AFL."""

    kind: Literal["sgd"] = "sgd"


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


def _accept(value: object) -> type[Solver] | None:
    return value if isinstance(value, type) and issubclass(value, Solver) else None


SOLVERS: PluginRegistry[type[Solver]] = PluginRegistry(
    "fedstream.solvers",
    "solver",
    {"sgd": Sgd, "proximal": Proximal, "scaffold": DriftCorrected},
    accept=_accept,
    expected="a class derived from fedstream.Solver",
)
SolverSettings: TypeAlias = Annotated[Solver, OneOf(SOLVERS)]


_MOST_SHUFFLED = 1 << 24  # rows: their order takes 128 MiB and a second
_MANY = 100  # minibatches in a pass: so few rows are hardly ever drawn twice


def is_drawn(samples: int, solver: SolverSettings) -> bool:
    """Whether rows are drawn with replacement, as they are too many to be shuffled."""
    return samples > _MOST_SHUFFLED and _size(samples, solver) * _MANY <= samples


def _size(samples: int, solver: SolverSettings) -> int:
    return min(solver.batch_size or samples, samples)


def pass_sizes(samples: int, solver: SolverSettings) -> list[int]:
    """The sizes of the minibatches of one pass over ``samples`` rows, in their order.

    A pass has one minibatch with ``fresh`` sampling, and if rows are drawn. Otherwise the last
    minibatch is smaller, or left out by ``drop_last``. A single row that is left over belongs to
    the minibatch before: batch norm has no statistics of one row.
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
    """The number of minibatches that covers as many samples as there are."""
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
