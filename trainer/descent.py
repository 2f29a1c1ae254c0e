"""Local training: the steps from x_tau to x_new."""

# ruff: noqa: SLF001  (torch's list operations, torch._foreach_*, are private in name only)

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from fedstream.core.errors import BadMessage, ConfigError, DataError, LayoutMismatch
from fedstream.core.layout import Floats, Model
from fedstream.trainer import optimizers
from fedstream.trainer.batches import Collating, batches_of
from fedstream.trainer.data import random_states, restore_random_states, seeded, size_of
from fedstream.trainer.solvers import SOLVERS, Cancelled, Iterate, Solver, Trained, Work
from fedstream.trainer.vector import layout_of, load, load_part, read, read_part
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

    from fedstream.trainer.solvers import SolverSettings, Tensors


class Trainable(Collating, Protocol):
    """The methods of :class:`fedstream.Task` that training calls."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The scalar to minimise on one collated batch."""

    def optimizers(self, model: nn.Module, solver: SolverSettings) -> Sequence[Optimizer]:
        """The optimizers that all take each step."""


def solve(task: Trainable, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
    """Train ``model``, which holds x_tau, in place by exactly H steps (FedAsync, algorithm 1):

        x <- x - gamma g,       g = grad f(x; z)                        SGD, option I
                                  + rho (x - x_tau)                     proximal, option II
                                  + c - c_i                             SCAFFOLD

    on the trainable parameters, or by the steps of another optimizer of ``torch.optim``.
    ``epochs`` passes take the steps of their minibatches; a time budget takes as many steps as
    fit. The gradient is clipped first, then changed by the solver (``direction``), then the
    optimizer adds weight decay and momentum. Without any of these, the bits are those of a plain
    loop of ``loss.backward()`` and ``optimizer.step()`` over the same batches. SCAFFOLD ends with

        c_i+ = c_i - c + (x_tau - x_new) / (H gamma)

    All randomness derives from ``work.seed``: except with a time budget, the same work on the same
    machine gives the same bits, even if it is interrupted and resumed. Dropout and augmentation may
    draw from the global generators of Python, numpy and torch, which are restored afterwards, so a
    process must do only one piece of work at a time.

    A non-finite loss does not stop training: the updater refuses the update and counts it.

    Raises Cancelled before the next step once ``work.cancelled()`` is true, with the model reset
    to x_tau; DataError, naming the device, if its data is empty, has no length, or does not suit
    the task's loss; LayoutMismatch, ConfigError or BadMessage if the workspace or a control
    variate belongs to another model, other work or another version of torch.
    """
    trained = [x for x in model.parameters() if x.requires_grad]
    if not trained:
        raise ConfigError(f"nothing to train: model() {_lack(model)}")
    model.train()
    with seeded(work.seed), channels_last(model) if work.solver.channels_last else nullcontext():
        training = _begun(task, model, trained, data, work)
        is_resumed = work.resume is not None
        while training.goes_on():
            if work.cancelled():
                raise Cancelled(training.stop())
            try:
                training.step()
            except DataError as error:
                raise DataError(f"device {work.device}: {error}") from error
            except Exception as error:
                if is_resumed:  # a state that no check before has found wrong; if the fault is the
                    raise BadMessage(  # task's own, a start from x_tau shows it again
                        f"the workspace cannot be continued: {type(error).__name__}: {error}"
                    ) from error
                raise
            is_resumed = False
        return training.result()


@contextmanager
def channels_last(model: nn.Module) -> Iterator[None]:
    """Keep the channels of all four-dimensional tensors last in memory, inside the block."""
    lay_out(model, torch.channels_last)
    try:
        yield
    finally:
        lay_out(model, torch.contiguous_format)


def lay_out(model: nn.Module, how: torch.memory_format) -> None:
    """Give all four-dimensional tensors of a model a memory format."""
    for tensor in _state(model):
        if tensor.dim() == 4:
            tensor.data = tensor.data.contiguous(memory_format=how)


def _lack(model: nn.Module) -> str:
    """The error text for a model without trainable parameters."""
    if frozen := len([*model.parameters()]):
        return f"has {frozen} parameters, all frozen: set requires_grad for those to be trained"
    only = "only buffers" if any(True for _ in model.buffers()) else "no parameters"
    return f"has {only}: return a module with parameters, or define the task's own train()"


def _begun(
    task: Trainable, model: nn.Module, trained: list[nn.Parameter], data: Dataset[Any], work: Work
) -> _Descent:
    """Begin training, or resume it from the workspace."""
    saved, is_first = work.resume, next(work.descents) == 0
    if saved is None or not is_first:  # the workspace of a task's first descent
        return _Descent(task, model, trained, data, work, saves=is_first)
    x, x_tau = saved.models(layout_of(model))
    load(x_tau, model)
    work = replace(
        work, base=saved.base, control=saved.control, device_control=saved.device_control
    )
    training = _Descent(task, model, trained, data, work)
    load(x, model)
    if saved.local is not None and x.layout.unshared is not None:
        load_part(Model(x.layout.unshared.of_devices, saved.local), model)
    training.skip_to(saved)
    return training


class _Descent:
    """The state of local training between two steps.

    torch's list operations change all parameters at once, because small models spend their time
    launching operations, not computing.
    """

    def __init__(
        self,
        task: Trainable,
        model: nn.Module,
        trained: list[nn.Parameter],
        data: Dataset[Any],
        work: Work,
        *,
        saves: bool = True,
    ) -> None:
        """``saves``: whether to leave a workspace when interrupted."""
        solver = work.solver
        self._saves = saves
        self._task, self._work, self._solver = task, work, solver
        self._model, self._trained = model, trained
        samples = size_of(data, work.device)
        if not samples and (work.epochs or not solver.batch_size):
            wrong = "epochs" if work.epochs else "batch_size = 0"
            raise ConfigError(
                f"an IterableDataset has no length: {wrong} needs a map-style data set"
            )
        try:
            self._batches = batches_of(task, data, samples, solver, work.seed)
        except DataError as error:
            raise DataError(f"device {work.device}: {error}") from error
        steps = work.steps
        if work.epochs:
            steps = math.ceil(work.epochs * self._batches.epoch / solver.accumulate)
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
        self._shared: list[bool] = []  # of the trained parameters; for SCAFFOLD
        self._step, self._began_s = 0, time.monotonic()
        where = trained[0].device
        self._loss = torch.zeros((), dtype=torch.float64, device=where)
        self._autocast: AbstractContextManager[Any] = nullcontext()
        if solver.precision == "bf16":
            self._autocast = torch.autocast(where.type, torch.bfloat16)
        self._changing = [*trained, *model.buffers()]
        self._x_tau = [tensor.detach().clone() for tensor in self._changing]
        self._start = self._x_tau[: len(trained)]
        self._at = Iterate((), self._start)
        self._directs = type(solver).direction is not Solver.direction
        self._is_own = type(solver) not in SOLVERS.built_in.values()
        if solver.controls:
            self._at.correction = self._correction(work)
        self._optimizers = _checked(task.optimizers(model, solver))
        self._groups = [group for one in self._optimizers for group in one.param_groups]
        self._usual = [float(group["lr"]) for group in self._groups]
        self._rates = [0.0] * len(self._groups)  # sums over the steps
        schedulers = (solver.scheduler(optimizer) for optimizer in self._optimizers)
        self._schedulers = [one for one in schedulers if one is not None]
        self._has_own_rate = type(solver).rate is not Solver.rate
        self._varies = self._has_own_rate or bool(self._schedulers)
        self._with_gradients = [*trained, *(x for one in self._groups for x in one["params"])]
        if self._has_own_rate and self._schedulers:
            raise ConfigError(
                f"solver.kind = {solver.kind!r}: rate() and solver.lr_scheduler both set the rate: "
                "leave one out"
            )
        if solver.controls and any(group.get("momentum") for group in self._groups):
            raise ConfigError(
                f"solver.kind = {solver.kind!r}: the optimizer or solver.lr_scheduler brings "
                "momentum, but the control is the mean of plain steps: set cycle_momentum = false"
            )

    def _correction(self, work: Work) -> Tensors:
        """c - c_i of SCAFFOLD; zero for local parameters, which have none."""
        shared = {tensor.name for tensor in layout_of(self._model).tensors}
        named = self._model.named_parameters()
        self._shared = [name in shared for name, x in named if x.requires_grad]
        among = [x for x, is_shared in zip(self._trained, self._shared, strict=True) if is_shared]
        c, c_i = _split(work.control, among), _split(work.device_control, among)
        parts = iter(torch._foreach_sub(c, c_i))
        return [
            next(parts) if is_shared else torch.zeros_like(x)
            for x, is_shared in zip(self._trained, self._shared, strict=True)
        ]

    def goes_on(self) -> bool:
        """Whether to take another step."""
        if self._budget_s < math.inf:
            self._loss.item()  # waits for the GPU: the budget must count finished steps
        return self._step == 0 or (self._step < self._steps and self._seconds() < self._budget_s)

    def step(self) -> None:
        """x <- x - gamma g."""
        accumulate = self._solver.accumulate
        self._forget_gradients()
        for _ in range(accumulate):
            batch = self._batches.next()
            with self._autocast:
                loss = _scalar(self._task.loss(self._model, batch))
            torch.autograd.backward(loss if accumulate == 1 else loss / accumulate)
            self._loss += loss.detach().view(())  # not .item(): it would wait for the GPU each time
        if self._solver.clip_norm is not None:
            clip_grad_norm_(self._trained, self._solver.clip_norm)
        if self._directs:
            self._direct()
        if self._has_own_rate:
            self._set_rate()
        if self._varies:
            for n, group in enumerate(self._groups):
                self._rates[n] += float(group["lr"])
        for optimizer in self._optimizers:
            optimizer.step()
        for scheduler in self._schedulers:
            try:
                scheduler.step()
            except ValueError as error:  # as if OneCycleLR has fewer steps than the task
                raise ConfigError(f"solver.lr_scheduler: {error}") from error
        self._step += 1

    def result(self) -> Trained:
        """The result, once no step is left."""
        self._forget_gradients()
        control, solver, rates = None, self._solver, self._usual
        if self._varies:
            rates = [total / self._step for total in self._rates]
        if solver.controls:
            of = {
                id(x): self._step * rate
                for group, rate in zip(self._groups, rates, strict=True)
                for x in group["params"]
            }
            way = torch._foreach_sub(self._start, [x.detach() for x in self._trained])
            mean = torch._foreach_div(way, [of[id(x)] for x in self._trained])
            made = torch._foreach_sub(mean, self._at.correction)
            control = _join(
                [one for one, is_shared in zip(made, self._shared, strict=True) if is_shared]
            )
        loss = self._loss.item() / (self._step * solver.accumulate)
        samples = self._about["samples"] or self._batches.rows
        lr = rates[-1]  # of the parameters in no group of their own
        return Trained(self._step, samples, loss, control, None if lr == solver.lr else lr)

    def stop(self) -> Workspace | None:
        """Return a workspace to resume from, and reset the model to x_tau.

        None in a later descent of the task, which began elsewhere than at x_tau, and if the state
        of an optimizer cannot be saved: training then begins anew.
        """
        self._forget_gradients()
        layout = layout_of(self._model)
        x, x_tau, local = Model(layout), Model(layout), None
        read(self._model, x)
        if layout.unshared is not None and layout.unshared.local:
            local = read_part(self._model, layout.unshared.of_devices).buffer
        for tensor, value in zip(self._changing, self._x_tau, strict=True):
            tensor.detach().copy_(value)
        read(self._model, x_tau)
        state, position = self._batches.place
        states = optimizers.encoded(self._optimizers, self._schedulers)
        if states is None or not self._saves:
            return None
        return Workspace(
            **self._about,
            base=self._work.base or x_tau.digest(),
            layout=layout.signature,
            step=self._step,
            seconds=self._seconds(),
            loss=self._loss.item(),
            minibatches=state,
            position=position,
            generators=random_states(self._trained[0].device),
            x=x.buffer,
            local=local,
            x_tau=x_tau.buffer,
            rates=np.array(self._rates).tobytes(),
            optimizers=states,
            memory={name: _join(own) for name, own in self._at.memory.items()},
            control=self._work.control,
            device_control=self._work.device_control,
        )

    def skip_to(self, saved: Workspace) -> None:
        """Resume where ``saved`` stopped; the model already holds its parameters."""
        for name, ours in self._about.items():
            if (theirs := getattr(saved, name)) != ours:
                raise ConfigError(
                    f"task {self._work.task}: the workspace belongs to other work: its {name} is "
                    f"{theirs}, not {ours}; train from the start"
                )
        rates, in_all = np.frombuffer(saved.rates).tolist(), saved.step * self._solver.accumulate
        is_possible = saved.step <= self._steps and 0.0 <= saved.seconds < math.inf
        is_loaded = not saved.minibatches
        if not is_possible or len(rates) != len(self._groups):
            raise BadMessage("the workspace stopped at a step that its work cannot reach")
        if is_loaded and saved.position != in_all:
            raise BadMessage(f"the workspace has taken {saved.position} batches for {in_all}")
        self._step, self._rates = saved.step, rates
        self._began_s -= saved.seconds
        self._loss += saved.loss
        optimizers.restore(saved.optimizers, self._optimizers, self._schedulers)
        for name, vector in saved.memory.items():
            self._at.memory[name] = _split(vector, self._trained)
        try:
            self._batches.skip_to(saved.minibatches, saved.position, self._work.cancelled)
        except Cancelled:
            raise Cancelled(saved) from None
        restore_random_states(saved.generators, self._trained[0].device)

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s

    def _forget_gradients(self) -> None:
        """Free the gradients, which take a model's memory, without the optimizers' hooks."""
        for x in self._with_gradients:
            x.grad = None

    def _direct(self) -> None:
        """Let the solver change the gradients."""
        self._at.n = self._step
        self._at.x = [x.detach() for x in self._trained]  # an optimizer may replace the data
        g = self._solver.direction([_dense(x) for x in self._trained], self._at)
        if self._is_own:
            self._check(g)
        for x, part in zip(self._trained, g, strict=True):
            x.grad = part

    def _set_rate(self) -> None:
        """Set the rate of this step, in the same proportion for all groups."""
        rate, solver = self._solver.rate(self._step), self._solver
        if not isinstance(rate, float | int):
            raise ConfigError(
                f"solver.kind = {solver.kind!r}: rate() must return a number; it returned a "
                f"{type(rate).__name__}"
            )
        for group, usual in zip(self._groups, self._usual, strict=True):
            group["lr"] = rate if usual == solver.lr else rate * usual / solver.lr

    def _check(self, g: Tensors) -> None:
        """Check the result of a user's solver. Raises ConfigError.

        Checked at every step, as torch would silently broadcast a smaller tensor.
        """
        got = f"a {type(g).__name__}"
        if isinstance(g, list | tuple):
            wanted = [x.shape for x in self._trained]
            shapes = [getattr(part, "shape", type(part).__name__) for part in g]
            if shapes == wanted:
                return
            others = zip(count(), shapes, wanted, strict=False)
            got = next(
                (f"{one} in place {n} instead of {x}" for n, one, x in others if one != x),
                f"{len(g)} tensors instead of {len(wanted)}",
            )
        raise ConfigError(
            f"solver.kind = {self._solver.kind!r}: direction() must return a list with one tensor "
            f"for each trained parameter, of the same shape; it returned {got}"
        )


def _scalar(loss: object) -> torch.Tensor:
    """The loss of a minibatch. Raises DataError if it is not a tensor of one number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    got = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        got = f"a tensor of shape {tuple(loss.shape)}"
    raise DataError(f"loss() returned {got}: it must return a scalar tensor, such as a mean")


def _checked(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers of a task. Raises ConfigError for anything else."""
    found: list[Any] = [*optimizers] if isinstance(optimizers, Iterable) else []
    if not found or not all(isinstance(one, torch.optim.Optimizer) for one in found):
        raise ConfigError("optimizers() must return a list of optimizers of torch.optim")
    for one in found:
        if any("lr" not in group for group in one.param_groups):
            raise ConfigError(f"optimizers(): {type(one).__name__} has no learning rate, lr")
    return found


def _state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that training may change."""
    yield from model.parameters()
    yield from model.buffers()


def _split(vector: Floats | None, parameters: Sequence[nn.Parameter]) -> Tensors:
    """The part of a vector for each of these parameters; zeros if the vector is None."""
    sizes = [x.numel() for x in parameters]
    if vector is None:
        return [torch.zeros_like(x) for x in parameters]
    if vector.shape != (sum(sizes),):
        raise LayoutMismatch(
            f"a vector of shape {vector.shape} for a model of {sum(sizes)} trained parameters"
        )
    parts = zip(parameters, torch.split(torch.tensor(vector), sizes), strict=True)
    return [part.view(x.shape).to(x) for x, part in parts]


def _join(parts: Tensors) -> Floats:
    """The vector with these parts (:mod:`fedstream.trainer.vector`)."""
    vector: Floats = torch.cat([x.flatten().to("cpu", torch.float32) for x in parts]).numpy()
    return vector


def _dense(x: nn.Parameter) -> torch.Tensor:
    """A parameter's gradient; zeros if the loss does not depend on the parameter."""
    if x.grad is None:
        return torch.zeros_like(x)
    return x.grad.to_dense() if x.grad.is_sparse else x.grad
