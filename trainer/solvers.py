"""Local training: how a device gets from x_tau to the x_new it sends back.

torch is imported inside functions, so that services that only read the settings start without it.
"""

# ruff: noqa: SLF001  (torch's list operations, torch._foreach_*, are private in name only)

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from fedstream.broker.errors import BadMessage, ConfigError, DataError, LayoutMismatch
from fedstream.broker.layout import Floats, Model
from fedstream.runtime.config import Section
from fedstream.trainer.compression import Compression, NoCompression
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.trainer.task import Task

    Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]


class Sgd(Section):
    """Plain minibatch SGD: FedAsync, option I; also the local solver of FedAvg, FedBuff and AFL."""

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


class Scaffold(Sgd):
    """SGD with a correction for client drift: SCAFFOLD (Karimireddy et al., option II)."""

    kind: Literal["scaffold"] = "scaffold"  # type: ignore[assignment]  # narrows the tag

    @model_validator(mode="after")
    def _plain_steps(self) -> Scaffold:
        if self.momentum:
            raise ValueError(
                f"momentum = {self.momentum} does not go with kind = scaffold, whose control is "
                "the mean of plain steps: leave momentum out"
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
    | Annotated[Scaffold, Tag("scaffold")],
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
                f"{self.seconds} seconds: exactly one of them is to be given, at least 1 step or "
                f"epoch, or a time above 0"
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


def solve(task: Task, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
    """Train ``model``, which holds x_tau, in place by exactly H steps (FedAsync, algorithm 1):

        x <- x - gamma g,       g = grad f(x; z)                        SGD, option I
                                  + rho (x - x_tau)                     proximal, option II
                                  + c - c_i                             SCAFFOLD

    on the trainable parameters. ``epochs`` passes are epochs * ceil(samples / batch_size) steps; a
    time budget takes as many steps as fit. The gradient is clipped first, then weight decay is
    added, then the solver's own term; momentum accumulates the sum. SCAFFOLD ends with

        c_i+ = c_i - c + (x_tau - x_new) / (H gamma)        zero for parameters not trained

    All randomness (minibatches, dropout) derives from ``work.seed``: except with a time budget, the
    same work on the same machine gives the same bits, even if it is interrupted and resumed.
    Dropout draws from torch's global generators, which are restored afterwards, so a process must
    do only one piece of work at a time.

    A non-finite loss does not stop training: the updater refuses the update and counts it.

    Raises Cancelled before the next batch once ``work.cancelled()`` is true, with the model reset
    to x_tau; DataError, naming the device, if its data is empty, not map-style, or does not suit
    the task's loss; LayoutMismatch, ConfigError or BadMessage if the workspace or a control
    variate belongs to another model, other work or another version of torch.
    """
    import torch

    samples = size_of(data, work.device)
    trained = [x for x in model.parameters() if x.requires_grad]
    if not trained:
        raise ConfigError("there is nothing to train: no parameter of the model takes a gradient")
    model.train()
    with torch.random.fork_rng(devices=[trained[0].device] if trained[0].is_cuda else []):
        training = _begun(model, trained, samples, work)
        while training.goes_on():
            if work.cancelled():
                raise Cancelled(training.stop())
            try:
                loss = task.loss(model, gather(data, training.minibatch()))
            except DataError as error:
                raise DataError(f"device {work.device}: {error}") from error
            training.step(loss)
    return training.result()


def _begun(model: nn.Module, trained: list[nn.Parameter], samples: int, work: Work) -> _Training:
    """Training at its start, or resumed from the workspace."""
    saved = work.resume
    if saved is None:
        return _Training(model, trained, samples, work)
    from fedstream.trainer.vector import layout_of, load

    x, x_tau = saved.models(layout_of(model))
    load(x_tau, model)
    work = replace(
        work, base=saved.base, control=saved.control, device_control=saved.device_control
    )
    training = _Training(model, trained, samples, work)
    load(x, model)
    training.skip_to(saved)
    return training


class _Training:
    """The state of local training between two steps. Creating it seeds torch's global generators.

    All parameters are updated by torch's list operations, because small models spend their time
    launching operations, not computing.
    """

    def __init__(
        self, model: nn.Module, trained: list[nn.Parameter], samples: int, work: Work
    ) -> None:
        import torch

        solver = work.solver
        self._model, self._trained, self._work, self._solver = model, trained, work, solver
        self._minibatches = Minibatches(samples, solver, work.seed)
        self._generators = _global_generators(trained[0])
        torch.manual_seed(work.seed)
        steps = work.epochs * self._minibatches.epoch if work.epochs else work.steps
        # Identifies this work: a workspace of other work must not be resumed.
        self._about: dict[str, Any] = {
            "task": work.task,
            "device": work.device,
            "version": work.version,
            "seed": work.seed,
            "solver": solver.model_dump_json(),
            "samples": samples,
            "steps": steps,
        }
        self._steps = math.inf if steps is None else steps
        self._budget_s = math.inf if work.seconds is None else work.seconds
        self._step, self._began_s = 0, time.monotonic()
        self._loss = torch.zeros((), dtype=torch.float64, device=trained[0].device)
        self._x_tau = [tensor.detach().clone() for tensor in _state(model)]
        starts = zip(model.parameters(), self._x_tau, strict=False)  # buffers come last
        self._start = [x_tau for x, x_tau in starts if x.requires_grad]
        self._x = [x.detach() for x in trained]  # the same memory, without a graph
        self._rho = solver.rho if isinstance(solver, Proximal) else 0.0
        if solver.momentum:
            self._momentum = _split(None, model)
        if isinstance(solver, Scaffold):
            c, c_i = _split(work.control, model), _split(work.device_control, model)
            self._correction = torch._foreach_sub(c, c_i)

    def goes_on(self) -> bool:
        """Whether to take another step."""
        if self._budget_s < math.inf:
            self._loss.item()  # waits for the GPU: the budget must count finished steps
        return self._step == 0 or (self._step < self._steps and self._seconds() < self._budget_s)

    def minibatch(self) -> torch.Tensor:
        """The rows of the next step."""
        return self._minibatches.next()

    def step(self, loss: torch.Tensor) -> None:
        """x <- x - gamma g."""
        import torch

        gradients = torch.autograd.grad(loss, self._trained, materialize_grads=True)
        torch._foreach_sub_(self._x, self._direction(gradients), alpha=self._solver.lr)
        self._loss += loss.detach().view(())  # not .item(): it would wait for the GPU each step
        self._step += 1

    def result(self) -> Trained:
        """The result, once no step is left."""
        import torch

        control = None
        if isinstance(self._solver, Scaffold):
            way = torch._foreach_sub(self._start, self._x)
            mean = torch._foreach_div(way, self._step * self._solver.lr)
            control = _join(torch._foreach_sub(mean, self._correction), self._model)
        samples = self._about["samples"]
        return Trained(self._step, samples, self._loss.item() / self._step, control)

    def stop(self) -> Workspace:
        """Return all that is needed to resume here, and reset the model to x_tau."""
        from fedstream.trainer.vector import layout_of, read

        layout = layout_of(self._model)
        x, x_tau = Model(layout), Model(layout)
        read(self._model, x)
        for tensor, value in zip(_state(self._model), self._x_tau, strict=True):
            tensor.detach().copy_(value)
        read(self._model, x_tau)
        state, position = self._minibatches.place
        return Workspace(
            **self._about,
            base=self._work.base or x_tau.digest(),
            layout=layout.signature,
            step=self._step,
            seconds=self._seconds(),
            loss=self._loss.item(),
            minibatches=state,
            position=position,
            generators=tuple(_bytes(generator.get_state()) for generator in self._generators),
            x=x.buffer,
            x_tau=x_tau.buffer,
            momentum=_join(self._momentum, self._model) if self._solver.momentum else None,
            control=self._work.control,
            device_control=self._work.device_control,
        )

    def skip_to(self, saved: Workspace) -> None:
        """Resume where ``saved`` stopped; the model already holds its parameters."""
        for name, ours in self._about.items():
            if (theirs := getattr(saved, name)) != ours:
                raise ConfigError(
                    f"task {self._work.task}: the workspace is of other work, its {name} is "
                    f"{theirs} and not {ours}: train from the start"
                )
        self._step = saved.step
        self._began_s -= saved.seconds
        self._loss += saved.loss
        if self._solver.momentum:
            self._momentum = _split(saved.momentum, self._model)
        self._minibatches.skip_to(saved.minibatches, saved.position)
        # A workspace from a machine without a GPU lacks that generator's state: keep it as seeded.
        for generator, state in zip(self._generators, saved.generators, strict=False):
            _restore(generator, state)

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s

    def _direction(self, gradients: Tensors) -> Tensors:
        """g from the loss's gradients. They are not written to: two may share one tensor."""
        import torch

        g, solver = gradients, self._solver
        if solver.clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(g)
            g = torch._foreach_mul(g, (solver.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if solver.weight_decay:
            g = torch._foreach_add(g, self._x, alpha=solver.weight_decay)
        if self._rho:
            g = torch._foreach_add(g, torch._foreach_sub(self._x, self._start), alpha=self._rho)
        if isinstance(solver, Scaffold):
            g = torch._foreach_add(g, self._correction)
        if solver.momentum:
            torch._foreach_mul_(self._momentum, solver.momentum)
            torch._foreach_add_(self._momentum, g)
            g = self._momentum
        return g


class Minibatches:
    """An endless sequence of minibatches, as row numbers.

    They are slices of shuffled passes, including the smaller last one. With ``fresh`` sampling,
    each pass ends after its first minibatch.
    """

    def __init__(self, samples: int, solver: SolverSettings, seed: int) -> None:
        import torch

        self._samples = samples
        self._size = min(solver.batch_size or samples, samples)
        self._used = self._size if solver.sampling == "fresh" else samples
        self._generator = torch.Generator().manual_seed(seed)
        self._shuffle()

    @property
    def epoch(self) -> int:
        """The number of minibatches that covers as many samples as there are."""
        return math.ceil(self._samples / self._size)

    @property
    def place(self) -> tuple[bytes, int]:
        """The generator's state before it drew the current pass, and minibatches taken from it."""
        return _bytes(self._before), self._taken

    def skip_to(self, state: bytes, taken: int) -> None:
        """Resume at a ``place``."""
        _restore(self._generator, state)
        self._shuffle()
        self._taken = taken

    def next(self) -> torch.Tensor:
        """The row numbers of the next minibatch."""
        if self._taken == len(self._pass):
            self._shuffle()
        self._taken += 1
        return self._pass[self._taken - 1]

    def _shuffle(self) -> None:
        import torch

        self._before = self._generator.get_state()
        rows = torch.randperm(self._samples, generator=self._generator)
        self._pass = torch.split(rows[: self._used], self._size)
        self._taken = 0


def _state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that training may change."""
    yield from model.parameters()
    yield from model.buffers()


def _of_vector(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that make up a vector, in its order (:mod:`fedstream.trainer.vector`)."""
    return [x for x in model.parameters() if x.is_floating_point()]


def _split(vector: Floats | None, model: nn.Module) -> Tensors:
    """The part of a vector that belongs to each trained parameter; None: zeros."""
    import torch

    parameters = _of_vector(model)
    sizes = [x.numel() for x in parameters]
    if vector is None:
        return [torch.zeros_like(x) for x in parameters if x.requires_grad]
    if vector.shape != (sum(sizes),):
        raise LayoutMismatch(
            f"a vector of shape {vector.shape} for a model of {sum(sizes)} parameters"
        )
    parts = zip(parameters, torch.split(torch.tensor(vector), sizes), strict=True)
    return [part.view(x.shape).to(x) for x, part in parts if x.requires_grad]


def _join(parts: Tensors, model: nn.Module) -> Floats:
    """The vector made of these parts; zero for parameters that are not trained."""
    import torch

    rest = iter(parts)
    whole = [next(rest) if x.requires_grad else torch.zeros_like(x) for x in _of_vector(model)]
    vector: Floats = torch.cat([x.flatten().to("cpu", torch.float32) for x in whole]).numpy()
    return vector


def _global_generators(where: torch.Tensor) -> list[torch.Generator]:
    """torch's global generators, used by dropout: the CPU's and, for a GPU tensor, its GPU's."""
    import torch

    gpu = [torch.cuda.default_generators[where.get_device()]] if where.is_cuda else []
    return [torch.default_generator, *gpu]


def _bytes(state: torch.Tensor) -> bytes:
    data: bytes = state.numpy().tobytes()
    return data


def _restore(generator: torch.Generator, state: bytes) -> None:
    import torch

    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, ValueError) as error:
        raise BadMessage(f"the state of a generator is not this torch's: {error}") from error


def gather(data: Dataset[Any], rows: torch.Tensor) -> Any:
    """Collate these rows into a batch, as torch does by default; index tensors where possible.

    Raises DataError if the items cannot be collated.
    """
    from torch.utils.data import TensorDataset, default_collate

    if type(data) is TensorDataset:  # a subclass may override __getitem__
        # several times as fast as tensor[rows]
        return [tensor.index_select(0, rows.to(tensor.device)) for tensor in data.tensors]
    items = [data[row] for row in rows.tolist()]
    try:
        return default_collate(items)
    except (TypeError, RuntimeError) as error:
        raise DataError(f"items of the data set do not make a batch: {error}") from error


def size_of(data: Dataset[Any], device: int) -> int:
    """The number of samples. Raises DataError if there are none, or the data has no length."""
    size = length_of(data, f"device {device}: device_data()", "a map-style data set")
    if size == 0:
        raise DataError(f"device {device} has no data: its data set is empty")
    return size


def length_of(data: Dataset[Any], source: str, wanted: str) -> int:
    """The length of what ``source`` returned. Raises DataError, naming both, if it has none."""
    try:
        return len(data)  # type: ignore[arg-type]  # torch's Dataset declares no length
    except TypeError:
        raise DataError(
            f"{source} returned {type(data).__name__}, which has no length: it must return {wanted}"
        ) from None
