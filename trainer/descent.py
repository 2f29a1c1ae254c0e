"""Local training: the steps from x_tau to x_new."""

# ruff: noqa: SLF001  (torch's list operations, torch._foreach_*, are private in name only)

from __future__ import annotations

import math
import time
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from fedstream.core.errors import BadMessage, ConfigError, DataError, LayoutMismatch
from fedstream.core.layout import Floats, Model
from fedstream.trainer.data import size_of
from fedstream.trainer.solvers import (
    SOLVERS,
    Cancelled,
    Iterate,
    Solver,
    SolverSettings,
    Trained,
    Work,
    is_drawn,
    minibatches_in,
    pass_sizes,
)
from fedstream.trainer.vector import layout_of, load, read
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.utils.data import Dataset

    from fedstream.trainer.solvers import Tensors
    from fedstream.trainer.task import Task


def solve(task: Task, model: nn.Module, data: Dataset[Any], work: Work) -> Trained:
    """Train ``model``, which holds x_tau, in place by exactly H steps (FedAsync, algorithm 1):

        x <- x - gamma g,       g = grad f(x; z)                        SGD, option I
                                  + rho (x - x_tau)                     proximal, option II
                                  + c - c_i                             SCAFFOLD

    on the trainable parameters. ``epochs`` passes take the steps of their minibatches; a
    time budget takes as many steps as fit. The gradient is clipped first, then weight decay is
    added, then the solver's own term (``direction``); momentum accumulates the sum. SCAFFOLD ends
    with

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
    samples = size_of(data, work.device)
    trained = [x for x in model.parameters() if x.requires_grad]
    if not trained:
        raise ConfigError(f"nothing to train: model() {_lack(model)}")
    model.train()
    with torch.random.fork_rng(devices=[trained[0].device] if trained[0].is_cuda else []):
        training = _begun(model, trained, samples, work)
        while training.goes_on():
            if work.cancelled():
                raise Cancelled(training.stop())
            try:
                loss = task.loss(model, task.gather(data, training.minibatch()))
            except DataError as error:
                raise DataError(f"device {work.device}: {error}") from error
            training.step(loss)
    return training.result()


def _lack(model: nn.Module) -> str:
    """The error text for a model without trainable parameters."""
    if frozen := len([*model.parameters()]):
        return f"has {frozen} parameters, all frozen: set requires_grad for those to be trained"
    only = "only buffers" if any(True for _ in model.buffers()) else "no parameters"
    return f"has {only}: return a module with parameters, or define the task's own train()"


def _begun(model: nn.Module, trained: list[nn.Parameter], samples: int, work: Work) -> _Descent:
    """Begin training, or resume it from the workspace."""
    saved = work.resume
    if saved is None:
        return _Descent(model, trained, samples, work)
    x, x_tau = saved.models(layout_of(model))
    load(x_tau, model)
    work = replace(
        work, base=saved.base, control=saved.control, device_control=saved.device_control
    )
    training = _Descent(model, trained, samples, work)
    load(x, model)
    training.skip_to(saved)
    return training


class _Descent:
    """The state of local training between two steps. Creating it seeds torch's global generators.

    All parameters are updated by torch's list operations, because small models spend their time
    launching operations, not computing.
    """

    def __init__(
        self, model: nn.Module, trained: list[nn.Parameter], samples: int, work: Work
    ) -> None:
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
        self._at = Iterate(self._x, self._start)
        self._is_own = type(solver) not in SOLVERS.built_in.values()
        if solver.momentum:
            self._momentum = _split(None, model)
        if solver.controls:
            c, c_i = _split(work.control, model), _split(work.device_control, model)
            self._at.correction = torch._foreach_sub(c, c_i)

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
        gradients = torch.autograd.grad(loss, self._trained, materialize_grads=True)
        rate = self._solver.rate(self._step)
        if not isinstance(rate, float | int):
            raise ConfigError(
                f"solver.kind = {self._solver.kind!r}: rate() must return a number; it returned a "
                f"{type(rate).__name__}"
            )
        torch._foreach_sub_(self._x, self._direction(gradients), alpha=rate)
        self._loss += loss.detach().view(())  # not .item(): it would wait for the GPU each step
        self._step += 1

    def result(self) -> Trained:
        """The result, once no step is left."""
        control, solver, lr = None, self._solver, None
        if type(solver).rate is not Solver.rate:
            lr = math.fsum(map(solver.rate, range(self._step))) / self._step
        if solver.controls:
            way = torch._foreach_sub(self._start, self._x)
            mean = torch._foreach_div(way, self._step * (lr or solver.lr))
            control = _join(torch._foreach_sub(mean, self._at.correction), self._model)
        samples = self._about["samples"]
        return Trained(self._step, samples, self._loss.item() / self._step, control, lr)

    def stop(self) -> Workspace:
        """Return a workspace to resume from, and reset the model to x_tau."""
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
            memory={name: _join(own, self._model) for name, own in self._at.memory.items()},
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
        self._step = saved.step
        self._began_s -= saved.seconds
        self._loss += saved.loss
        if self._solver.momentum:
            self._momentum = _split(saved.momentum, self._model)
        for name, vector in saved.memory.items():
            self._at.memory[name] = _split(vector, self._model)
        self._minibatches.skip_to(saved.minibatches, saved.position)
        # A workspace from a machine without a GPU lacks that generator's state: keep it as seeded.
        for generator, state in zip(self._generators, saved.generators, strict=False):
            _restore(generator, state)

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s

    def _direction(self, gradients: Tensors) -> Tensors:
        """g from the loss's gradients. They are not written to: two may share one tensor."""
        g, solver = gradients, self._solver
        if solver.clip_norm is not None:
            norm = torch.nn.utils.get_total_norm(g)
            g = torch._foreach_mul(g, (solver.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        if solver.weight_decay:
            g = torch._foreach_add(g, self._x, alpha=solver.weight_decay)
        self._at.n = self._step
        g = solver.direction(g, self._at)
        if self._is_own:
            self._check(g)
        if solver.momentum:
            torch._foreach_mul_(self._momentum, solver.momentum)
            torch._foreach_add_(self._momentum, g)
            g = self._momentum
        return g

    def _check(self, g: Tensors) -> None:
        """Check the result of a user's solver. Raises ConfigError.

        Checked at every step, as torch would silently broadcast a smaller tensor.
        """
        got = f"a {type(g).__name__}"
        if isinstance(g, list | tuple):
            wanted = [x.shape for x in self._x]
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


class Minibatches:
    """An endless sequence of minibatches, as row numbers.

    They are slices of shuffled passes (:func:`pass_sizes`). With ``fresh`` sampling, each pass
    ends after its first minibatch. So does a pass over more rows than can be shuffled at once:
    its rows are drawn with replacement.
    """

    def __init__(self, samples: int, solver: SolverSettings, seed: int) -> None:
        self._samples = samples
        self._drawn = is_drawn(samples, solver)
        self._sizes = pass_sizes(samples, solver)
        self._used = sum(self._sizes)
        self.epoch = minibatches_in(samples, solver)
        self._generator = torch.Generator().manual_seed(seed)
        self._shuffle()

    @property
    def place(self) -> tuple[bytes, int]:
        """The generator's state before the current pass, and the minibatches taken from it."""
        return _bytes(self._before), self._taken

    def skip_to(self, state: bytes, taken: int) -> None:
        """Resume at a ``place``."""
        _restore(self._generator, state)
        self._shuffle()
        if taken > len(self._pass):
            raise BadMessage(f"the workspace stopped in minibatch {taken} of {len(self._pass)}")
        self._taken = taken

    def next(self) -> torch.Tensor:
        """The row numbers of the next minibatch."""
        if self._taken == len(self._pass):
            self._shuffle()
        self._taken += 1
        return self._pass[self._taken - 1]

    def _shuffle(self) -> None:
        self._before = self._generator.get_state()
        if self._drawn:
            rows = torch.randint(self._samples, (self._used,), generator=self._generator)
        else:
            rows = torch.randperm(self._samples, generator=self._generator)
        self._pass = torch.split(rows[: self._used], self._sizes)
        self._taken = 0


def _state(model: nn.Module) -> Iterator[torch.Tensor]:
    """Every tensor that training may change."""
    yield from model.parameters()
    yield from model.buffers()


def _of_vector(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that make up a vector, in its order (:mod:`fedstream.trainer.vector`)."""
    return [x for x in model.parameters() if x.is_floating_point()]


def _split(vector: Floats | None, model: nn.Module) -> Tensors:
    """The part of a vector for each trained parameter; zeros if the vector is None."""
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
    """The vector with these parts, zero for untrained parameters."""
    rest = iter(parts)
    whole = [next(rest) if x.requires_grad else torch.zeros_like(x) for x in _of_vector(model)]
    vector: Floats = torch.cat([x.flatten().to("cpu", torch.float32) for x in whole]).numpy()
    return vector


def _global_generators(where: torch.Tensor) -> list[torch.Generator]:
    """torch's global generators, used by dropout: of the CPU and of a tensor's GPU."""
    gpu = [torch.cuda.default_generators[where.get_device()]] if where.is_cuda else []
    return [torch.default_generator, *gpu]


def _bytes(state: torch.Tensor) -> bytes:
    data: bytes = state.numpy().tobytes()
    return data


def _restore(generator: torch.Generator, state: bytes) -> None:
    try:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    except (RuntimeError, ValueError) as error:
        raise BadMessage(
            f"the random generator's state does not fit this version of torch: {error}"
        ) from error
