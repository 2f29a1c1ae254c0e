"""Local training, as asked for: the solvers' settings, one piece of work, and its result.

How the work is done is in :mod:`fedstream.trainer.descent`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from fedstream.broker.errors import ConfigError
from fedstream.broker.layout import Floats
from fedstream.runtime.config import Section
from fedstream.trainer.compression import Compression, NoCompression
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable


class Sgd(Section):
    """Plain minibatch SGD: FedAsync, option I; also the local solver of FedAvg, FedBuff and AFL."""

    controls: ClassVar[bool] = False  # it corrects client drift, with a strategy that does so too
    kind: Literal["sgd"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.3
    """gamma (eta_L in AFL)"""
    batch_size: Annotated[int, Field(ge=0)] = 50
    """0: the whole partition in each step, i.e. the full gradient"""
    sampling: Literal["passes", "fresh"] = "passes"
    """passes: minibatches are slices of shuffled passes over the data; fresh: each minibatch is
    drawn from all of it (AFL)"""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """as in torch.optim.SGD; starts from zero in every task"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """as in torch.optim.SGD: weight_decay * x is added to the gradient"""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """upper bound on the norm of the loss's gradient, over all parameters; None: no clipping"""
    compression: Compression = NoCompression()
    """applied to the delta once training is done"""


class Proximal(Sgd):
    """SGD with a penalty on the distance from its start: FedAsync, option II; FedProx."""

    kind: Literal["proximal"] = "proximal"  # type: ignore[assignment]  # narrows the tag
    rho: Annotated[float, Field(ge=0)] = 0.01


class DriftCorrected(Sgd):
    """SGD with a correction for client drift: SCAFFOLD (Karimireddy et al., option II)."""

    controls: ClassVar[bool] = True
    kind: Literal["scaffold"] = "scaffold"  # type: ignore[assignment]  # narrows the tag

    @model_validator(mode="after")
    def _plain_steps(self) -> DriftCorrected:
        if self.momentum:
            raise ValueError(
                f"momentum = {self.momentum} does not work with kind = scaffold, whose control is "
                "the mean of plain steps: leave out momentum"
            )
        return self


def _kind(settings: object) -> object:
    """The tag of a solver; a table without ``kind``, e.g. one that only sets lr, means sgd."""
    if isinstance(settings, dict):
        return settings.get("kind", "sgd")
    return getattr(settings, "kind", None)


SolverSettings = Annotated[
    Annotated[Sgd, Tag("sgd")]
    | Annotated[Proximal, Tag("proximal")]
    | Annotated[DriftCorrected, Tag("scaffold")],
    Discriminator(
        _kind,
        custom_error_type="solver_kind",
        custom_error_message="kind must be sgd, proximal or scaffold",
    ),
]


class Cancelled(Exception):
    """Training was stopped between two batches.

    ``workspace`` lets another replica resume from there; None if it was not kept.
    """

    def __init__(self, workspace: Workspace | None = None) -> None:
        super().__init__()
        self.workspace = workspace


@dataclass(frozen=True)
class Work:
    """One piece of local training; exactly one of ``steps``, ``epochs`` and ``seconds`` is set.

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
    """a time budget: at least one step, then more until it is spent"""
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
    samples: int
    loss: float
    control: Floats | None = None
    """c_i+ of SCAFFOLD, to be kept for the device; not finite if the model isn't"""
    lr: float | None = None
    """gamma if it differs from the solver's lr; if it varied, its mean over the steps"""
