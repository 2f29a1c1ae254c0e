"""Local training of several devices at once: the same steps on stacked models, by ``torch.func``.

Small models lose their time between the kernels: one kernel for all devices takes little longer
than one for each. The minibatches are those that each device would draw alone, the result is the
same to rounding.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.data import TensorDataset

from trainer.solvers import Cancelled, Minibatches, Proximal, Scaffold, Sgd, Trained
from trainer.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.utils.data import Dataset

    from fedstream.simulation.training import Job
    from trainer.solvers import SolverSettings

WIDTH = 50  # models at once: with more, their minibatches leave the cache
_OFTEN = 20  # steps of one shape, before it is traced
LEAST = 3  # with fewer, one after the other is as fast
_PARAMETERS = 100_000  # larger models keep the machine busy by themselves
_ROWS_BYTES = 2 << 30  # of all devices' data, where it has to be copied to lie in one piece
_UNSUITED = (  # state or random numbers of their own, or kernels that are not faster so
    nn.modules.batchnorm._BatchNorm,  # noqa: SLF001  (their common bases have no public name)
    nn.modules.conv._ConvNd,  # noqa: SLF001
    nn.modules.dropout._DropoutNd,  # noqa: SLF001
    nn.RNNBase,
)


def suits(task: Task, module: nn.Module, solver: SolverSettings) -> bool:
    """Whether training several devices together is possible, and faster."""
    parameters = list(module.parameters())
    return (
        type(task).train is Task.train
        and type(solver) in (Sgd, Proximal, Scaffold)
        and not list(module.buffers())
        and all(x.requires_grad and x.dtype == torch.float32 for x in parameters)
        and 0 < sum(x.numel() for x in parameters) <= _PARAMETERS
        and not any(isinstance(part, _UNSUITED) for part in module.modules())
    )


class Rows:
    """All devices' data in one piece: a minibatch for each of several devices is one indexing."""

    def __init__(self, shares: Sequence[TensorDataset], device: str) -> None:
        self.sizes = [len(share) for share in shares]
        self._columns: list[torch.Tensor] = []
        self._begins: list[torch.Tensor] = []  # of the devices' rows in each
        for column in zip(*(share.tensors for share in shares), strict=True):
            whole, begins = _in_one_piece(column)
            self._columns.append(whole.to(device))
            self._begins.append(torch.tensor(begins))
        self._room = [column.new_empty(0) for column in self._columns]

    def take(self, devices: Sequence[int], rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The minibatches, of one size, of shape (devices, size, ...); valid until the next."""
        own, taken = torch.stack(list(rows)), []
        who = torch.tensor(devices)
        for number, (column, begins) in enumerate(zip(self._columns, self._begins, strict=True)):
            index = (own + begins[who, None]).flatten().to(column.device)
            shape = (len(index), *column.shape[1:])
            if self._room[number].shape[0] < len(index):  # new memory costs more than the copy
                self._room[number] = column.new_empty(shape)
            room = self._room[number][: len(index)]
            torch.index_select(column, 0, index, out=room)
            taken.append(room.view(len(devices), -1, *column.shape[1:]))
        return taken


def rows_of(data: Callable[[int], Dataset[Any]], devices: int, device: str) -> Rows | None:
    """All devices' data; None if it is not tensors of one shape, or more than is copied."""
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
    return Rows([share for share in shares if isinstance(share, TensorDataset)], device)


def _in_one_piece(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """A tensor that has all the parts' rows, and where each part begins in it.

    Without a copy where they are views of one, as the built-in tasks' are.
    """
    first = parts[0]
    length = first[0].numel() if len(first) else 1
    one = {part.untyped_storage().data_ptr() for part in parts}
    if len(one) == 1 and all(p.is_contiguous() and p.storage_offset() % length == 0 for p in parts):
        count = first.untyped_storage().nbytes() // first.element_size() // length
        shape = (count, *first.shape[1:])
        whole = torch.as_strided(first, shape, torch.empty(shape, device="meta").stride(), 0)
        return whole, [part.storage_offset() // length for part in parts]
    begins = np.cumsum([0, *(len(part) for part in parts)])[:-1]
    return torch.cat(list(parts)), begins.tolist()


class Together:
    """Trains groups of devices."""

    def __init__(
        self,
        task: Task,
        module: nn.Module,
        solver: SolverSettings,
        rows: Rows,
        cancelled: Callable[[], bool],
    ) -> None:
        self._module = module
        self._solver = solver
        self._rows = rows
        self._cancelled = cancelled
        named = [(f"model.{name}", x) for name, x in module.named_parameters()]
        self._where = named[0][1].device
        sizes = [x.numel() for _, x in named]
        loss_of = _Loss(task, module)

        def loss(x: torch.Tensor, *batch: torch.Tensor) -> torch.Tensor:
            parts = zip(named, torch.split(x, sizes), strict=True)
            weights = {name: part.view(old.shape) for (name, old), part in parts}
            with _WeightsFirst():
                value: torch.Tensor = functional_call(loss_of, weights, (list(batch),))
            return value.view(())

        # A loss of the user's own may do more than compute, which a trace would forget.
        traceable = type(task).loss is Task.loss
        self._gradient = _Gradient(vmap(grad_and_value(loss)), traceable=traceable)

    def train(self, jobs: Sequence[Job]) -> list[Trained]:
        """Writes every device's x_new into the parameters of its ``into``.

        Raises Cancelled; RuntimeError where the task's loss can't be computed for several at once.
        """
        self._module.train()
        rows, lr = self._rows, self._solver.lr
        minibatches = [
            Minibatches(rows.sizes[job.arrival.device], self._solver, job.arrival.seed)
            for job in jobs
        ]
        steps = [
            job.arrival.steps or (job.arrival.epochs or 0) * own.epoch
            for job, own in zip(jobs, minibatches, strict=True)
        ]
        # The longest first: those still at work are the first so many.
        order = sorted(range(len(jobs)), key=lambda one: -steps[one])
        ordered = [jobs[one] for one in order]
        start = self._stack([job.base.parameters for job in ordered])
        correction = self._correction(ordered)
        x, momentum = start.clone(), torch.zeros_like(start) if self._solver.momentum else None
        losses = torch.zeros(len(jobs), dtype=torch.float64, device=self._where)
        for step in range(max(steps)):
            if self._cancelled():
                raise Cancelled
            active = [one for one in order if steps[one] > step]
            drawn = [minibatches[one].next() for one in active]
            for part in _by_size(drawn):
                batch = rows.take(
                    [jobs[active[place]].arrival.device for place in part],
                    [drawn[place] for place in part],
                )
                at = slice(len(part)) if len(part) == len(active) else torch.tensor(part)
                gradient, loss = self._gradient(x[at], *batch)
                g = self._direction(gradient, x[at], start[at])
                if correction is not None:
                    g = g + correction[at]
                if momentum is not None:
                    momentum[at] = g = momentum[at] * self._solver.momentum + g
                x[at] -= lr * g
                losses[at] += loss
        return self._results(jobs, order, steps, x, start, correction, losses)

    def _stack(self, vectors: Sequence[Any]) -> torch.Tensor:
        return torch.from_numpy(np.stack(vectors)).to(self._where)

    def _correction(self, jobs: Sequence[Job]) -> torch.Tensor | None:
        """c - c_i of each; None without SCAFFOLD."""
        if not isinstance(self._solver, Scaffold):
            return None
        c = self._stack([job.base.controls for job in jobs])
        known = [(n, job.device_control) for n, job in enumerate(jobs)]
        for n, c_i in known:
            if c_i is not None:
                c[n] -= torch.tensor(c_i).to(self._where)
        return c

    def _direction(
        self, gradient: torch.Tensor, x: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """g before SCAFFOLD's correction and momentum, as :func:`trainer.solvers.solve` has it."""
        g, solver = gradient, self._solver
        if solver.clip_norm is not None:
            norm = torch.linalg.vector_norm(g, dim=1, keepdim=True)
            g = g * (solver.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        if solver.weight_decay:
            g = g + solver.weight_decay * x
        if isinstance(solver, Proximal) and solver.rho:
            g = g + solver.rho * (x - start)
        return g

    def _results(
        self,
        jobs: Sequence[Job],
        order: Sequence[int],
        steps: Sequence[int],
        x: torch.Tensor,
        start: torch.Tensor,
        correction: torch.Tensor | None,
        losses: torch.Tensor,
    ) -> list[Trained]:
        new, means = x.cpu().numpy(), losses.tolist()
        controls = None
        if correction is not None:
            done = torch.tensor([steps[one] for one in order], device=self._where)
            controls = (start - x) / (done[:, None] * self._solver.lr) - correction
        trained: dict[int, Trained] = {}
        for place, one in enumerate(order):
            jobs[one].into.parameters[:] = new[place]
            trained[one] = Trained(
                steps[one], self._rows.sizes[jobs[one].arrival.device], means[place] / steps[one],
                controls[place].cpu().numpy() if controls is not None else None,
            )  # fmt: skip
        return [trained[one] for one in range(len(jobs))]


class _Gradient:
    """(gradient, loss) of several models: by ``torch.func``, what comes often by a trace of it.

    ``torch.func`` takes a millisecond of Python a step, whatever is computed; a trace takes less,
    but holds for one shape, and making it takes as long as a hundred steps.
    """

    def __init__(self, function: Callable[..., Any], *, traceable: bool) -> None:
        self._function = function
        self._traceable = traceable
        self._seen: Counter[tuple[torch.Size, ...]] = Counter()
        self._traces: dict[tuple[torch.Size, ...], Callable[..., Any]] = {}

    def __call__(self, x: torch.Tensor, *batch: torch.Tensor) -> Any:
        """Of each model in ``x`` on its minibatch."""
        shapes = (x.shape, *(column.shape for column in batch))
        trace = self._traces.get(shapes)
        if trace is not None:
            return trace(x, *batch)
        self._seen[shapes] += 1
        if self._traceable and self._seen[shapes] == _OFTEN:
            graph = make_fx(self._function)(x, *batch)
            self._traces[shapes] = torch.jit.trace(  # type: ignore[no-untyped-call]
                graph, (x, *batch), check_trace=False
            )
        return self._function(x, *batch)


class _WeightsFirst(TorchFunctionMode):
    """Linear layers as W x^T: stacked, this is twice as fast as x W^T where W has few rows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not nn.functional.linear or kwargs or args[0].dim() != 2:
            return func(*args, **(kwargs or {}))
        x, weight, *bias = args
        y = (weight @ x.mT).mT
        return y + bias[0] if bias and bias[0] is not None else y


class _Loss(nn.Module):
    """The task's loss as a module, whose weights can be given from outside."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._task = task

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        """The loss on one minibatch."""
        return self._task.loss(self.model, batch)


def _by_size(drawn: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of minibatches, those of one size together."""
    found: dict[int, list[int]] = {}
    for place, rows in enumerate(drawn):
        found.setdefault(len(rows), []).append(place)
    return list(found.values())
