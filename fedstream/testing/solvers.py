"""Checks for solvers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from pydantic import ValidationError

from fedstream.core.errors import FedstreamError
from fedstream.core.layout import Model
from fedstream.runtime.plugins import words
from fedstream.testing.rules import Fault, made
from fedstream.trainer.solvers import SOLVERS, Cancelled, Solver, Trained, Work
from fedstream.trainer.task import Task
from fedstream.trainer.workspace import Workspace

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import TensorDataset


class _Small(Task):
    """Twenty samples of two classes, and a model with dropout."""

    def model(self) -> nn.Module:
        from torch import nn

        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))

    def device_data(self, device: int) -> TensorDataset:
        import torch
        from torch.utils.data import TensorDataset

        x = torch.randn(20, 3, generator=torch.Generator().manual_seed(device))
        return TensorDataset(x, (x[:, 0] > 0).long())


def check_solver(
    solver: type[Solver] | Solver, *, steps: int = 7, seed: int = 0, **keys: object
) -> None:
    """Check that a solver fulfils fedstream's requirements. Raises Fault.

    On a small model, it checks that ``steps`` steps give the same bits when they are repeated, and
    when they are interrupted and resumed; that ``direction`` doesn't write to its arguments; and
    that the result is finite and its numbers are valid.

    ``solver`` is an object, or a class and the ``keys`` that it needs.
    """
    name = solver.__name__ if isinstance(solver, type) else type(solver).__name__
    try:
        one = made(SOLVERS, solver, keys)
        _check_direction(name, one)
        whole, result = _trained(one, steps, seed)
        if not np.isfinite(whole.floats).all():
            raise Fault(f"{name}: the trained model is not finite")
        if result.steps < 1 or result.samples < 0:
            raise Fault(f"{name}: train() returned {result}: expected at least 1 step")
        if _trained(one, steps, seed)[0].digest() != whole.digest():
            raise Fault(f"{name}: the same task gives another model the second time")
        for after in (1, steps - 1):
            saved = _interrupted(one, steps, seed, after)
            if saved is None:
                continue  # a user's training loop need not be interruptible
            _trained(one, steps, seed + 1)  # to reveal state that is left in this process
            resumed, _ = _trained(one, steps, seed, resume=saved)
            if resumed.digest() != whole.digest():
                raise Fault(
                    f"{name}: interrupted after {after} of {steps} steps and resumed, it gives "
                    "another model: keep what lasts between steps in at.remembered()"
                )
    except Fault:
        raise
    except ValidationError as error:
        raise Fault(f"{name}: {error}") from error
    except Exception as error:
        said = str(error) if isinstance(error, FedstreamError) else words(error)
        raise Fault(f"{name}: {said}") from error


def _trained(
    solver: Solver,
    steps: int,
    seed: int,
    *,
    cancelled: Callable[[], bool] = lambda: False,
    resume: Workspace | None = None,
) -> tuple[Model, Trained]:
    import torch

    from fedstream.trainer.task import initial
    from fedstream.trainer.vector import layout_of, load, read

    task = _Small()
    module = task.model()
    load(initial(task, seed), module)
    torch.seed()  # earlier draws must not matter
    work = Work(
        device=0,
        task="t",
        version=0,
        seed=seed,
        steps=steps,
        epochs=None,
        solver=solver,
        cancelled=cancelled,
        resume=resume,
    )
    result = task.train(module, task.device_data(0), work)
    model = Model(layout_of(module))
    read(module, model)
    return model, result


def _interrupted(solver: Solver, steps: int, seed: int, after: int) -> Workspace | None:
    """The workspace after some steps; None if the solver can't be interrupted."""
    asked = count()
    try:
        _trained(solver, steps, seed, cancelled=lambda: next(asked) >= after)
    except Cancelled as cancelled:
        saved = cancelled.workspace
        return None if saved is None else Workspace.decode(saved.encode())
    return None


def _check_direction(name: str, solver: Solver) -> None:
    """Raise Fault if ``direction`` changes the gradient, x or x_tau."""
    import torch

    from fedstream.trainer.solvers import Iterate

    given = [[torch.full((2, 3), value), torch.full((3,), value)] for value in (1.0, 2.0, 3.0, 4.0)]
    before = [[part.clone() for part in parts] for parts in given]
    g, x, start, correction = given
    solver.direction(g, Iterate(x, start, correction if solver.controls else ()))
    names = ("g", "at.x", "at.start", "at.correction")
    for what, parts, old in zip(names, given, before, strict=True):
        if not all(map(torch.equal, parts, old)):
            raise Fault(f"{name}: direction() writes to {what}")
