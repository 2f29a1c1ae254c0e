"""Local training of several devices at once: the same steps on stacked models.

With small models, kernel launches dominate, so one kernel for all devices takes little longer than
a kernel for one. Gradients come from ``torch.func``, or for logistic regression from a formula.
Each device gets the minibatches that it would draw alone, and results are equal up to rounding.
"""

# ruff: noqa: SLF001  (torch's operations on lists, torch._foreach_*, are private in name only)

from __future__ import annotations

import math
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

from fedstream.trainer.solvers import (
    Cancelled,
    DriftCorrected,
    Iterate,
    Proximal,
    Sgd,
    Solver,
    Trained,
    minibatches_in,
    pass_sizes,
)
from fedstream.trainer.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.data import Dataset

    from fedstream.core.layout import Floats
    from fedstream.simulation.arrivals import Job
    from fedstream.trainer.solvers import SolverSettings, Tensors

    At = slice | torch.Tensor  # places among the devices

_WIDTH = 50  # models at once: with more, their minibatches don't fit the cache
_SIZES = (_WIDTH, 20, 10)  # preferred group sizes; few, because each is traced separately
_REGRESSIONS = 100  # logistic regressions at once, in parts of at most _PART
_PART = 25  # with more, minibatches don't fit the cache; with fewer, Python's overhead dominates
_OFTEN = 20  # steps of one shape before the shape is traced
LEAST = 3  # with fewer devices, training one by one is as fast
_PARAMETERS = 100_000  # larger models use the whole machine on their own
_ROWS_BYTES = 2 << 30  # limit for all devices' data, which is copied into one block
_MINUS_1 = torch.tensor(-1.0)
_UNSUITED = (  # layers with state or random numbers, or with no faster kernels for stacks
    nn.modules.batchnorm._BatchNorm,  # (their common bases have no public name)
    nn.modules.conv._ConvNd,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
)


def suits(task: Task, module: nn.Module, solver: SolverSettings) -> bool:
    """Whether training several devices together is possible and faster."""
    parameters = list(module.parameters())
    return (
        type(task).train is Task.train
        and type(task).collate is Task.collate
        and type(task).sampler is Task.sampler
        and type(task).optimizers is Task.optimizers
        and type(solver) in (Sgd, Proximal, DriftCorrected)
        and not (solver.groups or solver.lr_scheduler or solver.workers)
        and (solver.accumulate, solver.precision) == (1, "float32")
        and not getattr(solver, "nesterov", False)
        and not list(module.buffers())
        and all(x.requires_grad and x.dtype == torch.float32 for x in parameters)
        and not task.local
        and 0 < sum(x.numel() for x in parameters) <= _PARAMETERS
        and not any(isinstance(part, _UNSUITED) for part in module.modules())
    )


class _Room(threading.local):
    """Reusable memory for minibatches, separate for each thread."""

    def __init__(self, columns: Sequence[torch.Tensor]) -> None:
        self.of = [column.new_empty(0) for column in columns]  # grows on demand


class StackedRows:
    """All devices' data in one block, so that one indexing takes minibatches of many devices."""

    def __init__(self, shares: Sequence[TensorDataset], device: str) -> None:
        self.sizes = [len(share) for share in shares]
        columns = zip(*(share.tensors for share in shares), strict=True)
        self.columns = [_in_one_piece(column).to(device) for column in columns]
        self.begins = torch.tensor([0, *self.sizes]).cumsum(0)  # first row of each device
        self._room = _Room(self.columns)

    def take(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Minibatches of these rows, where ``rows`` has the shape (devices, size).

        They are valid until the same thread's next call.
        """
        index, taken, room = rows.flatten(), [], self._room.of
        for number, column in enumerate(self.columns):
            if len(room[number]) < len(index):  # allocating costs more than copying
                room[number] = column.new_empty((len(index), *column.shape[1:]))
            minibatches = room[number][: len(index)]
            torch.index_select(column, 0, index.to(column.device), out=minibatches)
            taken.append(minibatches.view(*rows.shape, *column.shape[1:]))
        return taken


def rows_of(data: Callable[[int], Dataset[Any]], devices: int, device: str) -> StackedRows | None:
    """All devices' data; None if it isn't tensors of equal shapes, or exceeds 2 GiB."""
    shares = [data(number) for number in range(devices)]
    tensors = [share.tensors for share in shares if type(share) is TensorDataset]
    if len(tensors) < devices or any(
        [(t.dtype, t.shape[1:], t.device) for t in one]
        != [(t.dtype, t.shape[1:], t.device) for t in tensors[0]]
        for one in tensors
    ):
        return None
    if sum(t.nbytes for one in tensors for t in one) > _ROWS_BYTES:
        return None
    return StackedRows([share for share in shares if isinstance(share, TensorDataset)], device)


def _in_one_piece(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensor with all the parts' rows in order.

    Its memory comes from numpy, which asks the kernel for huge pages: gathering scattered rows then
    takes half the time.
    """
    first, rows = parts[0], sum(len(part) for part in parts)
    memory = np.empty(sum(part.nbytes for part in parts), np.uint8)
    whole = torch.from_numpy(memory).view(first.dtype).view(rows, *first.shape[1:])
    return torch.cat([part.cpu() for part in parts], out=whole)


class StackedTraining:
    """Training of groups of devices."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        solver: SolverSettings,
        rows: StackedRows,
        cancelled: Callable[[], bool],
        threads: int,
    ) -> None:
        """``threads``: in which parts of a group may train side by side."""
        self._module = module
        self._solver = solver
        self._rows = rows
        self._cancelled = cancelled
        names = [f"model.{name}" for name, _ in module.named_parameters()]
        self._shapes = [x.shape for x in module.parameters()]
        self._where = next(module.parameters()).device
        count, loss_of = len(names), _Loss(task, module)

        def loss(*given: torch.Tensor) -> torch.Tensor:
            weights = dict(zip(names, given, strict=False))
            with _WeightsFirst():
                value: torch.Tensor = functional_call(loss_of, weights, (list(given[count:]),))
            return value.view(())

        gradients = vmap(grad_and_value(loss, argnums=tuple(range(count))))
        # A user's own loss may have side effects, which a trace would lose.
        self._gradients: Callable[..., Any]
        self._gradients = _Gradients(gradients, traceable=type(task).loss is Task.loss)
        self.sizes: tuple[int, ...] = _SIZES
        self._threads, self._in_parts = 1, False
        if _is_regression(task, module, rows):
            self._gradients, self.sizes = _OfRegressions(), (_REGRESSIONS,)
            if self._where.type == "cpu":
                self._threads, self._in_parts = threads, True
        self._pool = ThreadPoolExecutor(
            self._threads, initializer=torch.set_num_threads, initargs=(1,)
        )  # starts threads only when there is work

    def train(self, jobs: Sequence[Job]) -> list[Trained]:
        """Write every device's x_new into the parameters of its ``into``.

        Raises Cancelled; RuntimeError if the task's loss can't be computed for several at once.
        """
        self._module.train()
        steps = [self._steps(job) for job in jobs]
        # Longest first, so that the devices still at work are always the leading ones.
        order = sorted(range(len(jobs)), key=lambda one: -steps[one])
        rounds = math.ceil(len(jobs) / (_PART * self._threads)) if self._in_parts else 0
        count = min(rounds * self._threads, len(jobs)) or 1
        parts = [order[first::count] for first in range(count)]
        given = [([jobs[one] for one in part], [steps[one] for one in part]) for part in parts]
        if min(count, self._threads) == 1:
            trained = [self._part(*some) for some in given]
        else:  # one thread per part: threads within each operation would wait for one another
            trained = list(self._pool.map(self._part, *zip(*given, strict=True)))
        return [trained[place % count][place // count] for place in np.argsort(order)]

    def _steps(self, job: Job) -> int:
        """Number of steps of a job."""
        samples = self._rows.sizes[job.arrival.device]
        epoch = minibatches_in(samples, self._solver)
        return job.arrival.steps or (job.arrival.epochs or 0) * epoch

    def _part(self, jobs: Sequence[Job], steps: Sequence[int]) -> list[Trained]:
        """Train several jobs at once; the longest must come first."""
        samples = [self._rows.sizes[job.arrival.device] for job in jobs]
        seeds = [job.arrival.seed for job in jobs]
        draws = Draws(list(zip(samples, seeds, steps, strict=True)), self._solver)
        start, correction = self._stack([job.base.parameters for job in jobs]), None
        if self._solver.controls:
            correction = self._correction(jobs)
        x = [part.clone(memory_format=torch.contiguous_format) for part in self._parts(start)]
        training = _StackedDescent(self._solver, x, self._parts(start), self._parts(correction))
        begins = self._rows.begins[[job.arrival.device for job in jobs], None]
        losses = torch.zeros(len(jobs), dtype=torch.float64, device=self._where)
        for step in range(steps[0]):
            if self._cancelled():
                raise Cancelled
            for at, own in draws.of(step):
                models = [part[at] for part in x]
                gradients, loss = self._gradients(*models, *self._rows.take(begins[at] + own))
                training.step(at, models, gradients)
                losses[at] += loss
        new = torch.cat([part.flatten(1) for part in x], dim=1)
        return self._results(jobs, steps, new, start, correction, losses)

    def _stack(self, vectors: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.stack(vectors)).to(self._where)

    def _parts(self, vectors: torch.Tensor | None) -> list[torch.Tensor]:
        """Split stacked vectors into parameters, each of shape (devices, *shape)."""
        if vectors is None:
            return []
        parts = torch.split(vectors, [shape.numel() for shape in self._shapes], dim=1)
        return [part.view(-1, *shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _correction(self, jobs: Sequence[Job]) -> torch.Tensor:
        """SCAFFOLD's c - c_i of each device."""
        c = self._stack([job.base.controls for job in jobs])
        for n, job in enumerate(jobs):
            if job.device_control is not None:
                c[n] -= torch.tensor(job.device_control).to(self._where)
        return c

    def _results(
        self,
        jobs: Sequence[Job],
        steps: Sequence[int],
        x: torch.Tensor,
        start: torch.Tensor,
        correction: torch.Tensor | None,
        losses: torch.Tensor,
    ) -> list[Trained]:
        controls: list[Floats | None] = [None] * len(jobs)
        if correction is not None:
            done = torch.tensor(steps, device=self._where)
            controls[:] = (
                ((start - x) / (done[:, None] * self._solver.lr) - correction).cpu().numpy()
            )
        trained = []
        for job, new, took, loss, control in zip(
            jobs, x.cpu().numpy(), steps, losses.tolist(), controls, strict=True
        ):
            job.into.parameters[:] = new
            samples = self._rows.sizes[job.arrival.device]
            trained.append(Trained(took, samples, loss / took, control))
        return trained


class _StackedDescent:
    """Steps x <- x - gamma g of several devices, as in :func:`fedstream.trainer.descent.solve`.

    Each parameter is one tensor with the devices as its first dimension.
    """

    def __init__(
        self,
        solver: SolverSettings,
        x: list[torch.Tensor],
        start: list[torch.Tensor],
        correction: list[torch.Tensor],
    ) -> None:
        self._solver, self._x, self._start, self._correction = solver, x, start, correction
        self._directs = type(solver).direction is not Solver.direction
        self._momentum = [torch.zeros_like(part) for part in x] if solver.momentum else []

    def step(self, at: At, x: list[torch.Tensor], gradients: Tensors) -> None:
        """Take a step of the devices at the places ``at``, whose parameters are ``x``."""
        g, solver = gradients, self._solver
        if solver.clip_norm is not None:
            norms = [torch.linalg.vector_norm(part.flatten(1), dim=1) for part in g]
            norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            scale = (solver.clip_norm / (norm + 1e-6)).clamp(max=1.0)
            g = [part * scale.view(-1, *[1] * (part.dim() - 1)) for part in g]
        if self._directs:  # element by element, so it doesn't matter that devices are stacked
            start, correction = self._start, self._correction
            iterate = Iterate(x, [part[at] for part in start], [part[at] for part in correction])
            g = solver.direction(g, iterate)
        if solver.weight_decay:
            g = torch._foreach_add(g, x, alpha=solver.weight_decay)
        if solver.momentum:
            momentum = [part[at] for part in self._momentum]
            torch._foreach_mul_(momentum, solver.momentum)
            torch._foreach_add_(momentum, g)
            _put(self._momentum, at, momentum)
            g = momentum
        torch._foreach_sub_(x, g, alpha=solver.lr)
        _put(self._x, at, x)


def _put(parts: list[torch.Tensor], at: At, values: list[torch.Tensor]) -> None:
    """Write changed values back to their places; needless for slices, which share memory."""
    if not isinstance(at, slice):
        for part, value in zip(parts, values, strict=True):
            part[at] = value


class Draws:
    """Rows that each device's :class:`fedstream.trainer.batches.Minibatches` would draw.

    Devices with equally many samples begin their passes together, so they are drawn together.
    """

    def __init__(self, jobs: Sequence[tuple[int, int, int]], solver: SolverSettings) -> None:
        """``jobs``: (samples, seed, steps) of each, the longest first."""
        places: dict[int, list[int]] = {}
        for place, (samples, _, _) in enumerate(jobs):
            places.setdefault(samples, []).append(place)
        self._passes = [
            (torch.tensor(where), _Passes(samples, [jobs[place][1:] for place in where], solver))
            for samples, where in places.items()
        ]

    def of(self, step: int) -> list[tuple[At, torch.Tensor]]:
        """Places and rows of the devices still at work, grouped by minibatch size."""
        found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for places, passes in self._passes:
            rows = passes.of(step)
            if len(rows):
                found.setdefault(rows.shape[1], []).append((places[: len(rows)], rows))
        if len(self._passes) == 1:
            return [(slice(len(rows)), rows) for ((_, rows),) in found.values()]
        return [
            (torch.cat([places for places, _ in parts]), torch.cat([rows for _, rows in parts]))
            for parts in found.values()
        ]


class _Passes:
    """Shuffled passes of devices with equally many samples."""

    def __init__(
        self, samples: int, jobs: Sequence[tuple[int, int]], solver: SolverSettings
    ) -> None:
        """``jobs``: (seed, steps) of each, the longest first."""
        self._ends = [0, *accumulate(pass_sizes(samples, solver))]
        self._samples, self._used = samples, self._ends[-1]
        self._steps = [steps for _, steps in jobs]
        self._generators = [torch.Generator().manual_seed(seed) for seed, _ in jobs]
        self._rows = torch.empty((len(jobs), self._used), dtype=torch.int64)

    def of(self, step: int) -> torch.Tensor:
        """Rows of shape (devices still at work, size); call it for each step in order."""
        n = step % (len(self._ends) - 1)
        working = sum(steps > step for steps in self._steps)
        if n == 0:
            for row, generator in zip(self._rows[:working], self._generators, strict=False):
                if self._used == self._samples:
                    torch.randperm(self._samples, generator=generator, out=row)
                else:
                    row[:] = torch.randperm(self._samples, generator=generator)[: self._used]
        return self._rows[:working, self._ends[n] : self._ends[n + 1]]


class _Gradients:
    """(gradients, loss) of several models, by ``torch.func``; traced for frequent shapes.

    ``torch.func`` costs a millisecond of Python per step, whatever it computes. A trace costs less,
    but fits only one shape, and making it takes as long as a hundred steps.
    """

    def __init__(self, function: Callable[..., Any], *, traceable: bool) -> None:
        self._function = function
        self._traceable = traceable
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._traces: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def __call__(self, *given: torch.Tensor) -> Any:
        """Gradients and loss of each model on its minibatch; ``given``: parameters first."""
        shapes = tuple(tensor.shape for tensor in given)
        trace = self._traces.get(shapes)
        if trace is not None:
            return trace(*given)
        self._seen[shapes] += 1
        if self._traceable and self._seen[shapes] == _OFTEN:
            with warnings.catch_warnings():  # it recommends torch.compile, which needs a compiler
                warnings.simplefilter("ignore", DeprecationWarning)
                self._traces[shapes] = torch.jit.trace(  # type: ignore[no-untyped-call]
                    make_fx(self._function)(*given), given, check_trace=False
                )
        return self._function(*given)


def _is_regression(task: Task, module: nn.Module, rows: StackedRows) -> bool:
    """Whether this is logistic regression with a score for every class in the data."""
    if type(module) is not nn.Linear or type(task).loss is not Task.loss or len(rows.columns) != 2:
        return False
    x, y = rows.columns
    return (
        (x.dtype, x.shape[1:]) == (torch.float32, (module.in_features,))
        and (y.dtype, y.dim()) == (torch.int64, 1)
        and 0 <= int(y.min()) <= int(y.max()) < module.out_features
    )


class _OfRegressions(threading.local):
    """(gradients, loss) of several logistic regressions; the scores' gradient is p - [class = y].

    Each thread reuses its memory for gradients: fresh pages cost as much as the computation.
    """

    def __init__(self) -> None:
        self._room = torch.empty(0)

    def __call__(self, weight: torch.Tensor, *more: torch.Tensor) -> Any:
        *bias, x, y = more
        # W x^T takes half the time of x W^T
        to = weight, x.mT
        scores = torch.baddbmm(bias[0].unsqueeze(2), *to) if bias else torch.bmm(*to)
        logs, of_y = torch.log_softmax(scores, 1), y.unsqueeze(1)
        loss = -logs.gather(1, of_y).mean((1, 2))
        one = _MINUS_1.to(x.device).expand_as(of_y)
        g = logs.exp_().scatter_add_(1, of_y, one).div_(y.shape[1])
        if self._room.numel() < weight.numel():
            self._room = weight.new_empty(weight.numel())
        gradient = torch.bmm(g, x, out=self._room[: weight.numel()].view(weight.shape))
        return (gradient, *(g.sum(2) for _ in bias)), loss


class _WeightsFirst(TorchFunctionMode):
    """Linear layers computed as W x^T: stacked, twice as fast as x W^T if W has few rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.linear or kwargs or args[0].dim() != 2:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        y = (weight @ x.mT).mT
        return y + bias[0] if bias and bias[0] is not None else y


class _Loss(nn.Module):
    """The task's loss as a module, so that weights can be passed in."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """Loss on one minibatch."""
        return self._task.loss(self.model, batch)
