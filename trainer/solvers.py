"""Local training: what a device does with x_tau before it answers with x_new.

torch is imported where it is used: services that only read these settings start without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from broker.errors import ConfigError, DataError
from runtime.config import Section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from trainer.task import Task


class Sgd(Section):
    """Plain minibatch SGD: FedAsync, option I; also the local steps of FedAvg, FedBuff and AFL."""

    kind: Literal["sgd"] = "sgd"
    lr: Annotated[float, Field(gt=0)] = 0.3
    """gamma (eta_L in AFL)"""
    batch_size: Annotated[int, Field(ge=0)] = 50
    """0: the whole partition in each step, the full gradient"""


class Proximal(Sgd):
    """SGD that is held to the model it started from: FedAsync, option II; FedProx."""

    kind: Literal["proximal"] = "proximal"  # type: ignore[assignment]  # narrows the tag
    rho: Annotated[float, Field(ge=0)] = 0.01


def _kind(settings: object) -> object:
    """The tag of a solver; a table without ``kind``, such as one override of lr, means sgd."""
    if isinstance(settings, dict):
        return settings.get("kind", "sgd")
    return getattr(settings, "kind", None)


SolverSettings = Annotated[
    Annotated[Sgd, Tag("sgd")] | Annotated[Proximal, Tag("proximal")],
    Discriminator(
        _kind,
        custom_error_type="solver_kind",
        custom_error_message="kind must be sgd or proximal",
    ),
]


class Cancelled(Exception):
    """Training was stopped between two batches; the model is somewhere on its way."""


@dataclass(frozen=True)
class Work:
    """One piece of local training. Exactly one of ``steps`` (H) and ``epochs`` is given."""

    device: int
    task: str
    """the task's id"""
    version: int
    """tau, the version that the model is"""
    seed: int
    steps: int | None
    epochs: int | None
    solver: SolverSettings
    cancelled: Callable[[], bool]

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None) or (self.steps or self.epochs or 0) < 1:
            raise ConfigError(
                f"task {self.task} asks for {self.steps} steps and {self.epochs} epochs: "
                f"exactly one of them is to be given, and at least 1"
            )


@dataclass(frozen=True)
class Trained:
    """What training took: steps done, size of the device's partition, mean loss over the steps."""

    steps: int
    samples: int
    loss: float


def solve(task: Task, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
    """Train ``model`` in place, from x_tau as it comes, by exactly H steps (FedAsync, algorithm 1)

        x <- x - gamma (grad f(x; z) + rho (x - x_tau)),        rho = 0 for option I

    on the trainable parameters; ``epochs`` passes are epochs * ceil(samples / batch_size) steps.
    Everything random (minibatches, dropout) follows from ``work.seed``: the same work on the same
    machine gives the same bits. Dropout draws from torch's global generator, which is put back
    afterwards, so one process does one piece of work at a time.

    A loss that is not finite doesn't end it: the updater refuses such an update, with a count.

    Raises Cancelled at the next batch once ``work.cancelled()``; DataError, naming the device, if
    its data is empty, not map-style, or not what the task's loss takes.
    """
    import torch

    lr, rho = work.solver.lr, work.solver.rho if isinstance(work.solver, Proximal) else 0.0
    samples = _size(data, work.device)
    batch_size = min(work.solver.batch_size or samples, samples)
    steps = work.steps or (work.epochs or 0) * math.ceil(samples / batch_size)
    generator = torch.Generator().manual_seed(work.seed)

    model.train()
    trained = [x for x in model.parameters() if x.requires_grad]
    received = [x.detach().clone() for x in trained] if rho else trained
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(work.seed)
        for rows in islice(_minibatches(samples, batch_size, generator), steps):
            if work.cancelled():
                raise Cancelled
            try:
                loss = task.loss(model, gather(data, rows))
            except DataError as error:
                raise DataError(f"device {work.device}: {error}") from error
            gradients = torch.autograd.grad(loss, trained, materialize_grads=True)
            with torch.no_grad():
                for x, gradient, x_tau in zip(trained, gradients, received, strict=True):
                    direction = gradient + rho * (x - x_tau) if rho else gradient
                    x.sub_(direction, alpha=lr)
            losses.append(loss.detach())  # not .item(): that would wait for a GPU in every step
    return Trained(steps, samples, torch.stack(losses).double().mean().item())


def gather(data: Dataset[Any], rows: torch.Tensor) -> Any:
    """The batch of these rows: torch's default collation of the items, by indexing if it can be.

    Raises DataError if the items cannot be collated.
    """
    from torch.utils.data import TensorDataset, default_collate

    if type(data) is TensorDataset:  # a subclass may have items of its own
        return [tensor[rows] for tensor in data.tensors]
    items = [data[row] for row in rows.tolist()]
    try:
        return default_collate(items)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"items of the data set do not make a batch: {error}") from error


def _minibatches(
    samples: int, batch_size: int, generator: torch.Generator
) -> Iterator[torch.Tensor]:
    """Rows of one minibatch after another, for ever: shuffled passes, the smaller last one kept."""
    import torch

    while True:
        yield from torch.split(torch.randperm(samples, generator=generator), batch_size)


def _size(data: Dataset[Any], device: int) -> int:
    try:
        size = len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
    except TypeError:
        raise DataError(
            f"device {device}: its data has no length; device_data() must give a map-style data set"
        ) from None
    if size == 0:
        raise DataError(f"device {device} has no data: its data set is empty")
    return size
